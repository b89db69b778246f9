"""wandb, only when ``logging.logger`` names it; without a key it records offline and says so once."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from cosmos_rl.tracking.older_names import add_older_names
from cosmos_rl.tracking.tracked_run import TrackedRun
from cosmos_rl.utils.logging import logger


class WandbLogger:
    """One wandb run per run folder; a resumed run continues it under the same id.

    Offline, each start of the run leaves a folder of its own with that id, and ``wandb sync`` joins them.
    """

    def __init__(self, about: TrackedRun) -> None:
        """Start or continue the wandb run; never asks for a key."""
        mode = os.environ.get("WANDB_MODE")
        if mode is None and not _has_key():
            mode = "offline"
            _warn_offline(about, "no API key found")
        try:
            self._run = _init(about, mode)
        except wandb.Error as error:  # a key that is refused, a server that does not answer
            if mode not in (None, "online"):
                raise
            wandb.teardown()
            _warn_offline(about, str(error))
            self._run = _init(about, "offline")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The metrics of one step."""
        self._run.log(add_older_names(metrics), step=step)

    def log_images(self, step: int, key: str, files: Sequence[Path], captions: Sequence[str]) -> None:
        """Images with captions under ``key``."""
        images = [wandb.Image(str(f), caption=c) for f, c in zip(files, captions, strict=True)]
        self._run.log({key: images}, step=step)

    def finish(self) -> None:
        """Flush and end the run."""
        self._run.finish()


def _init(about: TrackedRun, mode: Any) -> Any:
    return wandb.init(
        project=about.project,
        group=about.group,
        name=about.name,
        id=about.run_id,
        resume=None if mode == "offline" else "allow",  # offline wandb ignores it with a warning
        dir=str(about.folder),
        config=about.config,
        mode=mode,
    )


def _warn_offline(about: TrackedRun, why: str) -> None:
    logger.warning(f"wandb: {why}; recording offline under {about.folder / 'wandb'} (wandb sync uploads it)")


def _has_key() -> bool:
    """A key in the environment, or one stored by ``wandb login``."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    for name in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        path = Path(name or "").expanduser()
        if path.is_file() and "wandb" in path.read_text(errors="replace", encoding="utf-8"):
            return True
    return False
