"""wandb, only when ``logging.logger`` names it; without a key it records offline and says so once."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_rl.errors import UserError
from cosmos_rl.utils.logging import logger


class WandbLogger:
    """One wandb run per run folder; a resumed run continues it."""

    def __init__(
        self, folder: Path, *, project: str, group: str | None, name: str, run_id: str, config: dict[str, Any]
    ) -> None:
        """Start or continue the wandb run ``run_id``.

        Raises:
            UserError: wandb is not installed.
        """
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                'logging.logger has "wandb", which is not installed: pip install "cosmos_rl[wandb]"'
            ) from error
        self._wandb = wandb
        mode: Any = os.environ.get("WANDB_MODE")
        if mode is None and not (os.environ.get("WANDB_API_KEY") or _has_netrc_key()):
            mode = "offline"
            logger.warning(
                f"wandb: no API key found, recording offline under {folder / 'wandb'} (wandb sync uploads it)"
            )
        self._run = wandb.init(
            project=project,
            group=group,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=config,
            mode=mode,
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_pictures(self, step: int, key: str, files: Sequence[Path], captions: Sequence[str]) -> None:
        """Pictures with captions under ``key``."""
        images = [self._wandb.Image(str(f), caption=c[:100]) for f, c in zip(files, captions, strict=True)]
        self._run.log({key: images}, step=step)

    def finish(self) -> None:
        """Flush and end the run."""
        self._run.finish()


def _has_netrc_key() -> bool:
    """A key stored by ``wandb login``."""
    for name in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        path = Path(name).expanduser() if name else None
        if path is not None and path.is_file() and "wandb" in path.read_text(errors="replace"):
            return True
    return False
