"""Transition kernels: how one sampling step goes from noise level ``sigma`` to ``sigma_next``.

A kernel is affine in the velocity: ``z' = a * z + g * v`` (plus ``s * noise`` for the stochastic ones). Coefficients
are Python floats (float64), so that the step does not depend on the device or on the dtype of the latents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    """One transition of the sampling loop."""

    def step(self, latents: Tensor, velocity: Tensor, index: int, sigmas: Sequence[float]) -> Tensor:
        """Latents ``[N, C, ...]`` at ``sigmas[index]`` and their velocity -> latents at ``sigmas[index + 1]``."""
        ...


@dataclass(frozen=True)
class EulerKernel:
    """The probability-flow ODE, first order: ``z' = z + (sigma_next - sigma) * v``.

    Bit-equal to ``FlowMatchEulerDiscreteScheduler.step``: float32 arithmetic, a result in the velocity's dtype.
    """

    def step(self, latents: Tensor, velocity: Tensor, index: int, sigmas: Sequence[float]) -> Tensor:
        dt = sigmas[index + 1] - sigmas[index]
        return (latents.float() + dt * velocity).to(velocity.dtype)


class StockKernel:
    """The ``step`` of a diffusers scheduler, for evaluation with exactly the pipeline's own sampler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def step(self, latents: Tensor, velocity: Tensor, index: int, sigmas: Sequence[float]) -> Tensor:
        timestep = self._scheduler.timesteps[index]
        result: tuple[Tensor] = self._scheduler.step(velocity, timestep, latents, return_dict=False)
        return result[0]


def sigmas_of(scheduler: Any, num_steps: int) -> Tensor:
    """Set ``num_steps`` on a diffusers flow scheduler and read its descending levels, ``[num_steps + 1]`` float32.

    The levels are read, never recomputed: some schedulers shift twice, stretch or round them.
    """
    scheduler.set_timesteps(num_steps)
    return scheduler.sigmas.detach().to("cpu", torch.float32)
