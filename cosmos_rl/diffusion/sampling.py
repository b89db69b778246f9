"""The one sampling loop that rollouts, validation and export checks share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_rl.diffusion.kernels import EulerKernel, Kernel

VelocityFn = Callable[[Tensor, Tensor], Tensor]
"""(latents ``[N, C, ...]``, sigma ``[N]`` float32) -> velocity ``[N, C, ...]``."""


@dataclass(frozen=True)
class Sampled:
    """What a run of the sampling loop gives."""

    latents: Tensor
    """``[N, C, ...]`` at the last noise level."""
    trajectory: tuple[Tensor, ...]
    """All states from the start to ``latents``, ``S + 1`` of them; empty unless asked for."""


def run_sampling(
    velocity_fn: VelocityFn,
    latents: Tensor,
    sigmas: Tensor,
    *,
    kernel: Kernel | None = None,
    keep_trajectory: bool = False,
) -> Sampled:
    """Integrate from ``sigmas[0]`` down to ``sigmas[-1]``.

    Args:
        velocity_fn: the model at hand, guidance included.
        latents: ``[N, C, ...]``, noise at ``sigmas[0]``; its dtype is the dtype that the velocity function receives.
        sigmas: ``[S + 1]`` float32, descending.
        kernel: the transition, Euler when not given.
        keep_trajectory: also return the S + 1 states.
    """
    kernel = kernel or EulerKernel()
    levels: list[float] = sigmas.double().tolist()
    states = [latents] if keep_trajectory else []
    for index in range(len(levels) - 1):
        sigma_N = torch.full((latents.shape[0],), levels[index], dtype=torch.float32, device=latents.device)
        velocity = velocity_fn(latents, sigma_N)
        latents = kernel.step(latents, velocity, index, levels)
        if keep_trajectory:
            states.append(latents)
    return Sampled(latents=latents, trajectory=tuple(states))
