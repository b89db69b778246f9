"""The one sampling loop that rollouts, validation and export checks share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_rl.diffusion.kernels import EulerKernel, Kernel, clean_prediction, transition_log_prob

VelocityFn = Callable[[Tensor, Tensor], Tensor]
"""(latents ``[N, C, ...]``, sigma ``[N]`` float32) -> velocity ``[N, C, ...]``."""

NoiseFn = Callable[[int], Tensor]
"""Index of a step -> standard normal noise like the latents."""


@dataclass(frozen=True)
class Sampled:
    """What a run of the sampling loop gives."""

    latents: Tensor
    """``[N, C, ...]`` at the last noise level."""
    trajectory: tuple[Tensor, ...]
    """All states from the start to ``latents``, ``S + 1`` of them; empty unless asked for."""
    log_probs: tuple[Tensor | None, ...] | None = None
    """Per step, ``S`` of them: log-probability ``[N]`` of the state that was drawn, mean over elements; None for a
    noise-free step. None as a whole unless the trajectory was asked for and a step is stochastic."""


def run_sampling(
    velocity_fn: VelocityFn,
    latents: Tensor,
    sigmas: Tensor,
    *,
    kernel: Kernel | None = None,
    noise_fn: NoiseFn | None = None,
    keep_trajectory: bool = False,
) -> Sampled:
    """Integrate from ``sigmas[0]`` down to ``sigmas[-1]``.

    Args:
        velocity_fn: the model at hand, guidance included.
        latents: ``[N, C, ...]``, noise at ``sigmas[0]``; its dtype is the dtype that the velocity function receives.
        sigmas: ``[S + 1]`` float32, descending.
        kernel: the transition, Euler when not given.
        noise_fn: the noise of each stochastic step; not called for noise-free ones.
        keep_trajectory: also return the S + 1 states, and the log-probabilities of stochastic steps.

    Raises:
        ValueError: a step is stochastic and there is no ``noise_fn``.
    """
    kernel = kernel or EulerKernel()
    levels: list[float] = sigmas.double().tolist()
    transitions = [kernel.transition(index, levels) for index in range(len(levels) - 1)]
    noisy = [transition is not None and transition.s > 0.0 for transition in transitions]
    if any(noisy) and noise_fn is None:
        raise ValueError(f"{type(kernel).__name__} draws noise between the steps: run_sampling needs noise_fn")
    states = [latents] if keep_trajectory else []
    log_probs: list[Tensor | None] = []
    history = None
    for index, transition in enumerate(transitions):
        sigma_N = torch.full((latents.shape[0],), levels[index], dtype=torch.float32, device=latents.device)
        velocity = velocity_fn(latents, sigma_N)
        noise = noise_fn(index) if noise_fn is not None and noisy[index] else None
        moved = kernel.step(latents, velocity, index, levels, history, noise)
        if keep_trajectory:
            states.append(moved)
            scored = transition if noisy[index] else None
            log_probs.append(transition_log_prob(moved, latents, velocity, scored, history) if scored else None)
        following = transitions[index + 1] if index + 1 < len(transitions) else None
        history = clean_prediction(latents, velocity, levels[index]) if following and following.h else None
        latents = moved
    return Sampled(latents, tuple(states), tuple(log_probs) if keep_trajectory and any(noisy) else None)
