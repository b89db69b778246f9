"""Flow-GRPO (Liu et al. 2025, arXiv 2505.05470) and its relatives: a policy gradient on recorded noisy sampling steps.

A step is ``z' ~ N(mean + g v, s^2)``. With ``d = g (v - v_old)``, the noise ``xi`` that the old policy's step drew, and
``< >`` the mean over the elements that count, two numbers of a row say everything: ``cross = <xi d> / s`` and the
divergence ``D = <d^2> / (2 s^2)``, the KL divergence of the two steps per element. The log-ratio of their densities is
``cross - D``. It is exactly 0 where the velocities are equal: no two large numbers are subtracted.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cosmos_rl.diffusion.elements import check_rows, check_shapes, element_mean, widen

RatioScale = Literal["normalised", "unit", "ve", "guard"]
MaskDirection = Literal["ratio", "first_order"]

STOPPED = ("clipped", "masked_positive", "masked_negative")
"""Terms that are 1 for rows which give no gradient."""


@dataclass(frozen=True)
class StepRows:
    """The steps that ``B`` rows were taken at; each ``[B]``."""

    g_B: Tensor
    """How far the mean moves with the velocity."""
    s_B: Tensor
    """Standard deviation, more than 0."""
    sigma_B: Tensor
    next_B: Tensor
    """Noise level after the step."""

    @property
    def gain_B(self) -> Tensor:
        """``g / s``: how many standard deviations the mean moves with the velocity."""
        return self.g_B / self.s_B


@dataclass(frozen=True)
class TrustRegion:
    """What keeps an update near the policy that made the samples."""

    clip_low: float = 1e-4
    clip_high: float = 1e-4
    """The ratio counts between ``1 - clip_low`` and ``1 + clip_high``."""
    mask_threshold: float | None = None
    """In place of the clip: a row further from the old policy than this, in ``D``, that would go on moving away gives
    no gradient. Per element: times the number of elements it is the KL divergence in nats."""
    mask_direction: MaskDirection = "ratio"
    """What moving away is: the sign of ``A (ratio - 1)``, or that of the change of ``D``, ``A (log ratio - D)``."""
    scale: RatioScale = "normalised"
    """How much the steps count against each other, see ``step_scales``."""


@dataclass(frozen=True)
class StepScales:
    """Factors of ``B`` rows; each ``[B]``."""

    cross_B: Tensor
    divergence_B: Tensor
    """Of ``D`` in the ratio."""
    kl_B: Tensor
    """Of the distance to the reference."""
    loss_B: Tensor


def step_scales(scale: RatioScale, steps: StepRows) -> StepScales:
    """What the two numbers of each row are multiplied with before they become a ratio.

    ``normalised``: 1, the densities themselves, as in the papers. ``unit``: ``2 s^2``, squared differences of the
    states (Flow-CPS, arXiv 2509.05952). ``ve``: the same in the coordinates ``z / (1 - sigma)`` of a process whose
    variance explodes, the weights of the first Cosmos recipes. ``guard``: GRPO-Guard (arXiv 2510.22319), ``s cross``
    without ``D``, whose mean over the noise is 0 at every step, and the loss over the length of the step.
    """
    one = torch.ones_like(steps.s_B)
    if scale == "normalised":
        return StepScales(one, one, one, one)
    if scale == "guard":
        return StepScales(steps.s_B, torch.zeros_like(one), one, 1.0 / (steps.sigma_B - steps.next_B))
    if scale == "unit":
        factor = 2.0 * steps.s_B**2
    elif scale == "ve":
        factor = 2.0 * (steps.s_B / (1.0 - steps.next_B)) ** 2
    else:
        raise ValueError(f'scale of the ratio: found "{scale}"; allowed: normalised, unit, ve, guard')
    return StepScales(factor, factor, factor, one)


def step_divergence(
    velocity: Tensor, velocity_other: Tensor, steps: StepRows, element_mask: Tensor | None = None
) -> Tensor:
    """``D`` of two policies' steps from the same states, ``[B]``; Flow-GRPO's KL to the reference, per element."""
    mean_B = element_mean((widen(velocity) - widen(velocity_other)) ** 2, element_mask)
    return 0.5 * steps.gain_B.to(mean_B) ** 2 * mean_B


def flow_grpo_loss(
    velocity: Tensor,
    velocity_old: Tensor,
    noise_xi: Tensor,
    steps: StepRows,
    advantage_B: Tensor,
    *,
    region: TrustRegion,
    element_mask: Tensor | None = None,
    weight_B: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``max(-A ratio, -A clip(ratio))`` per row, as in PPO, or Flow-DPPO's masked ``-A ratio``.

    Args:
        velocity, velocity_old: ``[B, C, ...]`` at the states that the steps began with, guidance included.
        noise_xi: ``[B, C, ...]``, the noise of the old policy's steps, ``(z' - mean_old) / s``.
        advantage_B: ``[B]``.
        element_mask: which elements count, broadcastable to the velocities; all without one.
        weight_B: ``[B]`` factor of each row in the sum, 1 when not given; rows of weight 0 are padding.

    Returns:
        The sum over the rows of weight times loss, the only one with a gradient. And what is reported, each ``[B]``:
        ``policy_loss``, ``log_ratio``, ``ratio_deviation`` (the size of ratio - 1), ``step_kl`` (``D``),
        ``step_kl_nats`` (``D`` times the elements that count), and 1 for the rows that are ``clipped``, or ``masked``
        with a positive and with a negative advantage.

    Raises:
        ValueError: shapes that do not fit; nothing is broadcast over the rows.
    """
    check_shapes(velocity, velocity_old, noise_xi)
    row_weight_B = torch.ones_like(advantage_B) if weight_B is None else weight_B
    check_rows(len(velocity), advantage_B, row_weight_B, steps.g_B, steps.s_B)
    # the reward of a row of weight 0 may be missing, and NaN times 0 were NaN
    advantage_B = torch.where(row_weight_B == 0, 0.0, advantage_B)
    shift = widen(velocity) - widen(velocity_old)
    cross_B = element_mean(widen(noise_xi) * shift, element_mask)
    cross_B = steps.gain_B.to(cross_B) * cross_B
    divergence_B = step_divergence(velocity, velocity_old, steps, element_mask)
    scales = step_scales(region.scale, steps)
    log_ratio_B = scales.cross_B.to(cross_B) * cross_B - scales.divergence_B.to(cross_B) * divergence_B
    advantage_B = advantage_B.to(log_ratio_B)
    if region.mask_threshold is None:
        loss_B, stopped = _clipped(log_ratio_B, advantage_B, region)
    else:
        masked_B = is_masked(cross_B, divergence_B, advantage_B, region.mask_threshold, region.mask_direction)
        loss_B, stopped = _masked(log_ratio_B, advantage_B, masked_B)
    loss_B = loss_B * scales.loss_B.to(loss_B)
    counted = element_count(velocity, element_mask).to(divergence_B)
    terms = {
        "policy_loss": loss_B.detach(),
        "log_ratio": log_ratio_B.detach(),
        "ratio_deviation": torch.expm1(log_ratio_B.detach()).abs(),
        "step_kl": divergence_B.detach(),
        "step_kl_nats": (divergence_B * counted).detach(),
        **stopped,
    }
    return (loss_B * row_weight_B.to(loss_B)).sum(), terms


