"""Runs a training job in this process, the way `worker_entry` does."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cosmos_rl.checkpoint.layout import policy_dir
from cosmos_rl.distributed.context import process_group
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.policy.config.jobs import job_kind
from cosmos_rl.policy.trainer import run
from cosmos_rl.policy.trainer.task import Task
from cosmos_rl.storage import run_folder

TaskT = TypeVar("TaskT", bound=Task)


_DATA = {
    "pairs": ("training_pairs", "validation_data"),
    "preferences": ("training_preferences", "validation_data"),
    "prompts": ("training_prompts", "validation_prompts"),
}
"""What the bundled script for a form of data calls its data sets."""


def bundled_data(config: Config) -> dict[str, Any]:
    """The data sets of the script that a command without one takes."""
    kind = job_kind(config)
    script = importlib.import_module(kind.script)
    training, validation = _DATA[kind.data]
    return {"dataset": getattr(script, training), "val_dataset": getattr(script, validation)}


@dataclass
class Stop:
    """A stop request that a test sets by hand."""

    requested: str | None = None


def train(
    config_path: Path, *overrides: str, resume: tuple[Path, int] | None = None, expect: int = 0, **kwargs: Any
) -> Path:
    """Train; the run folder. ``resume`` is (run folder, step) of a checkpoint to resume, in the same folder."""
    config, folder, resume_from = _prepare(config_path, overrides, resume)
    kwargs = {**bundled_data(config), "stop": Stop(), **kwargs}
    code = run(config, folder, resume_from=resume_from, **kwargs)
    assert code == expect
    return folder.root


def train_task(
    build: Callable[..., TaskT],
    config_path: Path,
    *overrides: str,
    resume: tuple[Path, int] | None = None,
    expect: int = 0,
    custom_logger_fns: Any = (),
    stop: Stop | None = None,
    **data: Any,
) -> tuple[Path, TaskT]:
    """Train the task that ``build(config, context, dataset=…, val_dataset=…)`` makes; the run folder and the task."""
    from cosmos_rl.policy.trainer.loop import TrainLoop

    config, folder, resume_from = _prepare(config_path, overrides, resume)
    with process_group(config.train.device) as context:
        task = build(config, context, **{**bundled_data(config), **data})
        loop = TrainLoop(config, folder, context, task, custom_logger_fns, {}, stop or Stop())
        assert loop.run(resume_from) == expect
    return folder.root, task


def _prepare(
    config_path: Path, overrides: tuple[str, ...], resume: tuple[Path, int] | None
) -> tuple[Config, run_folder.RunFolder, Path | None]:
    """Configuration, run folder, and the checkpoint to resume."""
    config = load_config(config_path, list(overrides))
    if resume is None:
        return config, run_folder.create_run(Path(config.train.output_dir)), None
    folder = run_folder.RunFolder(resume[0])
    return config, folder, policy_dir(folder.checkpoints, resume[1])
