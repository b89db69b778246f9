"""Transition kernels: how one sampling step goes from noise level ``sigma`` to ``sigma_next``.

Every kernel is affine in the velocity, ``z' = a z + g v + h d_prev + s eps``, so a step is a Gaussian with mean
``a z + g v + h d_prev`` and deviation ``s``, and its log-probability, ratio and KL are closed forms of the velocities.
The coefficients are Python floats (float64), so that they depend neither on the device nor on the dtype of the latents.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


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
        moved = self.a * _wide(latents) + self.g * _wide(velocity)
        if self.h == 0.0:
            return moved
        if history is None:
            raise ValueError("this transition needs the previous step's clean prediction (history); found None")
        return moved + self.h * _wide(history)


class Kernel(Protocol):
    """One transition of the sampling loop."""

    def transition(self, index: int, sigmas: Sequence[float]) -> Transition | None:
        """Coefficients of the step from ``sigmas[index]`` to ``sigmas[index + 1]``; None where they are not known."""
        ...

    def step(
        self,
        latents: Tensor,
        velocity: Tensor,
        index: int,
        sigmas: Sequence[float],
        history: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Latents ``[N, C, ...]`` at ``sigmas[index]`` and their velocity -> latents at ``sigmas[index + 1]``.

        ``history`` is the clean prediction of the step before, where ``transition(...).h`` is not 0; ``noise`` is
        standard normal like the latents, where ``transition(...).s`` is not 0.
        """
        ...


