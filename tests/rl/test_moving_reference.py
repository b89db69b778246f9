"""A reference that becomes the policy where that has come far: GARDO's bound on the distance, in a step."""

from typing import Any

import pytest
import torch

from cosmos_rl.policy.config import cross_check
from cosmos_rl.policy.config.plan import copies_reference, moves_reference
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import POINT, bump, toy_config, toy_trainer

JOB = "train.train_policy."
TABLES = {
    "train.train_batch_per_replica": 16,
    "rollout.n_generation": 8,
    "train.max_num_steps": 12,
    "train.optm_lr": 5e-3,
    "policy.diffusers.timesteps_fraction": 0.5,
    JOB + "mini_batch": 8,
    JOB + "kl_beta": 0.1,
}
FLOW = {
    JOB + "trainer_type": "flow_grpo",
    "policy.diffusers.sample": {"num_steps": 8, "guidance_scale": 1.0, "solver": "flow", "noise_level": 0.7},
}
GATE = {JOB + "kl_gate": {"rewards": ["height"], "share": 0.1}}


def task_of(**changes: Any) -> OnlineTask:
    rewards = {"bump": bump, "height": (height, 0.0)}
    return toy_trainer(toy_config({**TABLES, **changes}), PlaneModel(), [POINT] * 2, reward_fns=rewards)


def height(media: Any) -> Any:
    return float(media[1])


def run(task: OnlineTask, steps: int) -> tuple[list[float], list[float], list[bool]]:
    """The distance, the age of the reference, and whether it is the policy, after each step."""
    distances, ages, same = [], [], []
    for step in range(steps):
        metrics = task.train_step(step).metrics
        distances.append(metrics.get("train/reference_kl_mean", metrics["train/kl_loss_mean"]))
        ages.append(metrics["train/reference_age"])
        kept = task.policies.reference_state()
        same.append(all(torch.equal(kept[name], value) for name, value in task.params.items()))
    return distances, ages, same


@pytest.mark.parametrize("more", [{}, FLOW, {JOB + "trainer_type": "epg"}, GATE], ids=["nft", "flow", "epg", "gated"])
def test_the_reference_becomes_the_policy_after_a_step_that_was_further_from_it(more: dict[str, Any]) -> None:
    free, _, _ = run(task_of(**more, **{JOB + "reference_reset_kl": 1e9}), 4)
    assert free[0] == 0.0
    assert free == sorted(free)
    bound = (free[2] + free[3]) / 2  # only the fourth step of the same run is beyond it
    distances, ages, same = run(task_of(**more, **{JOB + "reference_reset_kl": bound}), 5)
    assert distances[:4] == free
    assert ages == [1.0, 2.0, 3.0, 0.0, 1.0]
    assert same == [False, False, False, True, False]
    assert distances[4] == pytest.approx(0.0, abs=1e-9)


def test_the_interval_counts_from_the_last_time() -> None:
    both = {JOB + "reference_reset_interval": 3}
    free, ages, _ = run(task_of(**both, **{JOB + "reference_reset_kl": 1e9}), 7)
    assert ages == [1.0, 2.0, 0.0, 1.0, 2.0, 0.0, 1.0]
    bound = (free[0] + free[1]) / 2
    _, ages, same = run(task_of(**both, **{JOB + "reference_reset_kl": bound}), 2)
    assert (ages, same) == ([1.0, 0.0], [False, True])
    task = task_of(**both, **{JOB + "reference_reset_kl": bound})
    run(task, 2)
    assert task.state_dict()["reference"] == {"last": 2}
    near = {"train/kl_loss_mean": 0.0}
    ages = [task._reference.after_step(done, near)["train/reference_age"] for done in (3, 4, 5)]
    assert ages == [1.0, 2.0, 0.0]


def test_a_checkpoint_that_does_not_say_when_keeps_to_multiples_of_the_interval() -> None:
    task = task_of(**{JOB + "reference_reset_interval": 4})
    task._reference.load_state_dict({})
    ages = [task._reference.after_step(done, {})["train/reference_age"] for done in (6, 7, 8, 9)]
    assert ages == [2.0, 3.0, 0.0, 1.0]


def test_the_optimisers_moments_may_be_forgotten_then() -> None:
    task = task_of(**{JOB + "reset_optimizer_with_reference": True, JOB + "reference_reset_kl": 1e-9})
    kept = []
    for step in range(3):  # the first one is at the reference
        task.train_step(step)
        kept.append(bool(task.optimizer.torch_optimizer.state))
    assert kept == [True, False, True]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({JOB + "kl_beta": 0.0}, JOB + "kl_beta"),
        ({JOB + "kl_beta": 0.0, JOB + "trainer_type": "online_dpo"}, JOB + "kl_beta"),
        ({JOB + "teacher": "some/adapter"}, JOB + "reference_reset_kl"),
    ],
)
def test_a_bound_that_could_not_act_is_refused(changes: dict[str, Any], key: str) -> None:
    more = {JOB + "reference_reset_kl": 0.1, "policy.diffusers.weight_copy_decay_type": 0, **changes}
    assert [line.partition(":")[0] for line in cross_check(toy_config({**TABLES, **more}))] == [key]


def test_such_a_reference_is_a_copy() -> None:
    job = toy_config({**TABLES, JOB + "reference_reset_kl": 0.1}).train.train_policy
    assert moves_reference(job)  # pyright: ignore[reportArgumentType]
    assert copies_reference(job)  # pyright: ignore[reportArgumentType]
