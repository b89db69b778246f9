"""Transition kernels: how one sampling step goes from ``sigma`` to ``sigma_next``.

A kernel is a function ``(index, sigmas) -> Transition``. Every transition is affine in the velocity,
``z' = a z + g v + h d_prev + s eps``, so a step is a Gaussian with mean ``a z + g v + h d_prev`` and standard deviation
``s``, and its log-probability, ratio and KL are closed forms of the velocities. The coefficients are Python floats
(float64), so that they depend neither on the device nor on the dtype of the latents.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cosmos_rl.diffusion.elements import element_mean, widen


@dataclass(frozen=True)
class Transition:
    """Coefficients of one step ``z' = a z + g v + h d_prev + s eps`` with standard normal ``eps``.

    ``d_prev`` is the clean sample that the step before predicted, ``z - sigma v`` of that step; it is a constant of
    this step: no gradient goes through it.
    """

    a: float
    g: float
    h: float = 0.0
    s: float = 0.0

    def mean(self, latents: Tensor, velocity: Tensor, history: Tensor | None = None) -> Tensor:
        """``a z + g v + h d_prev`` ``[N, C, ...]`` in float32, float64 for float64 input."""
        moved = self.a * widen(latents) + self.g * widen(velocity)
        if self.h == 0.0:
            return moved
        if history is None:
            raise ValueError("this transition needs the previous step's clean prediction (history); found None")
        return moved + self.h * widen(history)


Kernel = Callable[[int, Sequence[float]], Transition]
"""(index, descending sigmas ``[S + 1]``) -> the transition from ``sigmas[index]`` to ``sigmas[index + 1]``."""


class StepFn(Protocol):
    """What takes a step of the sampling loop."""

    def __call__(
        self,
        velocity: Tensor,
        latents: Tensor,
        index: int,
        sigmas: Sequence[float],
        *,
        history: Tensor | None,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Velocity and latents ``[N, C, ...]`` at ``sigmas[index]`` -> the next latents and their log-probability
        ``[N]``, None without noise. ``history`` and ``noise`` are those of `apply_transition`."""
        ...


