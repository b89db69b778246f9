"""Flow matching (Lipman et al. 2023, arXiv 2210.02747, eq. 14; rectified flow, Liu et al. 2022, arXiv 2209.03003)."""

import torch
from torch import Tensor


def widened(value: Tensor) -> Tensor:
    """As float32; float64 stays float64."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def element_mean(value: Tensor, element_mask: Tensor | None = None) -> Tensor:
    """Mean over all but the batch dimension, ``[B]``; with a mask (broadcastable to ``value``) over its ones.

    It is float32, or float64 for float64 values. A sample whose mask is all zero has mean 0.
    """
    value = widened(value)
    if element_mask is None:
        return value.flatten(1).mean(1)
    mask = element_mask.to(value).expand_as(value).flatten(1)
    return (value.flatten(1) * mask).sum(1) / mask.sum(1).clamp(min=1.0)


def flow_matching_loss(
    velocity: Tensor,
    clean: Tensor,
    noise: Tensor,
    *,
    element_mask: Tensor | None = None,
    weight_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over the batch of ``mean((velocity - (noise - clean))^2)``, and the weight to divide it by.

    The caller divides by the weight of the whole optimiser step, so that micro-batches, ranks and dropped samples never
    change the gradient.

    Args:
        velocity: ``[B, C, ...]`` predicted, any float dtype; the difference is taken in float32.
        clean, noise: ``[B, C, ...]``, the two ends of the path.
        element_mask: which elements count, broadcastable to ``velocity``.
        weight_B: factor on each sample's loss, 1 when not given.

    Returns:
        ``(sum, weight)``, two scalars; ``weight`` is the number of samples: a factor scales a sample's loss, it does
        not change what the mean is over.
    """
    per_sample_B = element_mean((velocity.float() - (noise.float() - clean.float())) ** 2, element_mask)
    count = per_sample_B.new_tensor(float(len(per_sample_B)))
    return (per_sample_B if weight_B is None else per_sample_B * weight_B).sum(), count
