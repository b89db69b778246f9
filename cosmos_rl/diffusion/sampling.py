"""The one sampling loop that rollouts, validation and export checks share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_rl.diffusion.kernels import Kernel, StepFn, euler, predict_clean, step_with_log_prob, transition_log_prob

VelocityFn = Callable[[Tensor, Tensor], Tensor]
"""(latents ``[N, C, ...]``, sigma ``[N]`` float32) -> velocity ``[N, C, ...]``."""

NoiseFn = Callable[[int], Tensor]
"""Index of a step -> standard normal noise like the latents."""


@dataclass(frozen=True)
class Sampled:
    """What a run of the sampling loop gives."""

    latents: Tensor
    """``[N, C, ...]`` at the last sigma."""
    trajectory: tuple[Tensor, ...]
    """All states from the start to ``latents``, ``S + 1`` of them; empty unless asked for."""
    log_probs: tuple[Tensor | None, ...]
    """Per step, ``S`` of them: log-probability ``[N]`` of the state that was drawn, mean over elements; None for a
    noise-free step."""


def run_sampling(
    velocity_fn: VelocityFn,
    latents: Tensor,
    sigmas: Tensor,
    *,
    kernel: Kernel = euler,
    step_fn: StepFn | None = None,
    noise_fn: NoiseFn | None = None,
    keep_trajectory: bool = False,
) -> Sampled:
    """Integrate from ``sigmas[0]`` down to ``sigmas[-1]``.

    Args:
        velocity_fn: the model, guidance included; called once for each step, in their order.
        latents: ``[N, C, ...]``, noise at ``sigmas[0]``; its dtype is the dtype that the velocity function receives.
        sigmas: ``[S + 1]`` float32, descending.
        kernel: the transition; its coefficients say which steps need noise and history.
        step_fn: takes a step in place of the kernel's own arithmetic.
        noise_fn: the noise of each stochastic step; not called for noise-free ones.
        keep_trajectory: also return the S + 1 states.

    Raises:
        ValueError: a step is stochastic and there is no ``noise_fn``.
    """
    sigma_list: list[float] = sigmas.double().tolist()
    transitions = [kernel(index, sigma_list) for index in range(len(sigma_list) - 1)]
    if noise_fn is None and any(transition.s > 0.0 for transition in transitions):
        raise ValueError("the kernel draws noise between the steps: run_sampling needs noise_fn")
    states = [latents]
    log_probs: list[Tensor | None] = []
    history = None
    for index, transition in enumerate(transitions):
        sigma_N = torch.full((latents.shape[0],), sigma_list[index], dtype=torch.float32, device=latents.device)
        velocity = velocity_fn(latents, sigma_N)
        noise = None
        if noise_fn is not None and transition.s > 0.0:
            noise = noise_fn(index)
        if step_fn is None:
            moved, log_prob = step_with_log_prob(transition, latents, velocity, history, noise)
        else:
            moved, log_prob = step_fn(velocity, latents, index, sigma_list, history=history, noise=noise)
        needs_history = index + 1 < len(transitions) and transitions[index + 1].h != 0.0
        history = None
        if needs_history:
            history = predict_clean(latents, velocity, sigma_list[index])
        log_probs.append(log_prob)
        if keep_trajectory:
            states.append(moved)
        latents = moved
    return Sampled(latents, tuple(states) if keep_trajectory else (), tuple(log_probs))


def hold_given(kernel_step: StepFn, kernel: Kernel, mask: Tensor) -> StepFn:
    """Steps of a kernel on the elements of ``mask``; the others are given by a medium.

    These move along the straight line of their velocity at the first step, as in the pipelines that lead them from the
    first state to the medium; in the others nothing reads them.
    """
    first: list[Tensor] = []

    def step(
        velocity: Tensor,
        latents: Tensor,
        index: int,
        sigmas: Sequence[float],
        *,
        history: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        first[:] = first or [velocity]
        moved, log_prob = kernel_step(velocity, latents, index, sigmas, history=history, noise=noise)
        if log_prob is not None:
            log_prob = transition_log_prob(moved, latents, velocity, kernel(index, sigmas), history, mask)
        straight = latents + (sigmas[index + 1] - sigmas[index]) * first[0]
        return torch.where(mask, moved, straight.to(moved.dtype)), log_prob

    return step
