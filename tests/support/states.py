"""What runs leave behind: the tensors of their checkpoints and the numbers that they logged."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from cosmos_rl.checkpoint import layout
from cosmos_rl.tracking.metrics import read_metrics


def saved_state(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    policy = layout.policy_dir(run / "checkpoints", step)
    stored: Any = FileSystemReader(policy).read_metadata().state_dict_metadata
    state = {key: torch.zeros(tuple(meta.size), dtype=meta.properties.dtype) for key, meta in stored.items()}
    dcp.load(state, checkpoint_id=policy, no_dist=True)
    return state


def assert_same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert different == []


def drop_steps_after(run: Path, step: int) -> None:
    """Make the run folder look as if the process had died right after the save of ``step``."""
    for folder in (run / "checkpoints", run / "safetensors"):
        for n in layout.list_committed_steps(folder):
            if n > step:
                shutil.rmtree(layout.step_dir(folder, n))


def trace(run: Path) -> np.ndarray:
    """Loss and gradient norm of each step, ``[steps, 2]``."""
    keys = ("train/loss_mean", "optim/grad_norm")
    return np.array([[line[key] for key in keys] for line in read_metrics(run / "metrics.jsonl")])
