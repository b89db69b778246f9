"""FlowGRPO and DDRL with the divergence of whole paths, against optima that are known without training."""

import numpy as np
import pytest
import torch

from benchmarks.exact_tilt import MEMORYLESS, Exact, optimum_of_steps, sample, train
from benchmarks.gaussian_optimum import find_optimum, mixture_velocity
from cosmos_rl.algorithms.flow_grpo import TrustRegion
from cosmos_rl.diffusion.kernels import build_kernel
from tests.support.toy_tasks import base_and_tilt, bump, mmd2, rightwards


def test_dynamic_programming_finds_the_closed_form_of_a_gaussian() -> None:
    """Everything is linear: the value before a step has a slope, and the best move is ``s^2`` times the slope."""
    std, temperature, sigmas = 0.5, 2.0, [1.0, 0.75, 0.5, 0.25, 0.0]
    kernel = build_kernel("flow", noise_level=0.7, deterministic=False)
    slope, reward, divergence = 1 / temperature, 0.0, 0.0
    for index in reversed(range(4)):
        step, sigma = kernel(index, sigmas), sigmas[index]
        reward += temperature * (step.s * slope) ** 2
        divergence += (step.s * slope) ** 2 / 2
        variance = (1 - sigma) ** 2 * std**2 + sigma**2
        slope *= step.a + step.g * (sigma - (1 - sigma) * std**2) / variance
    found = find_optimum(kernel, sigmas, mixture_velocity(0.0, std), temperature)
    # one standard error of its 400,000 draws is 0.0008
    assert found.reward == pytest.approx(reward, abs=0.003)
    assert found.divergence == pytest.approx(divergence, rel=1e-3)


@pytest.mark.zoo
@pytest.mark.parametrize("noise_level", [0.7, MEMORYLESS])
def test_a_linear_reward_reaches_the_best_of_gaussian_steps(noise_level: float) -> None:
    task = Exact(rightwards, 2.0, 10, 800, noise_level)
    best = optimum_of_steps(task)
    x = sample(train(task), task, 8000, torch.Generator().manual_seed(5)).clean[:, 0]
    assert float(x.mean()) == pytest.approx(best.reward, rel=0.05)
    if noise_level == MEMORYLESS:
        assert float(x.mean()) == pytest.approx(0.986, rel=0.15)  # the tilted mixture, which coarse steps come near


@pytest.mark.zoo
def test_a_mask_and_four_passes_over_each_batch_leave_the_optimum_where_it_is() -> None:
    """Flow-DPPO's mask, with as many updates from a quarter of the samples."""
    task = Exact(rightwards, 2.0, 10, 200, 0.7, passes=4, region=TrustRegion(mask_threshold=1e-3))
    x = sample(train(task), task, 8000, torch.Generator().manual_seed(5)).clean[:, 0]
    assert float(x.mean()) == pytest.approx(optimum_of_steps(task).reward, rel=0.06)


@pytest.mark.zoo
@pytest.mark.parametrize(("ddrl", "short", "distance"), [(False, 0.10, 0.03), (True, 0.05, 0.06)])
def test_a_bounded_reward_reaches_the_tilted_mixture(ddrl: bool, short: float, distance: float) -> None:
    task = Exact(bump, 0.25, 20, 500, ddrl=ddrl)
    samples = sample(train(task), task, 2000, torch.Generator().manual_seed(5)).clean
    _, tilt = base_and_tilt(2000)
    assert float(np.mean(bump(samples.numpy()))) == pytest.approx(0.778, rel=short)
    assert mmd2(samples, tilt) <= distance
