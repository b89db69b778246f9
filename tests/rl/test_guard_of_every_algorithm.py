"""The guard against reward hacking looks at the policy of every online algorithm."""

import functools
from typing import Any

import pytest
import torch

from cosmos_rl.policy.config.jobs import JOBS, online_table
from tests.support.flow_grpo_plane import FLOW, JOB
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import POINT, bump, plane_data_loss, toy_config, toy_trainer

OPTIONS: dict[str, dict[str, Any]] = {
    "flow_grpo": {"policy.diffusers.sample": FLOW},
    "ddrl": {
        "policy.diffusers.sample": FLOW,
        JOB + "data_term": {"beta": 0.1, "local_dir": "made by the test", "batch_size": 8},
    },
}
ONLINE = sorted({trainer for (_, trainer), kind in JOBS.items() if kind.online})


@pytest.mark.parametrize("trainer", ONLINE)
def test_a_policy_that_leaves_what_the_model_knows_is_an_alarm(trainer: str) -> None:
    tables = {
        "train.train_batch_per_replica": 16,
        "rollout.n_generation": 8,
        "train.optm_lr": 1e-4,
        JOB + "mini_batch": 8,
        JOB + "trainer_type": trainer,
        JOB + "reward_hacking_guard.enable": True,
        JOB + "reward_hacking_guard.freq": 2,
        **OPTIONS.get(trainer, {}),
    }
    config, model = toy_config(tables), PlaneModel()
    data_loss = functools.partial(plane_data_loss, model, 0, online_table(config).data_term.batch_size)
    task = toy_trainer(config, model, [POINT] * 2, reward_fns={"bump": bump}, data_loss=data_loss)
    task.start(0)
    reports = [task.train_step(step) for step in range(3)]
    assert ["guard/loss_ratio" in report.metrics for report in reports] == [False, True, False]
    assert reports[1].alarm is None
    assert reports[1].metrics["guard/loss_ratio"] == pytest.approx(1.0, abs=0.05)
    assert reports[1].metrics["guard/diversity_ratio"] == pytest.approx(1.0, abs=0.05)
    with torch.no_grad():
        model.transformer.residual[-1].bias += 10.0
    broken = task.train_step(3)
    assert broken.alarm is not None
    assert broken.metrics["guard/loss_ratio"] > 3
    assert broken.metrics["guard/alarms"] >= 1
