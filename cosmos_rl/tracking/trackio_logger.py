"""trackio, only when ``logging.logger`` names it; a local database in ``<run>/trackio``, no network."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_rl.errors import UserError
from cosmos_rl.tracking.tracked_run import TrackedRun
from cosmos_rl.utils.logging import logger

_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")


class TrackioLogger:
    """One database per run folder; a resumed run continues in it, steps of an interrupted attempt appear twice."""

    def __init__(self, about: TrackedRun) -> None:
        """Open or make the database.

        Raises:
            UserError: trackio takes no project of that name.
        """
        folder = about.folder / "trackio"
        os.environ["TRACKIO_DIR"] = str(folder)  # read once, when trackio is imported
        import trackio
        import trackio.utils

        used = Path(trackio.utils.TRACKIO_DIR)
        if used != folder:
            logger.warning(f"trackio was imported before the run began and writes to {used} instead of {folder}")
        self._trackio = trackio
        try:
            with _stay_local():
                self._run = trackio.init(
                    about.project,
                    name=about.run_id,
                    group=about.group,
                    config=about.config,
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except ValueError as error:
            raise UserError(f"logging.project_name: {error}") from None
        logger.info(f"trackio: look at the run with TRACKIO_DIR={used} trackio show")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_images(self, step: int, key: str, files: Sequence[Path], captions: Sequence[str]) -> None:
        """Copies of the images, ``<key>/<name of the file>`` each."""
        pairs = zip(files, captions, strict=True)
        self._run.log({f"{key}/{f.stem}": self._trackio.Image(f, caption=c) for f, c in pairs}, step=step)

    def finish(self) -> None:
        """Write out what is queued."""
        self._trackio.finish()


@contextlib.contextmanager
def _stay_local() -> Iterator[None]:
    """Within the block trackio finds no server of the environment's and cannot ask the hub who the user is."""
    from huggingface_hub import constants

    environment = {name: os.environ.pop(name) for name in _ELSEWHERE if name in os.environ}
    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        os.environ.update(environment)
