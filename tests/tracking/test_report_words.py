"""How numbers and settings are written in the report."""

import pytest

from cosmos_rl.tracking.report.svg import format_number
from cosmos_rl.tracking.report.words import mask_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('api_key = "a\\"b"', 'api_key = "***"'),
        ("x = { auth_token = 'abc', n = 3 }", 'x = { auth_token = "***", n = 3 }'),
        ("max_tokens = 4096", "max_tokens = 4096"),
        ('url = "https://me:pw@host/x"', 'url = "https://***@host/x"'),
    ],
)
def test_values_of_secret_keys_are_masked(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.12345, "0.1235"),
        (-0.5, "-0.5"),
        (9999.0, "9999"),
        (9999.9, "10k"),
        (576_000.0, "576k"),
        (1.5e6, "1.5M"),
        (-2.5e9, "-2.5G"),
        (3e-4, "3e-4"),
        (1.5e-5, "1.5e-5"),
        (1e15, "1e15"),
    ],
)
def test_numbers_read_well(value: float, text: str) -> None:
    assert format_number(value) == text
