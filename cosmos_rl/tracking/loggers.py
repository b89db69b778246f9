"""The trackers of a run behind one small interface: wandb, tensorboard, trackio, and functions of the user's."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.tracking.tracked_run import TrackedRun
from cosmos_rl.utils.logging import logger

LoggerFn = Callable[[dict[str, Any], int], None]
_PACKAGES = ("wandb", "tensorboard", "trackio")  # each is the name of the choice, of the package and of our extra


class MetricLogger(Protocol):
    """Where metrics and images of a run are shown in addition to ``metrics.jsonl``."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The metrics of one step."""
        ...

    def log_images(self, step: int, key: str, files: Sequence[Path], captions: Sequence[str]) -> None:
        """Images with captions under ``key``."""
        ...

    def finish(self) -> None:
        """Write out what is left; nothing is logged afterwards."""
        ...


def require_installed(names: Sequence[str]) -> None:
    """Raise ``UserError`` for trackers in ``logging.logger`` whose package is missing; imports none of them."""
    missing = [name for name in _PACKAGES if name in names and importlib.util.find_spec(name) is None]
    if missing:
        named = ", ".join(f'"{name}"' for name in missing)
        extras = ",".join(missing)
        raise UserError(f'logging.logger has {named}, not installed here: pip install "cosmos_rl[{extras}]"')


def start_loggers(config: Config, run: RunFolder, start: int, functions: Sequence[LoggerFn] = ()) -> list[MetricLogger]:
    """The trackers that ``logging.logger`` names and the user's ``functions``; the list may be empty.

    Once a tracker has started, its errors are warnings: a server that is away must not end a training run.

    Raises:
        UserError: a tracker is not installed.
    """
    table = config.logging
    require_installed(table.logger)
    run_name = str(run.root)
    if table.experiment_name:
        run_name = f"{table.experiment_name}/{run.name}"
    about = TrackedRun(
        run.root, table.project_name, table.group_name, run_name, run.name, config.model_dump(mode="json"), start
    )
    trackers: list[MetricLogger] = [Guarded(name, _start(name, about)) for name in _PACKAGES if name in table.logger]
    named = ((getattr(fn, "__name__", repr(fn)), fn) for fn in functions)
    return trackers + [Guarded(f"custom logger {name!r}", FunctionLogger(fn)) for name, fn in named]


def _start(name: str, about: TrackedRun) -> MetricLogger:
    if name == "wandb":
        from cosmos_rl.tracking.wandb_logger import WandbLogger

        return WandbLogger(about)
    if name == "tensorboard":
        from cosmos_rl.tracking.tensorboard_logger import TensorboardLogger

        return TensorboardLogger(about)
    from cosmos_rl.tracking.trackio_logger import TrackioLogger

    return TrackioLogger(about)


class FunctionLogger:
    """A user's ``fn(metrics, step)``; it is shown no images."""

    def __init__(self, function: LoggerFn) -> None:
        self._function = function

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Call the function with a dictionary of its own."""
        self._function(dict(metrics), step)

    def log_images(self, step: int, key: str, files: Sequence[Path], captions: Sequence[str]) -> None:
        """Nothing: the signature has no argument for images."""

    def finish(self) -> None:
        """Nothing."""


class Guarded:
    """A tracker whose errors are warnings, one for the whole run; each later call is tried again."""

    def __init__(self, name: str, inner: MetricLogger) -> None:
        self._name = name
        self._inner = inner
        self._warned = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The metrics of one step, or a warning."""
        self._try(f"at step {step}", lambda: self._inner.log(step, metrics))

    def log_images(self, step: int, key: str, files: Sequence[Path], captions: Sequence[str]) -> None:
        """Images, or a warning."""
        self._try(f"at step {step}", lambda: self._inner.log_images(step, key, files, captions))

    def finish(self) -> None:
        """End the tracker, or warn."""
        self._try("at the end", self._inner.finish)

    def _try(self, when: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if not self._warned:
                logger.warning(
                    f"{self._name} failed {when}: {error!r}; training continues, metrics.jsonl has everything, "
                    "further errors of it are not shown"
                )
            self._warned = True