def _clipped(log_ratio_B: Tensor, advantage_B: Tensor, region: TrustRegion) -> tuple[Tensor, dict[str, Tensor]]:
    ratio_B = log_ratio_B.exp()
    bounded_B = ratio_B.clamp(1.0 - region.clip_low, 1.0 + region.clip_high)
    loss_B = torch.maximum(-advantage_B * ratio_B, -advantage_B * bounded_B)
    # a row that moves back into the bounds is not stopped
    stopped_B = ((ratio_B - bounded_B) * advantage_B > 0).to(loss_B)
    return loss_B, {"clipped": stopped_B}


def _masked(log_ratio_B: Tensor, advantage_B: Tensor, masked_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    # selected before the exponential: the gradient of an infinite ratio times 0 is NaN
    ratio_B = torch.where(masked_B, 0.0, log_ratio_B).exp()
    loss_B = torch.where(masked_B, 0.0, -advantage_B * ratio_B)
    positive_B = advantage_B > 0
    return loss_B, {
        "masked_positive": (masked_B & positive_B).to(loss_B),
        "masked_negative": (masked_B & ~positive_B).to(loss_B),
    }


def is_masked(
    cross_B: Tensor, divergence_B: Tensor, advantage_B: Tensor, threshold: float, direction: MaskDirection
) -> Tensor:
    """Flow-DPPO's mask (arXiv 2606.11025), bool ``[B]``: too far from the old policy, and moving away.

    The paper's ``D`` is a sum over elements (eq. 14), its code's and ours the mean.
    It is one-sided: a row that moves back is kept however far it is, as without it nothing would bring it back.
    """
    log_ratio_B = (cross_B - divergence_B).detach()
    if direction == "first_order":
        log_ratio_B = log_ratio_B - divergence_B.detach()
    elif direction != "ratio":
        raise ValueError(f'direction of the mask: found "{direction}"; allowed: ratio, first_order')
    return (divergence_B.detach() > threshold) & (advantage_B * log_ratio_B > 0)


def element_count(velocity: Tensor, element_mask: Tensor | None) -> Tensor:
    """How many elements of each row count, ``[B]``."""
    if element_mask is None:
        return torch.full((len(velocity),), velocity[0].numel(), device=velocity.device)
    return element_mask.expand_as(velocity).flatten(1).sum(1)
