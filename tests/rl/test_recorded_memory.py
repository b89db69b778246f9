"""What a rollout records for FlowGRPO: the memory that it takes, and that too much is refused before a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.check.rl_estimate import rl_memory
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.pipeline_files import read_pipeline
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.policy.config.recorded import recorded_steps
from cosmos_rl.reward import batch_reward
from tests.support.checks import check
from tests.support.nft_runs import nft_toml, nft_trainer
from tests.support.storages import Storages
from tests.support.toy_models import ToyModel
from tests.support.toy_tasks import POINT, toy_config, toy_trainer

JOB = "train.train_policy."
SIZE = 4096
"""Elements of a latent: what is not recorded is small next to it."""
FLOW = {"num_steps": 16, "guidance_scale": 1.0, "solver": "flow", "deterministic_sampling": False, "noise_level": 0.7}
FLOW_OPTIONS = (
    "--train.train_policy.trainer_type=flow_grpo",
    "--policy.diffusers.weight_copy_decay_type=0",
    "--policy.diffusers.sample.solver=flow",
    "--policy.diffusers.sample.deterministic_sampling=false",
)


class Damping(nn.Module, PeftAdapterMixin):
    """A velocity for each element of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.zeros(SIZE))

    def forward(self, latents: Tensor, _sigma: Tensor, _labels: Tensor) -> Tensor:
        return latents * self.rate


class Line(ToyModel):
    """Vectors of ``SIZE`` numbers, which are their own media."""

    def __init__(self) -> None:
        super().__init__(Damping(), ["a point"], (SIZE,))

    def decode(self, latents: Tensor) -> Tensor:
        return latents[:, :2].float()

    def to_media(self, visuals: Tensor) -> Tensor:
        return visuals.to("cpu", torch.float32)


@batch_reward
def first(media: np.ndarray) -> np.ndarray:
    return media[:, 0].astype(np.float64)


@batch_reward
def first_where_positive(media: np.ndarray) -> list[float | None]:
    return [float(value) if value > -1 else None for value in media[:, 0]]


