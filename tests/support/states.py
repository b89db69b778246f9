"""What runs leave behind: the tensors of their checkpoints and the numbers that they logged."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from cosmos_rl.checkpoint import layout
from cosmos_rl.tracking.metrics import read_metrics

_OF_THE_MACHINE = ("time/", "perf/", "gpu/")
"""Beginnings of metrics that no two runs share."""


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


def logged_numbers(run: Path, *of_a_rank: str) -> list[dict[str, Any]]:
    """What each step logged, without what the machine decides and metrics that begin with one of ``of_a_rank``."""
    left_out = (*_OF_THE_MACHINE, *of_a_rank)
    lines = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(left_out)} for line in lines]


def assert_same_bits(run: Path, reference: Path, steps: int, *of_a_rank: str) -> None:
    """Every tensor of the checkpoint after ``steps`` steps, and as text every number that they logged."""
    assert_same_state(saved_state(run, steps), saved_state(reference, steps))
    found, expected = (logged_numbers(one, *of_a_rank) for one in (run, reference))
    assert len(expected) == steps
    assert all("train/loss_mean" in line for line in expected)
    assert list(map(json.dumps, found)) == list(map(json.dumps, expected))


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
