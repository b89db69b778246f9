"""What a medium gives of a sample, like its first frame, is not learnt from by any online algorithm."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cosmos_rl.policy.config.jobs import JOBS
from cosmos_rl.policy.model.diffusers.cond import Cond, Negative
from tests.support.flow_grpo_plane import FLOW, JOB
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import POINT, bump, toy_config, toy_trainer

STEPS: dict[str, Any] = {"policy.diffusers.sample": {**FLOW, "num_steps": 6}, JOB + "norm_penalty": 0.2}
OPTIONS: dict[str, dict[str, Any]] = {
    "flow_grpo": {**STEPS, JOB + "epsilon_low": 0.05},
    "flow_grpo, mask": {**STEPS, JOB + "kl_mask_threshold": 1e-3},
    "flow_grpo, guard": {**STEPS, JOB + "logprob_weight": "guard"},
    **{trainer: {} for (_, trainer), kind in JOBS.items() if kind.online and trainer not in ("flow_grpo", "ddrl")},
}
"""DDRL's loss is that of FlowGRPO; its data term is tested with fine-tuning."""


class HalfGiven(PlaneModel):
    """Points whose second coordinate is given."""

    def encode_prompts(self, prompts: Sequence[str], negative: Negative = None, *, each: bool = False) -> Cond:
        mask = torch.tensor([[True, False]]).repeat(len(prompts), 1)
        return replace(super().encode_prompts(prompts, negative, each=each), element_mask=mask)


@pytest.mark.parametrize("name", OPTIONS)
def test_velocities_of_given_elements_have_no_gradient(name: str) -> None:
    tables = {
        "train.train_batch_per_replica": 16,
        "rollout.n_generation": 8,
        "train.optm_lr": 1e-2,
        "policy.diffusers.timesteps_fraction": 0.5,
        JOB + "mini_batch": 8,
        JOB + "batch_size_per_optimize": 8,
        JOB + "kl_beta": 0.1,
        JOB + "trainer_type": name.partition(",")[0],
        **OPTIONS[name],
    }
    model = HalfGiven()
    task = toy_trainer(toy_config(tables), model, [POINT] * 2, reward_fns={"bump": bump})
    last = model.transformer.residual[-1]
    with torch.no_grad():  # so that the reference has other velocities, of all elements
        last.bias += 0.3
    start = [value.detach().clone() for value in (last.weight, last.bias)]
    reports = [task.train_step(step) for step in range(3)]
    assert all(report.applied for report in reports)
    assert reports[0].metrics["train/kl_loss_mean"] > 0
    for value, before in zip((last.weight, last.bias), start, strict=True):
        assert (value[0] - before[0]).abs().max() > 1e-3
        assert torch.equal(value[1], before[1])
