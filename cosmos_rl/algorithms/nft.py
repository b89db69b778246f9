"""DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117): learn from good and bad samples on the forward process.

With the trained velocity ``v`` and the sampling policy's ``v_old``, ``v+ = (1 - beta) v_old + beta v`` is fitted to
good samples and its mirror image ``v- = (1 + beta) v_old - beta v`` to bad ones.
"""

import torch
from torch import Tensor

from cosmos_rl.diffusion.elements import check_rows, check_shapes, element_mean, widen

_MIN_WEIGHT = 1e-5


def nft_loss(
    velocity: Tensor,
    velocity_old: Tensor,
    clean: Tensor,
    noised: Tensor,
    sigma_B: Tensor,
    optimality_B: Tensor,
    *,
    beta: float,
    scale: float,
    element_mask: Tensor | None = None,
    adaptive_weight: bool = True,
    weight_B: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``scale / beta * (r L+ + (1 - r) L-)`` per row, with ``L± = mean((noised - sigma v± - clean)^2 / w±)``.

    ``w± = max(mean |noised - sigma v± - clean|, 1e-5)`` per row, a constant for the gradient. Without
    ``adaptive_weight`` it is 1, and the loss is the paper's loss in velocities times ``scale * sigma^2 / beta``.

    Args:
        velocity, velocity_old: ``[B, C, ...]``, trained and sampling policy at ``noised`` and ``sigma_B``.
        clean, noised: ``[B, C, ...]``, a sample of the old policy and its noised version.
        sigma_B: ``[B]`` in (0, 1].
        optimality_B: ``[B]`` in [0, 1]; 1/2 gives no gradient while ``velocity`` equals ``velocity_old``.
        beta: strength of the guidance that is learnt; small values make large steps.
        scale: the upper bound of the advantage; it makes the first gradient independent of that bound.
        element_mask: which elements count in all means, broadcastable to ``velocity``.
        adaptive_weight: normalise each row by its own error.
        weight_B: ``[B]`` factor of each row in the sum, 1 when not given; rows of weight 0 are padding.

    Returns:
        The sum over the rows of weight times loss, the only one with a gradient; divide by the sum of the weights. And
        what is reported, each ``[B]``: ``policy_loss`` = ``scale * unweighted_policy_loss``; mean and largest of
        ``clean^2`` (``x0_norm``, ``x0_norm_max``) and of ``(velocity - velocity_old)^2`` (``old_deviation...``).

    Raises:
        ValueError: shapes that do not fit; nothing is broadcast over the rows.
    """
    check_shapes(velocity, velocity_old, clean, noised)
    check_rows(len(velocity), sigma_B, optimality_B, *([] if weight_B is None else [weight_B]))
    new, old, clean, noised = (widen(value) for value in (velocity, velocity_old, clean, noised))
    row_weight_B = torch.ones_like(sigma_B, dtype=new.dtype) if weight_B is None else weight_B.to(new)
    # the reward of a row of weight 0 may be missing, and NaN times 0 were NaN
    r_B = torch.where(row_weight_B == 0, 0.5, optimality_B.to(new))
    sigma = sigma_B.to(new).reshape(-1, *[1] * (new.ndim - 1))
    error = noised - sigma * old - clean  # of the old policy's clean prediction
    moved = beta * sigma * (new - old)
    good_B = _adaptive_mse(error - moved, element_mask, adaptive_weight)
    bad_B = _adaptive_mse(error + moved, element_mask, adaptive_weight)
    loss_B = (r_B * good_B + (1.0 - r_B) * bad_B) / beta
    deviation, norm = (new - old).detach() ** 2, clean.detach() ** 2
    terms = {
        "policy_loss": scale * loss_B.detach(),
        "unweighted_policy_loss": loss_B.detach(),
        "x0_norm": element_mean(norm, element_mask),
        "x0_norm_max": _element_max(norm, element_mask),
        "old_deviation": element_mean(deviation, element_mask),
        "old_deviation_max": _element_max(deviation, element_mask),
    }
    return (scale * row_weight_B * loss_B).sum(), terms


def velocity_kl(velocity: Tensor, velocity_ref: Tensor, element_mask: Tensor | None = None) -> Tensor:
    """``mean((velocity - velocity_ref)^2)`` over all but the batch dimension, ``[B]``; the mask as in the loss.

    Up to a factor of the noise level it is the KL divergence of the two policies' sampling steps.
    """
    check_shapes(velocity, velocity_ref)
    return element_mean((widen(velocity) - widen(velocity_ref)) ** 2, element_mask)


def norm_ratio(velocity: Tensor, velocity_ref: Tensor, element_mask: Tensor | None = None) -> Tensor:
    """Root mean square of ``velocity`` over that of ``velocity_ref``, over all but the batch dimension, ``[B]``.

    Reinforcement learning raises it by 5 to 15 percent, together with harsh contrast and colours (arXiv 2606.27771).
    """
    check_shapes(velocity, velocity_ref)
    squares = [element_mean(widen(value) ** 2, element_mask) for value in (velocity, velocity_ref)]
    return (squares[0] / squares[1]).sqrt()


def _adaptive_mse(error: Tensor, element_mask: Tensor | None, adaptive_weight: bool) -> Tensor:
    """``L+`` or ``L-`` ``[B]`` from the error of its clean prediction."""
    mean_B = element_mean(error**2, element_mask)
    if not adaptive_weight:
        return mean_B
    size_B = element_mean(error.detach().double().abs(), element_mask).clamp(min=_MIN_WEIGHT)
    return mean_B / size_B.to(mean_B)


def _element_max(value: Tensor, element_mask: Tensor | None) -> Tensor:
    if element_mask is not None:
        value = value * element_mask.to(value)
    return value.flatten(1).amax(1)
