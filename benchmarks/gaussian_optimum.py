"""How good can a policy of Gaussian sampling steps be? Dynamic programming on a grid, without any network.

A policy on sampling steps may move the mean of each step, at the price of the KL divergence of the two Gaussians; their
standard deviation and the noise of the start stay. Its optimum is below that of the tilted distribution when steps are
coarse. For a reward that is linear in one coordinate and a mixture that is a product of equal ones, like the plane of
`tests/support/toy_tasks.py`, that coordinate is all there is, and the optimum is found by going back over the steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cosmos_rl.diffusion.kernels import Kernel, Transition

Velocity = Callable[[np.ndarray, float], np.ndarray]
"""(states ``[N]``, sigma) -> velocities ``[N]``."""


@dataclass(frozen=True)
class Optimum:
    """Of the expected reward over the temperature, minus the KL divergence of whole paths to the base."""

    reward: float
    divergence: float
    """In nats."""


def find_optimum(
    kernel: Kernel, sigmas: list[float], velocity: Velocity, temperature: float, bound: float = 12.0
) -> Optimum:
    """For the reward ``x`` itself, by a kernel whose last step has no noise.

    Values are kept at 1,201 states between ``-bound`` and ``bound``, and are straight lines beyond.
    """
    states = np.linspace(-bound, bound, 1201)
    *noisy, last = [kernel(index, sigmas) for index in range(len(sigmas) - 1)]
    value = _base_mean(last, states, velocity, sigmas[-2]) / temperature
    moved: list[np.ndarray] = []
    for step, sigma in reversed(list(zip(noisy, sigmas, strict=False))):
        value, mean = _step_back(step, states, value, _base_mean(step, states, velocity, sigma))
        moved.insert(0, mean)
    generator = np.random.default_rng(0)
    x, divergence = generator.standard_normal(400_000), 0.0
    for step, sigma, mean in zip(noisy, sigmas, moved, strict=False):
        chosen = np.interp(x, states, mean)
        divergence += float(((chosen - _base_mean(step, x, velocity, sigma)) ** 2).mean()) / (2 * step.s**2)
        x = chosen + step.s * generator.standard_normal(len(x))
    return Optimum(float(_base_mean(last, x, velocity, sigmas[-2]).mean()), divergence)


def mixture_velocity(mean: float, std: float) -> Velocity:
    """Of two Gaussians of equal weight at ``mean`` and ``-mean``: ``E[noise - clean | state]``."""

    def velocity(states: np.ndarray, sigma: float) -> np.ndarray:
        variance = (1 - sigma) ** 2 * std**2 + sigma**2
        gap = states[:, None] - (1 - sigma) * np.array([mean, -mean])
        weights = np.exp(-(gap**2 - (gap**2).min(1, keepdims=True)) / (2 * variance))
        weights /= weights.sum(1, keepdims=True)
        clean = np.array([mean, -mean]) + (1 - sigma) * std**2 / variance * gap
        return (weights * (gap * sigma / variance - clean)).sum(1)

    return velocity


def _base_mean(step: Transition, states: np.ndarray, velocity: Velocity, sigma: float) -> np.ndarray:
    return step.a * states + step.g * velocity(states, sigma)


def _step_back(
    step: Transition, states: np.ndarray, value: np.ndarray, base_mean: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The values before a step, and where its mean is moved to: the best of all means, each with its price."""
    xi, weights = np.polynomial.hermite_e.hermegauss(31)
    means = np.linspace(states[0] - 2, states[-1] + 2, 2401)
    reached = means[:, None] + step.s * xi
    slope_low, slope_high = (float(np.diff(value)[end] / np.diff(states)[end]) for end in (0, -1))
    beyond = np.minimum(reached - states[0], 0) * slope_low + np.maximum(reached - states[-1], 0) * slope_high
    after = (np.interp(reached, states, value) + beyond) @ (weights / weights.sum())
    worth = after - (means - base_mean[:, None]) ** 2 / (2 * step.s**2)
    best = worth.argmax(1).clip(1, len(means) - 2)
    left, middle, right = (worth[np.arange(len(states)), best + k] for k in (-1, 0, 1))
    # the top of the parabola through the best mean and its neighbours
    offset = 0.5 * (left - right) / np.minimum(left - 2 * middle + right, -1e-12)
    return middle - 0.25 * (left - right) * offset, means[best] + offset * (means[1] - means[0])
