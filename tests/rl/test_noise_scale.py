"""The factor of the noise that EDM's samplers add: from the configuration to what is recorded and trained."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.errors import UserError
from tests.support.flow_grpo_plane import FLOW, JOB, Run, tables_of
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


def test_a_sampler_of_a_users_own_without_the_factor_is_not_sampled_with_one() -> None:
    class Own(PlaneModel):
        def pipeline_with_logprob(self, *, prompt_embeds: Tensor, generator: Any, **keywords: Any) -> Any:
            return super().pipeline_with_logprob(prompt_embeds=prompt_embeds, generator=generator, **keywords)

    sample = {**FLOW, "solver": "1euler", "noise_scale": 1.3}
    tables = tables_of(**{"policy.diffusers.sample": sample, JOB + "trainer_type": "diffusion_nft"})
    trainer = toy_trainer(toy_config(tables), Own(), [POINT] * 2, reward_fns={"bump": bump})
    with pytest.raises(UserError, match=r"sample\.noise_scale: found 1\.3; Own has a pipeline_with_logprob of its own"):
        trainer.train_step(0)
