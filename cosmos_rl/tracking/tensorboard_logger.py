"""tensorboard event files in ``<run>/tensorboard``, only when ``logging.logger`` names it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from cosmos_rl.tracking.tracked_run import TrackedRun


class TensorboardLogger:
    """One folder of event files per run; a resumed run hides what an interrupted attempt logged beyond its start."""

    def __init__(self, about: TrackedRun) -> None:
        """Open a new event file."""
        purge_step = None
        if about.start:
            purge_step = about.start + 1
        self._writer = SummaryWriter(str(about.folder / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The numbers of one step as scalars; tensorboard takes nothing else."""
        for key, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(key, value, step)

    def log_images(self, step: int, key: str, files: Sequence[Path], captions: Sequence[str]) -> None:
        """Images under ``<key>/<name of the file>``, so that the slider of each shows one prompt over the steps."""
        for file in files:
            self._writer.add_image(f"{key}/{file.stem}", np.asarray(Image.open(file)), step, dataformats="HWC")
        lines = (f"{file.stem}: {caption}" for file, caption in zip(files, captions, strict=True))
        self._writer.add_text(f"{key}/prompts", "  \n".join(lines), step)

    def finish(self) -> None:
        """Write out what is buffered."""
        self._writer.close()
