"""What the tests of pages share."""

import os

import pytest

from tests.support.browser import find_browser


@pytest.fixture
def program() -> str:
    """The browser; where there is none the test is skipped, or fails when COSMOS_TEST_BROWSER = 1 demands one."""
    found = find_browser()
    if found is None:
        missing = "no Chromium is installed (Debian and Ubuntu: apt-get install chromium)"
        if os.environ.get("COSMOS_TEST_BROWSER") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return found
