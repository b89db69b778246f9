"""Runs a training job in this process, the way `worker_entry` does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl.checkpoint.layout import policy_dir
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.trainer import run
from cosmos_rl.storage import run_folder
from cosmos_rl.tools.dataset.diffusers_dataset import training_pairs, validation_data


@dataclass
class Stop:
    """A stop request that a test sets by hand."""

    requested: str | None = None


def train(
    config_path: Path, *overrides: str, resume: tuple[Path, int] | None = None, expect: int = 0, **kwargs: Any
) -> Path:
    """Train; the run folder. ``resume`` is (run folder, step) of a checkpoint to go on from, in the same folder."""
    config = load_config(config_path, list(overrides))
    folder = run_folder.RunFolder(resume[0]) if resume else run_folder.create(Path(config.train.output_dir))
    kwargs = {"dataset": training_pairs, "val_dataset": validation_data, "stop": Stop(), **kwargs}
    resume_from = policy_dir(folder.checkpoints, resume[1]) if resume else None
    code = run(config, folder, resume_from=resume_from, **kwargs)
    assert code == expect
    return folder.root