def apply_transition(
    transition: Transition,
    latents: Tensor,
    velocity: Tensor,
    history: Tensor | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Latents ``[N, C, ...]`` and their velocity -> the next latents, in the velocity's dtype.

    The Euler step is bit-equal to ``FlowMatchEulerDiscreteScheduler.step``, which multiplies in the velocity's dtype
    and adds in float32; float64 stays float64.

    Args:
        history: the clean prediction of the step before, where ``transition.h`` is not 0.
        noise: standard normal like the latents, where ``transition.s`` is not 0.

    Raises:
        ValueError: history or noise is needed and missing.
    """
    if transition.a == 1.0 and transition.h == 0.0 and transition.s == 0.0:
        return (widen(latents) + transition.g * velocity).to(velocity.dtype)
    moved = transition.mean(latents, velocity, history)
    if transition.s > 0.0:
        if noise is None or noise.shape != latents.shape:
            found = None if noise is None else list(noise.shape)
            raise ValueError(f"a stochastic step needs noise of the latents' shape {list(latents.shape)}: {found}")
        moved = moved + transition.s * noise.to(moved)
    return moved.to(velocity.dtype)


def euler(index: int, sigmas: Sequence[float]) -> Transition:
    """The probability-flow ODE, first order: ``z' = z + (sigma_next - sigma) * v``.

    First-order DPM-Solver++ (Lu et al. 2022, arXiv 2211.01095) and DDIM without noise are this step for flow models.
    """
    return Transition(1.0, sigmas[index + 1] - sigmas[index])


def flow(index: int, sigmas: Sequence[float], *, noise_level: float) -> Transition:
    """The SDE of Flow-GRPO (Liu et al. 2025, arXiv 2505.05470): diffusion ``noise_level * sqrt(sigma / (1 - sigma))``.

    It has the marginals of the ODE. In the denominator a ``sigma`` of 1 counts as the next sigma. The last step is the
    noise-free ODE step.
    """
    sigma, following = sigmas[index], sigmas[index + 1]
    if _is_last(index, sigmas):
        return euler(index, sigmas)
    # shifted grids begin at 0.9998 and the like, where the diffusion would be as useless as at 1
    bounded = sigma
    if math.isclose(sigma, 1.0, abs_tol=1e-3):
        bounded = following
    return _sde(sigma, following, noise_level * math.sqrt(sigma / max(1.0 - bounded, 1e-9)))


def flow_linear(index: int, sigmas: Sequence[float], *, noise_level: float) -> Transition:
    """The SDE of Flow-GRPO's script for Wan: diffusion ``noise_level * (last + (second - last) * sigma)``.

    ``second`` and ``last`` are sigmas of the run. The last step is the noise-free ODE step.
    """
    if _is_last(index, sigmas):
        return euler(index, sigmas)
    sigma, last = sigmas[index], sigmas[-1]
    return _sde(sigma, sigmas[index + 1], noise_level * (last + (sigmas[1] - last) * sigma))


def dance(index: int, sigmas: Sequence[float], *, noise_level: float) -> Transition:
    """The SDE of DanceGRPO (Xue et al. 2025, arXiv 2505.07818): constant diffusion ``noise_level``.

    The last step is the noise-free ODE step; a noisy one to a small ``sigma`` diverges.
    """
    if _is_last(index, sigmas):
        return euler(index, sigmas)
    return _sde(sigmas[index], sigmas[index + 1], noise_level)


def ddim(index: int, sigmas: Sequence[float], *, noise_level: float) -> Transition:
    """DDIM (Song et al. 2020, arXiv 2010.02502, eq. 12 and 16) with ``eta = noise_level`` in [0, 1]; last step ODE."""
    sigma, following = sigmas[index], sigmas[index + 1]
    if _is_last(index, sigmas) or noise_level == 0.0 or following >= sigma:
        return euler(index, sigmas)
    kept = following * (1.0 - sigma) / (sigma * (1.0 - following))
    std = noise_level * following * math.sqrt(1.0 - kept**2)
    return renoise(sigma, following, math.sqrt(following**2 - std**2), std)


def cps(index: int, sigmas: Sequence[float], *, noise_level: float) -> Transition:
    """Coefficients-preserving sampling (Wang & Yu 2025, arXiv 2509.05952), ``noise_level`` in [0, 1].

    Of the noise at the next sigma, the share ``sin(noise_level pi / 2)`` is drawn again, the share ``cos`` of it stays.
    The last step is the noise-free ODE step.
    """
    following = sigmas[index + 1]
    if _is_last(index, sigmas) or noise_level == 0.0 or following >= sigmas[index]:
        return euler(index, sigmas)
    angle = noise_level * math.pi / 2.0
    return renoise(sigmas[index], following, following * math.cos(angle), following * math.sin(angle))


def dpm2(index: int, sigmas: Sequence[float]) -> Transition:
    """DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095, algorithm 2) in ``lambda = ln((1 - sigma) / sigma)``.

    It is the Euler step plus ``b (d - d_prev)`` with the clean predictions of this step and the one before. The first
    step, the one after a start at ``sigma`` 1 (where lambda is infinite) and the last one are first-order.
    """
    sigma, following = sigmas[index], sigmas[index + 1]
    step = euler(index, sigmas)
    if index == 0 or _is_last(index, sigmas):
        return step
    previous = sigmas[index - 1]
    if not sigma < previous < 1.0:
        return step
    ratio = (_log_snr(following) - _log_snr(sigma)) / (_log_snr(sigma) - _log_snr(previous))
    b = 0.5 * ratio * (sigma - following) / sigma
    return Transition(1.0 + b, step.g - b * sigma, h=-b)


_NOISY = {"flow": flow, "flow_linear": flow_linear, "dance": dance, "ddim": ddim, "cps": cps}
_NOISELESS = {"euler": euler, "dpm1": euler, "dpm2": dpm2}


def build_kernel(solver: str, *, noise_level: float, deterministic: bool) -> Kernel:
    """The kernel of a solver's name: flow, flow_linear, dance, ddim, cps, dpm1, dpm2 or euler.

    Args:
        solver: the name.
        noise_level: strength of the noise between the steps, where a solver has noise.
        deterministic: no noise between the steps; flow, flow_linear, ddim and cps are then the Euler step.

    Raises:
        ValueError: unknown name, or a solver that cannot be (or can only be) deterministic.
    """
    if solver in _NOISY:
        if deterministic and solver == "dance":
            raise ValueError('deterministic with solver "dance": found true; allowed: false')
        if deterministic:
            return euler
        if solver in ("ddim", "cps") and not 0.0 <= noise_level <= 1.0:
            raise ValueError(f'noise_level of solver "{solver}": found {noise_level}; allowed: 0 to 1')
        return functools.partial(_NOISY[solver], noise_level=noise_level)
    if solver not in _NOISELESS:
        allowed = ", ".join([*_NOISY, *_NOISELESS, STOCK])
        raise ValueError(f'solver: found "{solver}"; allowed: {allowed}')
    if not deterministic:
        raise ValueError(f'deterministic with solver "{solver}": found false; allowed: true')
    return _NOISELESS[solver]


STOCK = "stock"
"""The solver that is the pipeline scheduler's own step, see `stock_step`; it has no known coefficients."""


def stock_step(scheduler: Any) -> StepFn:
    """The ``step`` of a diffusers scheduler, for evaluation with exactly the pipeline's own sampler.

    The scheduler keeps its own history and sigmas.
    """

    def step(velocity: Tensor, latents: Tensor, index: int, *_: Any, **__: Any) -> tuple[Tensor, None]:
        result: tuple[Tensor] = scheduler.step(velocity, scheduler.timesteps[index], latents, return_dict=False)
        return result[0], None

    return step


