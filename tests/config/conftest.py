"""A configuration file of a small job."""

from collections.abc import Callable
from pathlib import Path

import pytest

SFT = """
[policy]
model_name_or_path = "model"
is_diffusers = true
[train]
output_dir = "out"
"""


@pytest.fixture
def toml(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str = SFT, more: str = "") -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text + more)
        return path

    return write
