"""A schedule-free optimiser in reinforcement learning: samples, old policy, reference and exports are of the average
x, gradients are taken at y (Defazio et al. 2024, arXiv:2405.15682)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.reward import batch_reward
from cosmos_rl.storage import run_folder
from tests.support.states import saved_state
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import POINT, bump, measure_plane, plane_tables, plane_task, run_loop, toy_config
from tests.support.toy_tasks import toy_trainer as make_task

JOB = "train.train_policy."
BETA = 0.9


class Seen:
    """The reward of the plane, which keeps what it has scored."""

    def __init__(self) -> None:
        self.media: list[np.ndarray] = []

    def reward(self) -> Any:
        @batch_reward
        def seen(media: np.ndarray) -> np.ndarray:
            self.media.append(media.copy())
            return bump(media)

        return seen


def small(optimizer: str, trainer: str = "diffusion_nft", **changes: Any) -> dict[str, Any]:
    """One optimiser step on 16 samples."""
    return {
        "train.train_batch_per_replica": 16,
        "train.max_num_steps": 4,
        "train.optm_lr": 3e-2,
        "train.optm_name": optimizer,
        "train.optm_betas": (BETA, 0.99),
        "rollout.n_generation": 8,
        JOB + "trainer_type": trainer,
        JOB + "mini_batch": 8,
        JOB + "kl_beta": 0.1,
        "policy.diffusers.timesteps_fraction": 0.5,
        "policy.diffusers.weight_copy_decay_type": 0,
        **changes,
    }


def task_of(tables: dict[str, Any], weights: dict[str, Tensor] | None = None) -> tuple[OnlineTask, Seen]:
    """A task on the plane that starts from ``weights``."""
    model, seen = PlaneModel(), Seen()
    with torch.no_grad():
        for name, value in (weights or {}).items():
            model.transformer.get_parameter(name).copy_(value)
    return make_task(toy_config(tables), model, [POINT] * 2, reward_fns={"seen": seen.reward()}), seen


def average(task: OnlineTask) -> dict[str, Tensor]:
    """x, from y = (1 - beta) z + beta x."""
    state, found = task.optimizer.torch_optimizer.state, task.optimizer.averages_of(task.params)
    for name, y in task.params.items():
        torch.testing.assert_close(found[name], (y.detach() - (1 - BETA) * state[y]["z"]) / BETA, rtol=1e-5, atol=1e-6)
    return found


def after_two_steps(trainer: str) -> tuple[OnlineTask, Seen]:
    """x is z after the first one, and another after the second."""
    task, seen = task_of(small("AdamWScheduleFree", trainer))
    for step in range(2):
        task.train_step(step)
    x = average(task)
    assert max(float((x[name] - y.detach()).abs().max()) for name, y in task.params.items()) > 1e-3
    return task, seen


@pytest.mark.parametrize("trainer", ["diffusion_nft", "awm", "online_dpo"])
def test_samples_are_made_by_the_average(trainer: str) -> None:
    task, seen = after_two_steps(trainer)
    plain, expected = task_of(small("Adam", trainer), average(task))
    seen.media.clear()
    for one in (task, plain):
        one.train_step(2)
    np.testing.assert_allclose(np.concatenate(seen.media), np.concatenate(expected.media), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trainer", ["diffusion_nft", "pepg"])
def test_gradients_are_taken_at_y_with_the_average_as_the_old_policy(trainer: str) -> None:
    task, _ = after_two_steps(trainer)
    x = average(task)
    plain, _ = task_of(small("Adam", trainer, **{"policy.diffusers.weight_copy_decay_type": 1}))  # keeps an old policy
    with torch.no_grad():
        for name, param in plain.params.items():
            plain.policies.old_state()[name].copy_(x[name])
            param.copy_(task.params[name])
    plain.policies.old_equals_current = False
    ((found,), _), ((expected,), _) = task.compute_gradients(2), plain.compute_gradients(2)
    assert any(bool(value.any()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_old_policy_and_reference_follow_the_average() -> None:
    changes = {
        "policy.diffusers.weight_copy_decay_type": 1,
        JOB + "reference_reset_interval": 2,
        JOB + "reset_optimizer_with_reference": True,
    }
    task, _ = task_of(small("AdamWScheduleFree", **changes))
    for step in range(2):
        before = {name: value.clone() for name, value in task.policies.old_state().items()}
        task.train_step(step)
    reference = task.policies.reference_state()
    for name, value in reference.items():
        # the moments were forgotten, so that training continues from the average: y, z and x are one
        assert torch.equal(task.params[name].detach(), value)
    assert not any(task.optimizer.torch_optimizer.state.values())
    old = task.policies.old_state()
    weights = {float(((old[n] - before[n]) / (reference[n] - before[n])).median()) for n in old}
    assert max(weights) - min(weights) < 1e-2  # one decay for all
    assert 0.5 < min(weights) <= 1.0


def test_exports_are_the_average(tmp_path: Path) -> None:
    tables = {**small("AdamWScheduleFree"), "train.ckpt.export_safetensors": True, "train.ckpt.save_mode": "sync"}
    task, _ = task_of(tables)
    run_loop(toy_config({**tables}), task, tmp_path)
    run = run_folder.find_newest_run(tmp_path)
    assert run is not None
    exported, state = load_file(run.safetensors / "step_4/model.safetensors"), saved_state(run.root, 4)
    for name, value in average(task).items():
        torch.testing.assert_close(exported[name], value, rtol=1e-5, atol=1e-5)
        assert torch.equal(exported[name], state[f"average.{name}"])


@pytest.mark.zoo
def test_the_exact_tilt_is_reached() -> None:
    """As Adam reaches it in `test_nft_plane.py`."""
    steps = 100
    tables = {**plane_tables(0, steps), "train.optm_name": "AdamWScheduleFree", "train.optm_lr": 1e-2}
    task, model = plane_task(0, steps, tables)
    task.start(0)
    assert all(task.train_step(step).applied for step in range(steps))
    with task.use_averaged_weights():
        end = measure_plane(model)
    assert end.to_tilt <= 0.06
    assert 0.62 <= end.reward <= 0.72
