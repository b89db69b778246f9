"""Where files that runs share are kept: ``$COSMOS_CACHE_DIR``, which is ``~/.cache/cosmos_rl`` unless it is set."""

import os
from pathlib import Path


def facts_folder() -> Path:
    """What was measured of pipelines."""
    return _find_root() / "facts"


def tars_folder() -> Path:
    """Where the members of tar files are."""
    return _find_root() / "tars"


def _find_root() -> Path:
    return Path(os.environ.get("COSMOS_CACHE_DIR") or Path.home() / ".cache" / "cosmos_rl").expanduser()
