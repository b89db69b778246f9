"""EPG, PEPG, PAR and AWM by the shipped trainer on the plane."""

from typing import Any

import pytest
import torch

from cosmos_rl.policy.trainer.rl.forward import ForwardObjective
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import POINT, bump, measure_plane, plane_task, toy_config, toy_trainer

JOB = "train.train_policy."


def gradients_of(trainer: str, **changes: Any) -> dict[str, torch.Tensor]:
    tables = {
        "train.train_batch_per_replica": 16,
        "rollout.n_generation": 8,
        "train.max_num_steps": 1,
        "policy.diffusers.timesteps_fraction": 0.5,
        JOB + "trainer_type": trainer,
        JOB + "mini_batch": 8,
        **changes,
    }
    task = toy_trainer(toy_config(tables), PlaneModel(), [POINT] * 2, reward_fns={"bump": bump})
    if trainer != "diffusion_nft":
        assert isinstance(task.algorithm, ForwardObjective)
    task.algorithm = _same_draws(task.algorithm)
    task.model.transformer.double()
    return task.compute_gradients(0)[0][0]


def _same_draws(algorithm: Any) -> Any:
    class Same(type(algorithm)):
        purpose = "nft"

    return Same(**vars(algorithm))


@pytest.mark.parametrize("trainer", ["epg", "pepg", "par"])
def test_the_first_gradient_is_that_of_diffusion_nft(trainer: str) -> None:
    expected, found = gradients_of("diffusion_nft"), gradients_of(trainer)
    assert any(float(value.norm()) > 1e-3 for value in expected.values())
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= 1e-5 * float(value.norm()), name


def test_a_temperature_takes_the_place_of_the_deviation() -> None:
    """A gradient along the advantages: those over 0.5 are twice those over 1."""
    one, half = (gradients_of("epg", **{JOB + "advantage_temperature": tau}) for tau in (1.0, 0.5))
    for name, value in one.items():
        torch.testing.assert_close(half[name], 2 * value, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("trainer", ["epg", "pepg", "par", "awm"])
def test_the_reward_rises(trainer: str) -> None:
    tables = {
        "train.train_batch_per_replica": 128,
        "rollout.n_generation": 64,
        "train.max_num_steps": 10,
        "train.optm_lr": 5e-3,
        "policy.diffusers.timesteps_fraction": 0.4,
        JOB + "trainer_type": trainer,
        JOB + "kl_beta": 0.05,
        JOB + "mini_batch": 64,
        JOB + "batch_size_per_optimize": 64,
    }
    task = toy_trainer(toy_config(tables), PlaneModel(), [POINT] * 2, reward_fns={"bump": bump})
    rewards = [task.train_step(step).metrics["reward/mean"] for step in range(10)]
    assert rewards[-1] > rewards[0] + 0.1, rewards


@pytest.mark.zoo
def test_pepg_reaches_the_tilt() -> None:
    """With a distance of 0.3 to the reference and four optimiser steps for each rollout, like NFT by its own test."""
    tables = {
        "policy.diffusers.timesteps_fraction": 0.1,
        "policy.diffusers.weight_copy_decay_type": 0,
        JOB + "trainer_type": "pepg",
        JOB + "advantage_temperature": 0.2,
        JOB + "mini_batch": 512,
        JOB + "batch_size_per_optimize": 512,
        JOB + "mu_iterations": 4,
    }
    task, model = plane_task(0, 150, tables)
    for step in range(150):
        task.train_step(step)
    end = measure_plane(model)
    assert end.to_tilt <= 0.04
    assert abs(end.reward - 0.778) <= 0.08 * 0.778