class AffineKernel(ABC):
    """A kernel that is its coefficients: float32 arithmetic, a result in the velocity's dtype."""

    @abstractmethod
    def transition(self, index: int, sigmas: Sequence[float]) -> Transition:
        """Coefficients of the step from ``sigmas[index]`` to ``sigmas[index + 1]``."""

    def step(
        self,
        latents: Tensor,
        velocity: Tensor,
        index: int,
        sigmas: Sequence[float],
        history: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """See :class:`Kernel`."""
        transition = self.transition(index, sigmas)
        moved = transition.mean(latents, velocity, history)
        if transition.s > 0.0:
            if noise is None or noise.shape != latents.shape:
                found = None if noise is None else list(noise.shape)
                raise ValueError(f"a stochastic step needs noise of the latents' shape {list(latents.shape)}: {found}")
            moved = moved + transition.s * noise.to(moved)
        return moved.to(velocity.dtype)


@dataclass(frozen=True)
class EulerKernel(AffineKernel):
    """The probability-flow ODE, first order: ``z' = z + (sigma_next - sigma) * v``.

    Bit-equal to ``FlowMatchEulerDiscreteScheduler.step``, which multiplies in the velocity's dtype and adds in float32;
    float64 stays float64.
    First-order DPM-Solver++ (Lu et al. 2022, arXiv 2211.01095) and DDIM without noise are this step for flow models.
    """

    def transition(self, index: int, sigmas: Sequence[float]) -> Transition:
        """See :class:`AffineKernel`."""
        return _ode(sigmas[index], sigmas[index + 1])

    def step(
        self,
        latents: Tensor,
        velocity: Tensor,
        index: int,
        sigmas: Sequence[float],
        history: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """See :class:`Kernel`."""
        dt = sigmas[index + 1] - sigmas[index]
        return (_wide(latents) + dt * velocity).to(velocity.dtype)


Dpm1Kernel = EulerKernel


@dataclass(frozen=True)
class FlowKernel(AffineKernel):
    """The SDE of Flow-GRPO (Liu et al. 2025, arXiv 2505.05470): diffusion ``noise_level * sqrt(sigma / (1 - sigma))``.

    It has the marginals of the ODE. In the denominator a ``sigma`` of 1 counts as the next level. The last step is the
    noise-free ODE step.
    """

    noise_level: float

    def transition(self, index: int, sigmas: Sequence[float]) -> Transition:
        """See :class:`AffineKernel`."""
        sigma, following = sigmas[index], sigmas[index + 1]
        if _is_last(index, sigmas):
            return _ode(sigma, following)
        # shifted grids begin at 0.9998 and the like, where the diffusion would be as useless as at 1
        bounded = following if math.isclose(sigma, 1.0, abs_tol=1e-3) else sigma
        return _sde(sigma, following, self.noise_level * math.sqrt(sigma / max(1.0 - bounded, 1e-9)))


@dataclass(frozen=True)
class DanceKernel(AffineKernel):
    """The SDE of DanceGRPO (Xue et al. 2025, arXiv 2505.07818): constant diffusion ``noise_level``.

    The last step is the noise-free ODE step; a noisy one to a small ``sigma`` diverges.
    """

    noise_level: float

    def transition(self, index: int, sigmas: Sequence[float]) -> Transition:
        """See :class:`AffineKernel`."""
        sigma, following = sigmas[index], sigmas[index + 1]
        return _ode(sigma, following) if _is_last(index, sigmas) else _sde(sigma, following, self.noise_level)


@dataclass(frozen=True)
class DdimKernel(AffineKernel):
    """DDIM (Song et al. 2020, arXiv 2010.02502, eq. 12 and 16) with ``eta = noise_level`` in [0, 1]; last step ODE."""

    noise_level: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise_level <= 1.0:
            raise ValueError(f'noise_level of solver "ddim": found {self.noise_level}; allowed: 0 to 1')

    def transition(self, index: int, sigmas: Sequence[float]) -> Transition:
        """See :class:`AffineKernel`."""
        sigma, following = sigmas[index], sigmas[index + 1]
        if _is_last(index, sigmas) or self.noise_level == 0.0 or following >= sigma:
            return _ode(sigma, following)
        kept = following * (1.0 - sigma) / (sigma * (1.0 - following))
        deviation = self.noise_level * following * math.sqrt(1.0 - kept**2)
        predicted = math.sqrt(following**2 - deviation**2)
        # (1 - following) (z - sigma v) + predicted (z + (1 - sigma) v)
        a = 1.0 - following + predicted
        g = predicted * (1.0 - sigma) - sigma * (1.0 - following)
        return Transition(a, g, s=deviation)


@dataclass(frozen=True)
class Dpm2Kernel(AffineKernel):
    """DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095, algorithm 2) in ``lambda = ln((1 - sigma) / sigma)``.

    It is the Euler step plus ``b (d - d_prev)`` with the clean predictions of this step and the one before. The first
    step, the one after a start at ``sigma`` 1 (where lambda is infinite) and the last one are first-order.
    """

    def transition(self, index: int, sigmas: Sequence[float]) -> Transition:
        """See :class:`AffineKernel`."""
        sigma, following = sigmas[index], sigmas[index + 1]
        step = _ode(sigma, following)
        if index == 0 or _is_last(index, sigmas):
            return step
        previous = sigmas[index - 1]
        if not sigma < previous < 1.0:
            return step
        ratio = (_log_snr(following) - _log_snr(sigma)) / (_log_snr(sigma) - _log_snr(previous))
        b = 0.5 * ratio * (sigma - following) / sigma
        return Transition(1.0 + b, step.g - b * sigma, h=-b)


class StockKernel:
    """The ``step`` of a diffusers scheduler, for evaluation with exactly the pipeline's own sampler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def transition(self, index: int, sigmas: Sequence[float]) -> None:
        """None: the scheduler does not tell its coefficients."""
        return None

    def step(
        self,
        latents: Tensor,
        velocity: Tensor,
        index: int,
        sigmas: Sequence[float],
        history: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """See :class:`Kernel`; the scheduler keeps its own history and levels."""
        timestep = self._scheduler.timesteps[index]
        result: tuple[Tensor] = self._scheduler.step(velocity, timestep, latents, return_dict=False)
        return result[0]


def kernel_named(solver: str, *, noise_level: float, deterministic: bool, scheduler: Any = None) -> Kernel:
    """The kernel of a solver's name: flow, dance, ddim, dpm1, dpm2, euler or stock.

    Args:
        solver: the name.
        noise_level: strength of the noise between the steps, for flow, dance and ddim.
        deterministic: no noise between the steps; flow and ddim are then the Euler step.
        scheduler: the diffusers scheduler whose step "stock" takes.

    Raises:
        ValueError: unknown name, or a solver that cannot be (or can only be) deterministic.
    """
    if solver == "stock":
        if scheduler is None:
            raise ValueError('solver "stock" needs a scheduler; found None')
        return StockKernel(scheduler)
    if solver in _NOISY:
        if not deterministic:
            return _NOISY[solver](noise_level)
        if solver == "dance":
            raise ValueError('deterministic with solver "dance": found true; allowed: false')
        return EulerKernel()
    if solver not in _NOISELESS:
        allowed = ", ".join([*_NOISY, *_NOISELESS, "stock"])
        raise ValueError(f'solver: found "{solver}"; allowed: {allowed}')
    if not deterministic:
        raise ValueError(f'deterministic with solver "{solver}": found false; allowed: true')
    return _NOISELESS[solver]()


_NOISY = {"flow": FlowKernel, "dance": DanceKernel, "ddim": DdimKernel}
_NOISELESS = {"euler": EulerKernel, "dpm1": Dpm1Kernel, "dpm2": Dpm2Kernel}


def clean_prediction(latents: Tensor, velocity: Tensor, sigma: float) -> Tensor:
    """``z - sigma v``, the clean sample that a velocity points to, in float32 or float64; a later step's history."""
    return _wide(latents) - sigma * _wide(velocity)


def transition_log_prob(
    z_next: Tensor, z: Tensor, velocity: Tensor, transition: Transition, history: Tensor | None = None
) -> Tensor:
    """``ln N(z_next; mean, s^2)`` averaged over all but the batch dimension, ``[N]`` float32 or float64.

    Raises:
        ValueError: the transition is noise-free, so it has no density.
    """
    _require_noise(transition)
    error = (_wide(z_next) - transition.mean(z, velocity, history)) / transition.s
    return _element_mean(-0.5 * error**2) - math.log(transition.s) - 0.5 * math.log(2.0 * math.pi)


def log_ratio(velocity_new: Tensor, velocity_old: Tensor, noise_xi: Tensor, transition: Transition) -> Tensor:
    """``ln p_new(z') - ln p_old(z')`` averaged over all but the batch dimension, ``[N]``.

    Written in ``delta = g (v_new - v_old)``, ``mean(xi delta / s - delta^2 / (2 s^2))``: no two large numbers are
    subtracted, and equal velocities give exactly 0.

    Args:
        velocity_new, velocity_old: ``[N, C, ...]`` at the same state.
        noise_xi: ``[N, C, ...]``, the noise that the old policy's step drew, ``(z' - mean_old) / s``.
        transition: the step's coefficients.

    Raises:
        ValueError: the transition is noise-free.
    """
    _require_noise(transition)
    delta = transition.g / transition.s * (_wide(velocity_new) - _wide(velocity_old))
    return _element_mean(_wide(noise_xi) * delta - 0.5 * delta**2)


def transition_kl(velocity: Tensor, velocity_ref: Tensor, transition: Transition) -> Tensor:
    """KL divergence of two policies' steps from one state, ``mean(g^2 (v - v_ref)^2 / (2 s^2))``, ``[N]``.

    Raises:
        ValueError: the transition is noise-free.
    """
    _require_noise(transition)
    return _element_mean(0.5 * (transition.g / transition.s * (_wide(velocity) - _wide(velocity_ref))) ** 2)


def sigmas_of(scheduler: Any, num_steps: int) -> Tensor:
    """Set ``num_steps`` on a diffusers flow scheduler and read its descending levels, ``[num_steps + 1]`` float32.

    The levels are read, never recomputed: some schedulers shift twice, stretch or round them.
    """
    scheduler.set_timesteps(num_steps)
    return scheduler.sigmas.detach().to("cpu", torch.float32)


def _is_last(index: int, sigmas: Sequence[float]) -> bool:
    return index == len(sigmas) - 2


def _ode(sigma: float, following: float) -> Transition:
    return Transition(1.0, following - sigma)


def _sde(sigma: float, following: float, diffusion: float) -> Transition:
    """One Euler-Maruyama step of the SDE with this diffusion that has the marginals of the ODE."""
    dt = following - sigma
    drift = diffusion**2 / (2.0 * sigma)
    return Transition(1.0 + drift * dt, (1.0 + drift * (1.0 - sigma)) * dt, s=diffusion * math.sqrt(-dt))


def _log_snr(sigma: float) -> float:
    return math.log((1.0 - sigma) / sigma)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _element_mean(value: Tensor) -> Tensor:
    return value.flatten(1).mean(1)


def _require_noise(transition: Transition) -> None:
    if transition.s <= 0.0:
        raise ValueError("a noise-free transition has no log-probability")
