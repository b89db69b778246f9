"""The sampler of EDM (Karras et al. 2022, arXiv 2206.00364, algorithm 2) with its noise, as transitions.

EDM adds noise to a state before each step. As transitions, states are those after the noise was added: the grid is that
of the raised sigmas, and a step is the deterministic one to the next sigma followed by the noise that raises it.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from cosmos_rl.diffusion.kernels import Kernel, Transition, build_kernel, euler, renoise
from cosmos_rl.diffusion.solver_names import CHURNED, SAMPLING_ONLY, explain_sampling_only

_MOST_GROWTH = math.sqrt(1.2) - 1.0
"""Of one step; the paper has sqrt(2) - 1, Cosmos this."""


@dataclass(frozen=True)
class Churn:
    """Which noise is added where. Bounds are sigmas of the exploding variance, ``sigma / (1 - sigma)`` of a flow's."""

    noise_scale: float = 1.0
    """``s_noise``, the factor of the added noise."""
    above: float = 0.0
    """``s_t_min``; at and below it no noise is added."""
    below: float = math.inf
    """``s_t_max``; at and above it no noise is added."""


PLAIN_CHURN = Churn()
"""At all levels, as it comes."""


class StepNoise(TypedDict):
    """Settings of the noise between the steps, see `build_transitions`."""

    noise_level: float
    deterministic: bool
    churn: NotRequired[Churn]


def karras_sigmas(num_steps: int, *, most: float = 200.0, least: float = 0.01, rho: float = 7.0) -> Tensor:
    """The grid of EDM (eq. 5) between two sigmas of the exploding variance, as flow sigmas, and 0.

    Args:
        num_steps: calls of the model; the last one goes from ``least`` to clean.
        most, least: ``sigma_max`` and ``sigma_min``.
        rho: larger is denser at low sigmas.

    Returns:
        ``[num_steps + 1]`` descending float64.
    """
    ramp = torch.linspace(0.0, 1.0, num_steps, dtype=torch.float64)
    exploding = (most ** (1.0 / rho) + ramp * (least ** (1.0 / rho) - most ** (1.0 / rho))) ** rho
    return torch.cat([exploding / (1.0 + exploding), torch.zeros(1, dtype=torch.float64)])


def build_transitions(
    solver: str, sigmas: Tensor, *, noise_level: float, deterministic: bool, churn: Churn = PLAIN_CHURN
) -> tuple[Tensor, Kernel]:
    """Any solver on a pipeline's grid: the grid of the states, and the kernel on it.

    Args:
        solver: `CHURNED`, or a name that `build_kernel` knows.
        sigmas: ``[S + 1]``, those of the pipeline's scheduler.
        noise_level: the churn's strength for `CHURNED`, else as in `build_kernel`.
        deterministic: no noise between the steps.
        churn: more about the noise of `CHURNED`; `PLAIN_CHURN` with any other solver.

    Returns:
        ``sigmas`` itself where no noise is added before the steps, and the transitions between the sigmas.

    Raises:
        ValueError: a solver that there is not, or that cannot do it.
    """
    if solver in SAMPLING_ONLY:
        raise ValueError(f'solver: found "{solver}"; {explain_sampling_only(solver)}')
    if solver not in CHURNED:
        if churn != PLAIN_CHURN:
            raise ValueError(f'churn of solver "{solver}": found {churn}; allowed: {PLAIN_CHURN}')
        return sigmas, build_kernel(solver, noise_level=noise_level, deterministic=deterministic)
    strength = noise_level
    if deterministic:
        strength = 0.0
    raised, kernel = build_churn(solver, sigmas, strength, churn)
    if strength == 0.0:
        return sigmas, kernel
    return raised, kernel


def build_churn(solver: str, sigmas: Tensor, strength: float, churn: Churn = PLAIN_CHURN) -> tuple[Tensor, Kernel]:
    """The grid of the states and the kernel on it.

    Args:
        solver: ``1euler`` or ``2ab``, the exponential Adams-Bashforth step of second order.
        sigmas: ``[S + 1]``, descending flow sigmas with 0 at the end.
        strength: ``s_churn``; a sigma is raised by the factor ``1 + strength / (number of intervals + 1)``, at most
            1.095.
        churn: which noise, and at which sigmas.

    Returns:
        ``[S + 1]`` float64, raised where noise is added, and the transitions between them. The run starts from standard
        normal noise times the first of them. The last two steps have no noise.

    Raises:
        ValueError: a solver of another name.
    """
    if solver not in CHURNED:
        raise ValueError(f'solver: found "{solver}"; allowed: {", ".join(CHURNED)}')
    levels: list[float] = sigmas.double().tolist()
    growth = _read_growth(levels, strength, churn)
    raised = [sigma * (1.0 + more) / (1.0 + more * sigma) for sigma, more in zip(levels, growth, strict=True)]
    kernel = functools.partial(edm_churn, growth=growth, noise_scale=churn.noise_scale, second_order=solver == "2ab")
    return torch.tensor(raised, dtype=torch.float64), kernel


def edm_churn(
    index: int, sigmas: Sequence[float], *, growth: Sequence[float], noise_scale: float, second_order: bool
) -> Transition:
    """A step of EDM on the raised sigmas; the first one, the one after a start at 1 and the last one are first-order.

    First order, with the noise scale 1, is `kernels.cps` with ``cos(noise_level pi / 2) = 1 / (1 + growth)``.

    Args:
        growth: of each sigma, by which share of itself it was raised in ``sigma / (1 - sigma)``.
        noise_scale: factor of the noise that raises the next sigma.
        second_order: extrapolate with the clean prediction of the step before.
    """
    sigma, following = sigmas[index], sigmas[index + 1]
    if index == len(sigmas) - 2:
        return euler(index, sigmas)
    factor = 1.0 + growth[index + 1]
    step = euler(index, sigmas)
    if factor > 1.0:
        kept = following / factor
        step = renoise(sigma, following, kept, noise_scale * kept * math.sqrt(factor**2 - 1.0))
    if not second_order or index == 0 or not sigma < sigmas[index - 1] < 1.0:
        return step
    # in lambda = -ln(sigma / (1 - sigma)), to the next sigma before it was raised
    length = _log_exploding(sigma) - _log_exploding(following) + math.log(factor)
    if length <= 0.0:
        return step
    before = _log_exploding(sigmas[index - 1]) - _log_exploding(sigma)
    b = (1.0 - following) * (1.0 + math.expm1(-length) / length) * length / before
    return Transition(step.a + b, step.g - b * sigma, h=-b, s=step.s)


def _read_growth(levels: Sequence[float], strength: float, churn: Churn) -> list[float]:
    intervals = len(levels) - 2
    most = min(strength / (intervals + 1), _MOST_GROWTH)
    growth = [0.0] * len(levels)
    for index, sigma in enumerate(levels[:intervals]):
        if sigma < 1.0 and churn.above < sigma / (1.0 - sigma) < churn.below:
            growth[index] = most
    return growth


def _log_exploding(sigma: float) -> float:
    return math.log(sigma / (1.0 - sigma))
