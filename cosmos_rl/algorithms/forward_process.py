"""Online objectives on the forward process: one row function for NFT, EPG, PEPG, PAR, AWM and GRPO with an ELBO.

A sample of the old policy is noised again, and the trained velocity ``v`` is compared with the old one there. With
``e = noised - sigma v_old - clean``, the error of the old policy's clean prediction, and ``delta = v - v_old``, every
objective is made of estimates of ``-log p(clean)`` at ``e - reach sigma delta``: reach 1 is the trained policy, reach
``beta`` and ``-beta`` are the policies that NFT fits to good and to bad samples.

Without adaptive weights all of them are, but for constants, ``-2 A sigma <e delta> + kappa sigma^2 <delta^2>``. The
linear ones have the curvature ``kappa = A``, which makes rows of negative advantage unbounded below; NFT has
``kappa = M beta`` with the advantage's bound ``M``. So NFT is advantage-weighted matching plus ``M beta - A`` times the
distance to the old policy.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cosmos_rl.diffusion.elements import check_rows, check_shapes, element_mean, widen

Estimator = Literal["adaptive", "x0", "uniform", "linear", "exact", "huber", "ghuber"]
Surrogate = Literal["mirrored", "linear", "proximal", "squared", "clipped"]

_MIN_SIZE = 1e-5
_MAX_LOG_RATIO = 20.0
"""Larger log-ratios count as this: these are differences of bounds, and their exponentials overflow."""
_HUBER = 1e-10


@dataclass(frozen=True)
class ForwardProcess:
    """An objective as data; its names are in ``FORWARD_PROCESSES``."""

    surrogate: Surrogate
    """What becomes of advantage and estimates, see ``forward_process_loss``."""
    estimator: Estimator = "adaptive"
    """See ``estimate_cost``."""
    with_ratio: bool = True
    """Linear and its relatives: times the ratio of the estimated likelihoods, a constant for the gradient."""
    beta: float = 1.0
    """Mirrored: how far the two policies lie from the old one."""
    bound: float = 1.0
    """Mirrored: the upper bound of the advantage."""
    clip: float = 1.0
    """Clipped: the ratio counts between ``1 - clip`` and ``1 + clip``."""
    power: float = 0.25
    """Of the generalised Huber estimator."""
    old_weight: float = 0.0
    """Of the squared distance of the trained velocity from the old policy's."""


NFT = ForwardProcess("mirrored", bound=5.0)
"""DiffusionNFT, arXiv 2509.16117."""
EPG = ForwardProcess("linear")
"""ELBO policy gradient, arXiv 2602.04663."""
PEPG = ForwardProcess("proximal")
"""Proximal ELBO policy gradient, arXiv 2602.04663; the gradient of PAR."""
PAR = ForwardProcess("squared")
"""Proximal advantage regression, arXiv 2602.04663."""
ELBO_GRPO = ForwardProcess("clipped", clip=1e-3)
"""GRPO with the difference of ELBOs as its log-ratio, arXiv 2602.04663."""
AWM = ForwardProcess("clipped", "ghuber", old_weight=1.0)
"""Advantage-weighted matching, arXiv 2509.25050. Without the distance to a lagging policy nothing bounds it."""
FORWARD_PROCESSES = {"nft": NFT, "epg": EPG, "pepg": PEPG, "par": PAR, "elbo_grpo": ELBO_GRPO, "awm": AWM}


def estimate_cost(
    error: Tensor, sigma_B: Tensor, estimator: Estimator, element_mask: Tensor | None = None, power: float = 0.25
) -> Tensor:
    """An estimate of ``-log p(clean)`` but for constants, ``[B]``, from the error of a clean prediction.

    With ``l = <error^2> / sigma^2``, the squared error of the velocity: ``x0`` is ``sigma^2 l``, ``linear``
    ``sigma l``, ``uniform`` ``l``; ``adaptive`` ``sigma^2 l`` over ``max(<|error|>, 1e-5)``, a constant for the
    gradient; ``exact`` ``(1 - sigma) / (sigma + 1e-3) l``, the KL divergence of the paths; ``huber``
    ``sigma (sqrt(l + 1e-10) - 1e-5)``; ``ghuber`` ``sigma / p ((l + 1e-10)^p - 1e-10^p)``, both with the float64 of
    AWM's authors.
    """
    squared_B = element_mean(error**2, element_mask)
    if estimator == "x0":
        return squared_B
    if estimator == "adaptive":
        size_B = element_mean(error.detach().double().abs(), element_mask).clamp(min=_MIN_SIZE)
        return squared_B / size_B.to(squared_B)
    sigma = sigma_B.to(squared_B)
    velocity_B = squared_B / sigma**2
    if estimator == "uniform":
        return velocity_B
    if estimator == "linear":
        return sigma * velocity_B
    if estimator == "exact":
        return (1.0 - sigma) / (sigma + 1e-3) * velocity_B
    p = {"huber": 0.5, "ghuber": power}[estimator]
    factor = {"huber": 1.0, "ghuber": 1.0 / p}[estimator]
    raised_B = (velocity_B.double() + _HUBER) ** p - _HUBER**p
    return (factor * sigma.double() * raised_B).to(squared_B)