def config_of(changes: Mapping[str, Any]) -> Config:
    return toy_config(
        {
            "policy.diffusers.sample": FLOW,
            "train.train_batch_per_replica": 16,
            "train.max_num_steps": 2,
            "rollout.n_generation": 8,
            JOB + "trainer_type": "flow_grpo",
            JOB + "mini_batch": 8,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("changes", "tensors", "least"),
    [
        pytest.param({}, 2, 1.0, id="one step"),
        pytest.param({"rollout.batch_size": 8}, 2, 1.0, id="chunks"),
        pytest.param({JOB + "batch_size_per_optimize": 8}, 3, 0.75, id="two steps"),
        pytest.param({JOB + "mu_iterations": 2}, 3, 1.0, id="two passes"),
        pytest.param({JOB + "max_missing_frac": 0.9}, 2, 0.8, id="left out"),
    ],
)
def test_a_step_holds_what_it_recorded_twice_and_no_more(changes: dict[str, Any], tensors: int, least: float) -> None:
    config = config_of(changes)
    reward = first_where_positive if "missing" in str(changes) else first
    trainer = toy_trainer(config, Line(), [POINT] * 2, reward_fns={"first": reward})
    recorded = recorded_steps(config, SIZE)
    assert recorded is not None
    assert recorded.kept == 16 * 15 * (tensors * 4 * SIZE + 32)
    assert recorded.height == 2 * recorded.kept
    storages = Storages()
    with storages:
        report = trainer.train_step(0)
    assert (report.metrics["rollout/missing"] > 0) == (reward is not first)
    # next to it: latents on their way, clean latents, rows of a micro-batch, weights and gradients
    assert least * recorded.height <= storages.most_bytes <= 1.15 * recorded.height


def test_more_than_is_allowed_is_refused_with_what_would_lower_it() -> None:
    needed = 2 * 16 * 15 * (2 * 4 * SIZE + 32) / 1e9
    for changes, ways in (
        ({}, ["policy.diffusers.timesteps_fraction", "train.train_batch_per_replica"]),
        ({"train.global_batch_size": 16, JOB + "steps.choose": "window", JOB + "steps.size": 15}, ["steps.size"]),
        ({JOB + "steps.choose": "list", JOB + "steps.indices": list(range(15))}, ["steps.indices", "more ranks"]),
    ):
        allowed, refused = ({**changes, JOB + "steps.max_gb": needed * factor} for factor in (1.001, 0.999))
        toy_trainer(config_of(allowed), Line(), [POINT] * 2, reward_fns={"first": first})
        with pytest.raises(UserError) as error:
            toy_trainer(config_of(refused), Line(), [POINT] * 2, reward_fns={"first": first})
        text = str(error.value)
        assert "16 samples of a rank x 15 trained steps x 2 tensors (state, noise) of 16384 bytes" in text
        assert f"= {needed:.3g} GB per rank" in text
        assert all(way in text for way in ways)
        assert "one optimiser step" not in text


def test_velocities_can_be_spared_where_one_optimiser_step_would_do() -> None:
    with pytest.raises(UserError, match="3 tensors .state, noise, velocity.*one optimiser step, without velocities"):
        changes = {JOB + "steps.max_gb": 1e-6, JOB + "batch_size_per_optimize": 8}
        toy_trainer(config_of(changes), Line(), [POINT] * 2, reward_fns={"first": first})


def test_several_passes_of_shuffled_batches_on_several_ranks_are_counted() -> None:
    changes = {"policy.parallelism.dp_shard_size": 2, JOB + "batch_size_per_optimize": 4, JOB + "mu_iterations": 3}
    recorded = recorded_steps(config_of(changes), SIZE)
    assert recorded is not None
    assert (recorded.samples, recorded.times) == (8, 3)  # no more than both ranks' samples travel to one


def test_finished_samples_record_nothing_and_are_not_bounded() -> None:
    config = config_of({JOB + "trainer_type": "diffusion_nft", JOB + "steps.max_gb": 1e-9})
    assert recorded_steps(config, SIZE) is None
    toy_trainer(config, Line(), [POINT] * 2, reward_fns={"first": first})


def test_check_counts_recorded_steps_and_refuses_what_a_launch_refuses(
    tmp_path: Path, tiny_sd3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = nft_toml(tmp_path, tiny_sd3)
    code, report, _ = check(capsys, "--config", path, *FLOW_OPTIONS)
    assert code == 0
    config = load_config(path, list(FLOW_OPTIONS))
    estimate = rl_memory(config, read_pipeline(config.policy), trained=0, shards=1)
    rollouts, _ = nft_trainer(path, *FLOW_OPTIONS)._roll_out(0, nft_trainer(path, *FLOW_OPTIONS)._new_conditions())
    assert estimate.recorded == 2 * sum(value.nbytes for value in rollouts.recorded.values())
    assert f"of it, in host memory: recorded steps {estimate.recorded / 1e3:.3g} kB" in report
    bound = "--train.train_policy.steps.max_gb=1e-5"
    capsys.readouterr()
    assert main(["check", "--config", str(path), *FLOW_OPTIONS, bound]) == 2
    refused = capsys.readouterr().err
    assert "a launch would be refused" in refused
    assert "train.train_policy.steps.max_gb: found 1e-05; recorded steps take 16 samples of a rank x 2" in refused
    assert main(["--config", str(path), *FLOW_OPTIONS, bound]) == 2
    assert "train.train_policy.steps.max_gb: found 1e-05" in capsys.readouterr().err


def test_of_several_sizes_the_largest_is_bounded(
    tmp_path: Path, tiny_sd3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, sizes = nft_toml(tmp_path, tiny_sd3), "--policy.diffusers.buckets={sizes = [[32, 32], [64, 64]]}"
    config = load_config(path, [*FLOW_OPTIONS, sizes])
    needed = rl_memory(config, read_pipeline(config.policy), trained=0, shards=1).recorded / 1e9
    for options in ((), (sizes,)):  # without the larger size it is a quarter
        bound = f"--train.train_policy.steps.max_gb={0.99 * needed}"
        assert main(["check", "--config", str(path), *FLOW_OPTIONS, bound, *options]) == (2 if options else 0)
    assert "train.train_policy.steps.max_gb: found" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"steps\.max_gb: found"):
        nft_trainer(path, *FLOW_OPTIONS, bound, sizes)


def test_media_of_a_step_with_recorded_steps_are_gone_while_it_learns(
    tmp_path: Path, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storages, learning = Storages(3 * 32 * 32), list[int]()
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), *FLOW_OPTIONS)
    step = trainer._optimizer_step

    def noticing(*given: Any) -> Any:
        learning.append(storages.count_bytes(torch.uint8, 3 * 32 * 32))
        return step(*given)

    monkeypatch.setattr(trainer, "_optimizer_step", noticing)
    with storages:
        report = trainer.train_step(0)
        shown = len(report.gallery)
        assert storages.most_images >= 16 * 3 * 32 * 32
        assert learning == [shown * 3 * 32 * 32]
        del report
        torch.zeros(1)
        assert storages.count_bytes(torch.uint8, 3 * 32 * 32) == 0
