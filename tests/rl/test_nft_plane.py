"""DiffusionNFT in the plane: it finds the known optimum, and a reward without a bound does not ruin the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl.checkpoint.layout import list_whole_steps, step_dir
from cosmos_rl.errors import UserError
from cosmos_rl.reward.table import ScoringRequest
from cosmos_rl.storage import run_folder
from tests.support.toy_models import FOUR_MODES, PlaneModel
from tests.support.toy_tasks import (
    POINT,
    measure_plane,
    metrics_of,
    plane_tables,
    plane_task,
    run_loop,
    toy_config,
    toy_trainer,
)


def test_the_mixture_is_the_model_at_the_start() -> None:
    """40 steps of the ODE from noise give the mixture: velocity, levels and sampler fit each other."""
    start = measure_plane(PlaneModel())
    assert start.to_base < 0.01
    assert start.to_tilt > 0.7
    noise = torch.randn(400_000, 2, generator=torch.Generator().manual_seed(1))
    clean = FOUR_MODES.draw(400_000, torch.Generator().manual_seed(2))
    noised = 0.5 * clean + 0.5 * noise
    near = (noised - torch.tensor([0.4, 0.7])).norm(dim=1) < 0.05
    expected = (noise - clean)[near].mean(0)
    found = FOUR_MODES.velocity(noised[near], torch.full((int(near.sum()),), 0.5)).mean(0)
    assert int(near.sum()) > 300
    assert (found - expected).abs().max() < 0.15


@pytest.mark.slow
def test_the_exact_tilt_is_reached() -> None:
    """At most 3,000 network evaluations per sample slot; measured by 40 steps of the ODE."""
    steps = 100
    trainer, model = plane_task(0, steps)
    trainer.start(0)
    reports = [trainer.train_step(step) for step in range(steps)]
    assert all(report.applied for report in reports)
    assert reports[-1].metrics["train/nfe"] == model.units <= 3000 * 512
    end = measure_plane(model)
    assert end.to_tilt <= 0.06
    assert 0.62 <= end.reward <= 0.72
    assert 0.4 <= end.to_base <= 0.8  # neither where it began nor a point at the top


UNBOUNDED: dict[str, Any] = {
    "train.train_policy.kl_beta": 0.0,
    "train.train_policy.local_reward.reward_fns": [
        {"function": "tests.support.toy_tasks:rightwards", "clip_min": -1e9, "clip_max": 1e9}
    ],
    "train.train_policy.local_reward.reward_clip_min": -1e9,
    "train.train_policy.local_reward.reward_clip_max": 1e9,
    "train.ckpt.save_freq": 5,
}


def stopped_run(tables: dict[str, Any], folder: Path, error: type[Exception], match: str) -> run_folder.RunFolder:
    """A run on the unbounded reward that ends with ``error``; live weights, checkpoints and exports are finite."""
    config, model = toy_config({**plane_tables(0, 200), **UNBOUNDED, **tables}), PlaneModel()
    trainer = toy_trainer(config, model, [POINT])
    with pytest.raises(error, match=match):
        run_loop(config, trainer, folder)
    assert all(bool(param.isfinite().all()) for param in model.transformer.parameters())
    run = run_folder.find_newest_run(folder)
    assert run is not None
    saved = list_whole_steps(run.checkpoints)
    assert saved
    weights = load_file(step_dir(run.safetensors, saved[-1]) / "model.safetensors")
    assert all(bool(value.isfinite().all()) for value in weights.values())
    return run


def test_the_guard_stops_an_unbounded_reward(tmp_path: Path) -> None:
    tables = {
        "train.train_policy.reward_hacking_guard.enable": True,
        "train.train_policy.reward_hacking_guard.action": "stop",
    }
    run = stopped_run(tables, tmp_path, UserError, "the held-out flow-matching loss is .* times that of the start")
    rows = metrics_of(tmp_path)
    assert rows[-1]["guard/alarms"] >= 1
    assert [row["guard/alarms"] for row in rows if "guard/alarms" in row][:-1] == [0.0] * (len(rows) // 5 - 1)
    assert list_whole_steps(run.checkpoints)[-1] == rows[-1]["step"] <= 30  # what there is, is saved


@pytest.mark.slow
def test_without_the_guard_non_finite_steps_end_the_run(tmp_path: Path) -> None:
    stopped_run({"train.optm_lr": 3e-2}, tmp_path, FloatingPointError, "5 steps in a row .* the weights are finite")


@pytest.mark.parametrize(
    "media", [torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, 3), torch.zeros(2, 3, dtype=torch.float64)]
)
def test_only_vectors_may_be_floats(media: torch.Tensor) -> None:
    ScoringRequest(torch.zeros(2, 3), ["a", "b"], [{}, {}], [0, 1])
    with pytest.raises(ValueError, match="not uint8"):
        ScoringRequest(media, ["a", "b"], [{}, {}], [0, 1])