def step_with_log_prob(
    transition: Transition, latents: Tensor, velocity: Tensor, history: Tensor | None, noise: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`apply_transition`, and the log-probability ``[N]`` of its result; None for a noise-free transition."""
    moved = apply_transition(transition, latents, velocity, history, noise)
    if transition.s == 0.0:
        return moved, None
    return moved, transition_log_prob(moved, latents, velocity, transition, history)


def predict_clean(latents: Tensor, velocity: Tensor, sigma: float) -> Tensor:
    """``z - sigma v``, the clean sample that a velocity points to, in float32 or float64; a later step's history."""
    return widen(latents) - sigma * widen(velocity)


def transition_log_prob(
    z_next: Tensor,
    z: Tensor,
    velocity: Tensor,
    transition: Transition,
    history: Tensor | None = None,
    element_mask: Tensor | None = None,
) -> Tensor:
    """``ln N(z_next; mean, s^2)`` averaged over all but the batch dimension, ``[N]`` float32 or float64.

    Args:
        element_mask: which elements count, broadcastable to the latents; all without one.

    Raises:
        ValueError: the transition is noise-free, so it has no density.
    """
    _require_noise(transition)
    error = (widen(z_next) - transition.mean(z, velocity, history)) / transition.s
    return element_mean(-0.5 * error**2, element_mask) - math.log(transition.s) - 0.5 * math.log(2.0 * math.pi)


def log_ratio(
    velocity_new: Tensor,
    velocity_old: Tensor,
    noise_xi: Tensor,
    transition: Transition,
    element_mask: Tensor | None = None,
) -> Tensor:
    """``ln p_new(z') - ln p_old(z')`` averaged over all but the batch dimension, ``[N]``.

    Written in ``delta = g (v_new - v_old)``, ``mean(xi delta / s - delta^2 / (2 s^2))``: no two large numbers are
    subtracted, and equal velocities give exactly 0.

    Args:
        velocity_new, velocity_old: ``[N, C, ...]`` at the same state.
        noise_xi: ``[N, C, ...]``, the noise that the old policy's step drew, ``(z' - mean_old) / s``.
        transition: the step's coefficients.
        element_mask: which elements count, broadcastable to the velocities; all without one.

    Raises:
        ValueError: the transition is noise-free.
    """
    _require_noise(transition)
    delta = transition.g / transition.s * (widen(velocity_new) - widen(velocity_old))
    return element_mean(widen(noise_xi) * delta - 0.5 * delta**2, element_mask)


def transition_kl(
    velocity: Tensor, velocity_ref: Tensor, transition: Transition, element_mask: Tensor | None = None
) -> Tensor:
    """KL divergence of two policies' steps from one state, ``mean(g^2 (v - v_ref)^2 / (2 s^2))``, ``[N]``.

    ``element_mask``: which elements count, broadcastable to the velocities; all without one.

    Raises:
        ValueError: the transition is noise-free.
    """
    _require_noise(transition)
    shift = transition.g / transition.s * (widen(velocity) - widen(velocity_ref))
    return element_mean(0.5 * shift**2, element_mask)


def read_sigmas(scheduler: Any, num_steps: int) -> Tensor:
    """Set ``num_steps`` on a diffusers flow scheduler and read its descending sigmas, ``[num_steps + 1]`` float32.

    The sigmas are read, never recomputed: some schedulers shift twice, stretch or round them.
    """
    scheduler.set_timesteps(num_steps)
    return scheduler.sigmas.detach().to("cpu", torch.float32)


def _is_last(index: int, sigmas: Sequence[float]) -> bool:
    return index == len(sigmas) - 2


def _sde(sigma: float, following: float, diffusion: float) -> Transition:
    """One Euler-Maruyama step of the SDE with this diffusion that has the marginals of the ODE."""
    dt = following - sigma
    drift = diffusion**2 / (2.0 * sigma)
    return Transition(1.0 + drift * dt, (1.0 + drift * (1.0 - sigma)) * dt, s=diffusion * math.sqrt(-dt))


def renoise(sigma: float, following: float, kept: float, std: float) -> Transition:
    """``(1 - following) clean + kept noise + std eps`` with the predictions of this step,
    ``clean = z - sigma v`` and ``noise = z + (1 - sigma) v``."""
    return Transition(1.0 - following + kept, kept * (1.0 - sigma) - sigma * (1.0 - following), s=std)


def _log_snr(sigma: float) -> float:
    return math.log((1.0 - sigma) / sigma)


def _require_noise(transition: Transition) -> None:
    if transition.s <= 0.0:
        raise ValueError("a noise-free transition has no log-probability")
