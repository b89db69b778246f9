"""The noise that EDM's samplers add, its factor and levels: from the configuration to what is recorded and trained."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from tests.rl.test_sizes import sized_prompts
from tests.support.flow_grpo_plane import FLOW, JOB, Run, tables_of
from tests.support.nft_runs import PROMPTS, nft_toml, nft_trainer
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import (
    POINT,
    bump,
    toy_config,
    toy_trainer,
)


@pytest.mark.parametrize("solver", ["1euler", "2ab"])
def test_the_factor_of_the_added_noise_reaches_the_steps_and_what_is_trained(solver: str) -> None:
    churned = {**FLOW, "solver": solver, "noise_level": 0.5}
    plain, scaled = (
        Run(tables_of(**{"policy.diffusers.sample": {**churned, **factor}})) for factor in ({}, {"noise_scale": 1.3})
    )
    for run in (plain, scaled):
        run.trainer.train_step(0)
    one, other = plain.recorded[0], scaled.recorded[0]
    for name in ("g", "next", "step", "noise"):
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=0)
    np.testing.assert_allclose(other["s"], 1.3 * one["s"], rtol=1e-12)
    np.testing.assert_allclose(other["s"], 1.3 * edm_std(one["next"].numpy(), 0.5 / 10), rtol=1e-6)
    assert torch.equal(other["state"][:, 0], one["state"][:, 0])
    moved = other["state"][:, 1] - one["state"][:, 1]  # by the first step's noise alone
    expected = 0.3 * one["s"][:, :1] * one["noise"][:, 0]
    torch.testing.assert_close(moved.double(), expected.double(), rtol=1e-4, atol=1e-5)


def edm_std(following: np.ndarray, growth: float) -> np.ndarray:
    """``sqrt(raised^2 - before^2)`` of EDM's sigmas over ``1 + raised``, from the raised one as a flow's."""
    raised = following / (1 - following)
    return np.sqrt(raised**2 - (raised / (1 + growth)) ** 2) / (1 + raised)


EDM = [(10 - i) / i for i in range(1, 10)]
"""Levels of EDM of the states after each step of the plane, whose flow sigmas are .9, .8 ... .1."""


def test_noise_is_added_between_two_levels_alone() -> None:
    """Between 0.5 and 8 lie the states after the steps 1 to 5."""
    bounded = {**FLOW, "solver": "1euler", "noise_level": 0.5, "noise_above": 0.5, "noise_below": 8.0}
    tables = tables_of(**{"policy.diffusers.sample": bounded, JOB + "steps": {"choose": "list", "indices": [1, 5]}})
    run = Run(tables)
    run.trainer.train_step(0)
    (one,) = {tuple(row) for row in run.recorded[0]["s"].tolist()}
    raised = [(1 + 0.5 / 10) * level for level in EDM]
    added = [math.sqrt(raised[i] ** 2 - EDM[i] ** 2) / (1 + raised[i]) for i in (1, 5)]
    np.testing.assert_allclose(one, added, rtol=1e-6)
    levels, kernel = run.trainer._sampler.transitions()
    stds = [kernel(index, levels.sigma.tolist()).s for index in range(10)]
    assert [index for index, std in enumerate(stds) if std > 0] == [1, 2, 3, 4, 5]
    flow = np.array([0.9, *(level / (1 + level) for level in raised[1:6]), 0.3, 0.2, 0.1])
    np.testing.assert_allclose(levels.sigma.numpy()[1:10], flow, rtol=1e-6)


@pytest.mark.parametrize(
    ("steps", "without"),
    [
        ({"choose": "list", "indices": [2, 0, 6]}, [0, 6]),
        ({"choose": "list", "indices": [2, -1]}, [0, 6, 7]),
        ({"choose": "window", "size": 2, "within": 0.7}, [0, 6]),
        ({"choose": "first"}, [0, 6, 7]),
    ],
)
def test_a_step_without_noise_is_refused_before_training(steps: dict[str, Any], without: list[int]) -> None:
    bounded = {**FLOW, "solver": "2ab", "noise_level": 0.5, "noise_above": 0.5, "noise_below": 8.0}
    with pytest.raises(UserError) as caught:
        Run(tables_of(**{"policy.diffusers.sample": bounded, JOB + "steps": steps}))
    assert f"train.train_policy.steps: the sampling steps {without} may be trained and have no" in str(caught.value)
    assert "allowed: of [1, 2, 3, 4, 5], by train.train_policy.steps" in str(caught.value)


def test_the_steps_must_have_noise_at_every_size(
    tmp_path: Path, tiny_sd3: Path, use_model: Callable[[type], type]
) -> None:
    """Levels of larger pictures are higher, so that a bound may leave out a step of these alone."""

    @use_model
    class Shifted(SD3Model):
        def sampling_sigmas(self, num_steps: int, scheduler: Any) -> Tensor:
            sigmas = torch.linspace(1.0, 0.0, num_steps + 1)
            shift = 3.0 if self.media_size == (64, 64) else 1.0
            return shift * sigmas / (1 + (shift - 1) * sigmas)

    sampled = {"solver": "1euler", "deterministic_sampling": "false", "num_steps": 4, "noise_below": 4.0}
    options = [f"--policy.diffusers.sample.{key}={value}" for key, value in sampled.items()]
    options += ["--train.train_policy.trainer_type=flow_grpo", "--train.train_policy.steps.choose=first"]
    path, size = nft_toml(tmp_path, tiny_sd3), "--policy.diffusers.buckets={{sizes = [[32, 32], {0}]}}"
    nft_trainer(path, *options, size.format([48, 48]))  # 3 and 1 of EDM after the first two steps
    with pytest.raises(UserError, match=r"the sampling steps \[0\] may be trained and have no noise"):  # 9 and 3
        nft_trainer(path, *options, size.format([64, 64]))
    named = sized_prompts(tmp_path, [{"size": [32, 32]}] * len(PROMPTS))  # no prompt has the larger size
    nft_trainer(path, *options, size.format([64, 64]), f"--train.train_policy.dataset.local_dir={named}")


def test_a_sampler_of_a_users_own_without_the_factor_is_not_sampled_with_one() -> None:
    class Own(PlaneModel):
        def pipeline_with_logprob(self, *, prompt_embeds: Tensor, generator: Any, **keywords: Any) -> Any:
            return super().pipeline_with_logprob(prompt_embeds=prompt_embeds, generator=generator, **keywords)

    sample = {**FLOW, "solver": "1euler", "noise_scale": 1.3}
    tables = tables_of(**{"policy.diffusers.sample": sample, JOB + "trainer_type": "diffusion_nft"})
    trainer = toy_trainer(toy_config(tables), Own(), [POINT] * 2, reward_fns={"bump": bump})
    with pytest.raises(UserError, match=r"found noise_scale, noise_above or noise_below; Own has a pipe"):
        trainer.train_step(0)