def forward_process_loss(
    velocity: Tensor,
    velocity_old: Tensor,
    clean: Tensor,
    noised: Tensor,
    sigma_B: Tensor,
    value_B: Tensor,
    objective: ForwardProcess,
    *,
    element_mask: Tensor | None = None,
    weight_B: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The rows' losses, with ``cost`` of ``estimate_cost``, ``A`` the advantage and ``l = cost_old - cost``.

    ``linear``: ``ratio A cost``. ``proximal``: ``ratio (A - l) cost``. ``squared``: ``ratio (A - l)^2 / 2``. In these
    three only ``cost`` (in the last one ``l``) has a gradient. ``clipped``: ``max(-A e^l, -A clip(e^l))``.
    ``mirrored``: ``M / beta (r cost+ + (1 - r) cost-)`` with ``r = value`` in [0, 1], of the errors at reach ``beta``
    and ``-beta``.

    Args:
        velocity, velocity_old: ``[B, C, ...]``, trained and sampling policy at ``noised`` and ``sigma_B``.
        clean, noised: ``[B, C, ...]``, a sample of the old policy and its noised version.
        sigma_B: ``[B]`` in (0, 1].
        value_B: ``[B]``, the advantage; for ``mirrored`` NFT's optimality.
        element_mask: which elements count in all means, broadcastable to ``velocity``.
        weight_B: ``[B]`` factor of each row in the sum, 1 when not given; rows of weight 0 are padding.

    Returns:
        The sum over the rows of weight times loss, the only one with a gradient, ``old_weight`` times the distance to
        the old policy included; and, each ``[B]``, ``policy_loss``, ``old_deviation`` (that distance) and, but for
        ``mirrored``, ``cost`` and ``log_ratio``.

    Raises:
        ValueError: shapes that do not fit; nothing is broadcast over the rows.
    """
    check_shapes(velocity, velocity_old, clean, noised)
    row_weight_B = torch.ones_like(sigma_B) if weight_B is None else weight_B
    check_rows(len(velocity), sigma_B, value_B, row_weight_B)
    new, old, clean, noised = (widen(value) for value in (velocity, velocity_old, clean, noised))
    sigma = sigma_B.to(new).reshape(-1, *[1] * (new.ndim - 1))
    error = noised - sigma * old - clean
    reach, neutral = 1.0, 0.0
    if objective.surrogate == "mirrored":
        reach, neutral = objective.beta, 0.5
    moved = reach * sigma * (new - old)
    # the reward of a row of weight 0 may be missing, and NaN times 0 were NaN
    value_B = torch.where(row_weight_B == 0, neutral, value_B.to(new))
    loss_B, terms = _row_losses(objective, error, moved, sigma_B, value_B, element_mask)
    deviation_B = element_mean((new - old) ** 2, element_mask)
    if objective.old_weight > 0.0:
        loss_B = loss_B + objective.old_weight * deviation_B
    terms |= {"policy_loss": loss_B.detach(), "old_deviation": deviation_B.detach()}
    return (row_weight_B.to(loss_B) * loss_B).sum(), terms


def _row_losses(
    objective: ForwardProcess,
    error: Tensor,
    moved: Tensor,
    sigma_B: Tensor,
    value_B: Tensor,
    element_mask: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and terms from the error of the old policy's clean prediction and how far another policy moves it."""

    def cost(of: Tensor) -> Tensor:
        return estimate_cost(of, sigma_B, objective.estimator, element_mask, objective.power)

    if objective.surrogate == "mirrored":
        costs_B = value_B * cost(error - moved) + (1.0 - value_B) * cost(error + moved)
        return objective.bound * (costs_B / objective.beta), {}
    cost_B, old_B = cost(error - moved), cost(error).detach()
    log_ratio_B = (old_B - cost_B).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    loss_B = _surrogate(objective, value_B, cost_B, log_ratio_B)
    return loss_B, {"cost": cost_B.detach(), "log_ratio": log_ratio_B.detach()}


def _surrogate(objective: ForwardProcess, advantage_B: Tensor, cost_B: Tensor, log_ratio_B: Tensor) -> Tensor:
    """The loss ``[B]`` of an objective that knows one estimate of the trained policy."""
    if objective.surrogate == "clipped":
        ratio_B = log_ratio_B.exp()
        bounded_B = ratio_B.clamp(1.0 - objective.clip, 1.0 + objective.clip)
        return torch.maximum(-advantage_B * ratio_B, -advantage_B * bounded_B)
    factor_B = torch.ones_like(cost_B)
    if objective.with_ratio:
        factor_B = log_ratio_B.detach().exp()
    if objective.surrogate == "linear":
        return factor_B * advantage_B * cost_B
    if objective.surrogate == "proximal":
        return factor_B * (advantage_B - log_ratio_B.detach()) * cost_B
    if objective.surrogate == "squared":
        return 0.5 * factor_B * (advantage_B - log_ratio_B) ** 2
    raise ValueError(f'surrogate: found "{objective.surrogate}"; allowed: mirrored, linear, proximal, squared, clipped')


def norm_penalty(velocity: Tensor, velocity_ref: Tensor, element_mask: Tensor | None = None) -> Tensor:
    """``max(rms(v) - rms(v_ref), 0)^2`` over all but the batch dimension, ``[B]``, radial in ``v`` alone.

    After NormGuard (arXiv 2606.27771): reinforcement learning raises the norm of the velocities, which does not help
    the reward to first order. It is 0 with its gradient while the norm is at most the reference's.
    """
    check_shapes(velocity, velocity_ref)
    size_B, wanted_B = (element_mean(widen(v) ** 2, element_mask) for v in (velocity, velocity_ref.detach()))
    above_B = size_B > wanted_B
    # selected before the root: its gradient at 0 is infinite
    rms_B = torch.where(above_B, size_B, 1.0).sqrt() - torch.where(above_B, wanted_B, 1.0).sqrt()
    return torch.where(above_B, rms_B, 0.0) ** 2
