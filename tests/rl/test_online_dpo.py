"""Online DPO by the shipped trainer: the loss of its pairs, its gradient by hand, and a reward that rises."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl.policy.config import cross_check
from cosmos_rl.policy.config.plan import plan_online
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.policy.trainer.rl.online_dpo import OnlineDpo
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.nft_runs import Job, nft_toml, nft_train, run_forked
from tests.support.states import assert_same_state, drop_steps_after, saved_state, trace
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import POINT, bump, toy_config, toy_trainer

JOB = "train.train_policy."
TABLES = {
    "train.train_batch_per_replica": 32,
    "rollout.n_generation": 8,
    "train.max_num_steps": 12,
    "train.optm_lr": 5e-3,
    "policy.diffusers.timesteps_fraction": 0.5,
    JOB + "trainer_type": "online_dpo",
    JOB + "mini_batch": 4,
}


def plane_task(**changes: Any) -> OnlineTask:
    config = toy_config({**TABLES, **changes})
    return toy_trainer(config, PlaneModel(), [POINT] * 4, reward_fns={"bump": bump})


def test_the_loss_at_the_start_is_the_logarithm_of_two() -> None:
    task = plane_task()
    assert isinstance(task.algorithm, OnlineDpo)
    metrics = task.train_step(0).metrics
    assert metrics["train/policy_loss_mean"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["train/gradient_factor_mean"] == pytest.approx(0.5)
    assert metrics["train/samples_used"] == 8.0  # two of each group
    assert metrics["train/velocity_norm_ratio/0.625"] == pytest.approx(1.0)
    assert (task.plan.learnt, task.plan.backwards, task.plan.old_forwards, task.plan.keeps_old) == (4, 5, 0, False)


def test_micro_batches_do_not_change_the_gradient_and_the_pairs_are_best_and_worst() -> None:
    gradients = [plane_task(**{JOB + "mini_batch": size}).compute_gradients(0)[0][0] for size in (1, 3, 4)]
    for name, value in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)
    task = plane_task()
    own, pending = task._roll_out(0, task._new_conditions())
    batch = task._score(0, own, [task._scoring.wait(one) for one in pending], None)
    rewards = bump(own.media.numpy()).reshape(4, 8)
    first = 8 * np.arange(4)
    assert batch.rejected == dict(
        zip((first + rewards.argmax(1)).tolist(), (first + rewards.argmin(1)).tolist(), strict=True)
    )


def test_equal_rewards_give_no_pair_and_no_step() -> None:
    tables = {**TABLES, JOB + "bypass_reward": True}
    task = toy_trainer(toy_config(tables), PlaneModel(), [POINT] * 4)
    before = {name: value.detach().clone() for name, value in task.params.items()}
    metrics = task.train_step(0).metrics
    assert metrics["train/samples_used"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in task.params.items())


def test_the_reward_rises() -> None:
    more = {"train.train_batch_per_replica": 64, "rollout.n_generation": 4, "train.optm_lr": 1e-2}
    tables = {**TABLES, **more, JOB + "dpo_beta": 3.0}
    task = toy_trainer(toy_config(tables), PlaneModel(), [POINT] * 16, reward_fns={"bump": bump})
    rewards = [task.train_step(step).metrics["reward/mean"] for step in range(12)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2


def test_a_moving_reference_becomes_the_policy() -> None:
    task = plane_task(**{JOB + "reference_reset_interval": 2})
    margins = [abs(task.train_step(step).metrics["train/margin_mean"]) for step in range(3)]
    assert margins[0] == pytest.approx(0.0, abs=1e-7)
    assert margins[1] > 1e-6
    assert margins[2] == pytest.approx(0.0, abs=1e-7)


def test_a_beta_that_follows_the_margins_is_that_of_their_mean() -> None:
    table = {"target_factor": 0.2, "least": 0.01, "most": 1e6}
    free = plane_task(**{JOB + "dpo_auto_beta": table, JOB + "mini_batch": 2})
    seen = [free.train_step(step).metrics for step in range(4)]
    sizes, betas = ([line[f"train/{name}_mean"] for line in seen] for name in ("margin_size", "dpo_beta"))
    assert betas[:2] == [100.0, 100.0]  # at the reference all margins are 0
    for number in (1, 2):
        weights = 0.99 ** np.arange(number)[::-1]
        mean = (weights * sizes[1 : number + 1]).sum() / weights.sum()
        assert betas[number + 1] == pytest.approx(2 * math.log(4) / mean, rel=1e-5)
    assert "train/dpo_beta_mean" not in plane_task().train_step(0).metrics


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({JOB + "dpo_auto_beta": {"target_factor": 0.2}, JOB + "trainer_type": "epg"}, "dpo_auto_beta.target_factor"),
        ({JOB + "dpo_auto_beta": {"target_factor": 0.2, "least": 9.0, "most": 3.0}}, "dpo_auto_beta.least"),
        ({JOB + "dpo_auto_beta": {"least": 9.0}}, "dpo_auto_beta.least"),
    ],
)
def test_a_beta_that_could_not_follow_is_refused(changes: dict[str, Any], key: str) -> None:
    assert [line.partition(":")[0] for line in cross_check(toy_config({**TABLES, **changes}))] == [JOB + key]


def test_a_distance_to_the_reference_can_be_added() -> None:
    task = plane_task(**{JOB + "kl_beta": 0.5, JOB + "norm_penalty": 0.5})
    first, second = (task.train_step(step).metrics for step in range(2))
    assert first["train/kl_loss_mean"] == 0.0
    assert second["train/kl_loss_mean"] > 0.0
    parts = [second[f"train/{name}_loss_mean"] for name in ("policy", "kl", "norm")]
    assert second["train/loss_mean"] == pytest.approx(parts[0] + 0.5 * parts[1] + 0.5 * parts[2])


def test_optimiser_steps_are_counted_in_pairs() -> None:
    plan = plan_online(toy_config({**TABLES, JOB + "batch_size_per_optimize": 3, JOB + "mu_iterations": 2}))
    assert (plan.learnt, plan.optimizer_steps, plan.pairs) == (4, 4, 20)


def test_an_old_policy_that_lags_is_refused() -> None:
    config = toy_config({**TABLES, "policy.diffusers.weight_copy_decay_type": 1})
    assert any(line.startswith("policy.diffusers.weight_copy_decay_type") for line in cross_check(config))
    assert cross_check(toy_config(TABLES)) == []


@pytest.mark.zoo
@pytest.mark.parametrize("lora", [True, False])
def test_on_a_pipeline_it_starts_at_the_logarithm_of_two_and_resumes_exactly(
    tmp_path: Path, tiny_sd3: Path, lora: bool
) -> None:
    config = nft_toml(tmp_path, tiny_sd3, lora=lora)
    options = ("--train.train_policy.trainer_type=online_dpo", "--policy.diffusers.weight_copy_decay_type=0")
    run = nft_train(config, *options)
    lines = read_metrics(run / "metrics.jsonl")
    assert lines[0]["train/policy_loss_mean"] == pytest.approx(math.log(2), abs=1e-6)
    assert len({line["train/policy_loss_mean"] for line in lines}) == 3
    state = saved_state(run, 3)
    drop_steps_after(run, 1)
    nft_train(config, *options, resume=(run, 1))
    assert_same_state(saved_state(run, 3), state)


@pytest.mark.zoo
@pytest.mark.process
def test_two_ranks_give_the_result_of_one_though_a_prompt_lies_on_both(tmp_path: Path, tiny_sd3: Path) -> None:
    """With a beta that follows the margins and a reference that moves by the distance of all ranks' samples."""
    options = (
        "--train.train_policy.trainer_type=online_dpo",
        "--policy.diffusers.weight_copy_decay_type=0",
        "--train.train_batch_per_replica=12",  # three prompts: the second one is half on each rank
        "--train.optm_lr=1e-4",
        "--train.max_num_steps=5",
        "--train.ckpt.enable_checkpoint=false",
        "--train.train_policy.dpo_auto_beta={target_factor = 0.2, most = 5000.0}",
        "--train.train_policy.kl_beta=0.1",
        "--train.train_policy.reference_reset_kl=3e-4",
    )
    config = nft_toml(tmp_path, tiny_sd3, lora=False)
    for ranks in (1, 2):
        size = f"--train.train_policy.batch_size_per_optimize={2 // ranks}"
        run_forked([Job(config, tmp_path / str(ranks), (*options, size))], ranks, tmp_path)
    one, two = (tmp_path / str(ranks) for ranks in (1, 2))
    lines = [read_metrics(run / "metrics.jsonl") for run in (one, two)]
    ages = [[line["train/reference_age"] for line in run] for run in lines]
    assert ages[0] == ages[1] == [1.0, 2.0, 0.0, 1.0, 2.0]
    betas = [[line["train/dpo_beta_mean"] for line in run] for run in lines]
    assert betas[1] == pytest.approx(betas[0], rel=1e-3)
    assert len(set(betas[0])) == 5
    # margins are differences of errors, times dpo_beta
    np.testing.assert_allclose(trace(two), trace(one), rtol=1e-4, atol=1e-5)
