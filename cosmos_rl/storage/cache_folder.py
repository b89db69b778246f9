"""Where files that runs share are kept: ``$COSMOS_CACHE_DIR``, which is ``~/.cache/cosmos_rl`` unless it is set.

Cached latents and texts have a place of their own.
"""

import os
from pathlib import Path
from typing import NamedTuple


class TensorPlace(NamedTuple):
    """Where cached latents and texts are."""

    key: str
    """What says so: a dotted key or an environment variable."""
    value: str
    """Its value."""
    folder: Path
    advice: str
    """What to do where nothing can be written there."""


def place_tensors(cache_dir: str | None, output_dir: str) -> TensorPlace:
    """The place by ``train.train_policy.cache.dir``, else ``$COSMOS_CACHE``, else below ``train.output_dir``."""
    variable = os.environ.get("COSMOS_CACHE")
    if cache_dir:
        then = f"$COSMOS_CACHE, {variable}" if variable else "in train.output_dir"
        advice = f"name another folder, or leave it out: then it is {then}"
        return TensorPlace("train.train_policy.cache.dir", cache_dir, Path(cache_dir).expanduser(), advice)
    if variable:
        advice = "name another folder, or unset it: then it is in train.output_dir"
        return TensorPlace("COSMOS_CACHE", variable, Path(variable).expanduser(), advice)
    advice = "choose another train.output_dir, or name a folder in train.train_policy.cache.dir"
    return TensorPlace("train.output_dir", output_dir, Path(output_dir).expanduser() / "cache", advice)


def facts_folder() -> Path:
    """What was measured of pipelines."""
    return _find_root() / "facts"


def tars_folder() -> Path:
    """Where the members of tar files are."""
    return _find_root() / "tars"


def _find_root() -> Path:
    return Path(os.environ.get("COSMOS_CACHE_DIR") or Path.home() / ".cache" / "cosmos_rl").expanduser()
