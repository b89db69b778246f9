"""What all transitions have in common: draws, densities, limits without noise, and EDM's network as a velocity."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.diffusion.churn import build_transitions
from cosmos_rl.diffusion.kernels import (
    Transition,
    dance,
    flow,
    log_ratio,
    predict_clean,
    renoise,
    transition_kl,
    transition_log_prob,
)
from cosmos_rl.diffusion.sampling import run_sampling
from tests.support.kernels import seeded

NOISE = {"flow": 0.7, "flow_linear": 0.7, "dance": 0.3, "ddim": 0.7, "cps": 0.8, "1euler": 1.0, "2ab": 1.0}
"""Every solver with noise, and a usual strength of it."""
SIGMAS = torch.tensor([0.95, 0.8, 0.5, 0.2, 0.0], dtype=torch.float64)
every_solver = pytest.mark.parametrize("solver", NOISE)


def transition_of(solver: str, index: int, noise_level: float | None = None) -> tuple[Transition, list[float]]:
    """The transition, and the sigmas of the states."""
    strength = NOISE[solver] if noise_level is None else noise_level
    grid, kernel = build_transitions(solver, SIGMAS, noise_level=strength, deterministic=False)
    return kernel(index, grid.tolist()), grid.tolist()


@every_solver
def test_a_regression_on_many_draws_finds_the_coefficients(solver: str) -> None:
    """100,000 runs with velocities at random: the next state on the state, the velocity and the clean prediction."""
    count, generator = 100_000, torch.Generator().manual_seed(0)
    grid, kernel = build_transitions(solver, SIGMAS, noise_level=NOISE[solver], deterministic=False)
    velocities = torch.randn(4, 1, count, generator=generator, dtype=torch.float64)
    calls = iter(velocities)
    made = run_sampling(
        lambda z, sigma: next(calls),
        torch.randn(1, count, generator=generator, dtype=torch.float64),
        grid,
        kernel=kernel,
        noise_fn=lambda _: torch.randn(1, count, generator=generator, dtype=torch.float64),
        keep_trajectory=True,
    )
    noisy, with_history = 0, 0
    for index in range(1, 4):
        step, state = kernel(index, grid.tolist()), made.trajectory[index]
        before = made.trajectory[index - 1] - grid[index - 1] * velocities[index - 1]
        known = torch.cat([state, velocities[index], before]).T
        found, error, std = regress(known, made.trajectory[index + 1][0])
        for ours, theirs, chance in zip((step.a, step.g, step.h), found, error, strict=True):
            assert theirs == pytest.approx(ours, abs=max(5 * chance, 1e-9))
        assert std == pytest.approx(step.s, abs=5 * step.s / math.sqrt(2 * count) + 1e-9)
        noisy, with_history = noisy + (step.s > 0), with_history + (step.h != 0)
    assert noisy == (1 if solver in ("1euler", "2ab") else 2)
    assert with_history == (2 if solver == "2ab" else 0)


def regress(known: Tensor, target: Tensor) -> tuple[list[float], list[float], float]:
    """Least squares: coefficients, their standard errors, deviation of what is left."""
    solution = torch.linalg.lstsq(known, target[:, None]).solution
    left = float((target - (known @ solution)[:, 0]).std())
    errors = left * torch.linalg.inv(known.T @ known).diagonal().sqrt()
    return solution[:, 0].tolist(), errors.tolist(), left


@every_solver
def test_densities_integrate_to_1_and_their_kl_divergence_is_the_closed_form(solver: str) -> None:
    """On a fine grid of next states; the closed form is a squared difference of velocities times ``g^2 / (2 s^2)``."""
    step, _ = transition_of(solver, 1)
    first, second, state, before = (doubles(value) for value in (0.4, -0.3, 1.2, 0.7))
    mean = float(step.mean(state, first, before))
    following = torch.linspace(mean - 12 * step.s, mean + 12 * step.s, 4001, dtype=torch.float64)[:, None]
    rows = len(following)
    log_p, log_q = (
        transition_log_prob(following, state.expand(rows, 1), v.expand(rows, 1), step, before.expand(rows, 1))
        for v in (first, second)
    )
    width = 24 * step.s / (rows - 1)
    assert float(log_p.exp().sum()) * width == pytest.approx(1.0, abs=1e-9)
    numerical = float((log_p.exp() * (log_p - log_q)).sum()) * width
    assert float(transition_kl(first, second, step)) == pytest.approx(numerical, rel=1e-9)
    assert numerical == pytest.approx(step.g**2 / (2 * step.s**2) * 0.7**2, rel=1e-9)


def doubles(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


@pytest.mark.parametrize("solver", ["1euler", "2ab"])
def test_the_ratio_of_raised_steps_is_the_difference_of_log_probabilities(solver: str) -> None:
    step, _ = transition_of(solver, 1)
    assert (step.h != 0.0) == (solver == "2ab")
    state, old, noise, change, before = (seeded(4, 3, 8, seed=seed) for seed in range(5))
    new = (old + 0.1 * change).requires_grad_()
    following = step.mean(state, old, before) + step.s * noise
    scored = [transition_log_prob(following, state, v, step, before) for v in (new, old)]
    ratio = log_ratio(new, old, noise, step)
    torch.testing.assert_close(ratio, scored[0] - scored[1], rtol=1e-9, atol=1e-12)
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    gradients = [torch.autograd.grad((weight * one).sum(), new)[0] for one in (ratio, scored[0])]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


def test_constant_noise_is_the_noise_of_dance() -> None:
    """Flow-GRPO's noise ``a sqrt(t / (1 - t))`` at the level where it is ``eta`` is DanceGRPO's."""
    levels = SIGMAS.tolist()
    for index in range(3):
        for eta in (0.25, 0.3, 0.9):
            level = eta * math.sqrt((1 - levels[index]) / levels[index])
            ours, theirs = flow(index, levels, noise_level=level), dance(index, levels, noise_level=eta)
            assert (ours.a, ours.g, ours.s) == pytest.approx((theirs.a, theirs.g, theirs.s), abs=1e-12)


@every_solver
@pytest.mark.parametrize("index", [1, 2])
def test_with_ever_less_noise_a_step_becomes_the_noiseless_one(solver: str, index: int) -> None:
    """DDIM's, ``(1 - u) clean + u noise``, which is Euler's step of the ODE; of ``2ab`` the step of exponential
    Adams-Bashforth, written for states ``data + s noise`` with ``s = sigma / (1 - sigma)``."""
    step, levels = transition_of(solver, index, noise_level=1e-6)
    if index == 1:
        assert 0.0 < step.s < 2e-3
    state, velocity, before = (seeded(2, 3, seed=seed).numpy() for seed in range(3))
    t, u = SIGMAS[index].item(), SIGMAS[index + 1].item()
    clean, noise = state - t * velocity, state + (1 - t) * velocity
    expected = (1 - u) * clean + u * noise
    if solver == "2ab":
        now, then, last = (value / (1 - value) for value in (t, u, SIGMAS[index - 1].item()))
        h = math.log(now / then)
        phi_2 = (1 - (1 - math.exp(-h)) / h) / h
        ratio = math.log(last / now) / h
        moved = then / now * (1 + now) * state + (1 - then / now) * clean + h * phi_2 / ratio * (clean - before)
        expected = moved / (1 + then)
    found = step.mean(*(torch.from_numpy(value) for value in (state, velocity, before)))
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-5)
    assert levels == pytest.approx(SIGMAS.tolist(), abs=1e-6)


def test_edms_network_of_rectified_flow_is_a_velocity() -> None:
    """A network ``F`` behind ``c_skip = 1 - t``, ``c_out = -t``, ``c_in = 1 - t`` at ``t = sigma / (1 + sigma)``, for
    states ``x = data + sigma noise``: with ``z = x / (1 + sigma)`` its clean sample is ``z - t F`` and its noise
    ``z + (1 - t) F``."""
    for seed in range(20):
        x, weight = seeded(8, 5, seed=seed).numpy() * 30, seeded(5, 5, seed=100 + seed).numpy()
        sigma = math.exp(np.random.default_rng(seed).uniform(math.log(0.002), math.log(500)))
        t = sigma / (1 + sigma)
        output = np.tanh((1 - t) * x @ weight + t)
        clean = (1 - t) * x - t * output
        noise = (x - clean) / sigma
        z, velocity = torch.from_numpy(x / (1 + sigma)), torch.from_numpy(output)
        torch.testing.assert_close(predict_clean(z, velocity, t), torch.from_numpy(clean), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(z + (1 - t) * velocity, torch.from_numpy(noise), rtol=1e-9, atol=1e-9)
        found = renoise(t, 0.3 * t, kept=0.2 * t, std=0.1).mean(z, velocity)
        expected = (1 - 0.3 * t) * clean + 0.2 * t * noise
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)
