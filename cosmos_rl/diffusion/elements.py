"""Elements of latents: their precision, and means over those that count."""

import torch
from torch import Tensor


def widen(value: Tensor) -> Tensor:
    """As float32; float64 stays float64."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def element_mean(value: Tensor, element_mask: Tensor | None = None) -> Tensor:
    """Mean over all but the batch dimension, ``[B]``; with a mask (broadcastable to ``value``) over its ones.

    It is float32, or float64 for float64 values. A sample whose mask is all zero has mean 0.
    """
    value = widen(value)
    if element_mask is None:
        return value.flatten(1).mean(1)
    mask = element_mask.to(value).expand_as(value).flatten(1)
    return (value.flatten(1) * mask).sum(1) / mask.sum(1).clamp(min=1.0)


def check_shapes(first: Tensor, *others: Tensor) -> None:
    """
    Raises:
        ValueError: not all are of one shape.
    """
    if any(other.shape != first.shape for other in others):
        raise ValueError(f"all of one shape [B, C, ...], found {[list(value.shape) for value in (first, *others)]}")


def check_rows(rows: int, *values: Tensor) -> None:
    """A value per row of another shape would silently be broadcast to [B, B].

    Raises:
        ValueError: not all are ``[rows]``.
    """
    if any(value.shape != (rows,) for value in values):
        raise ValueError(f"one value per row, [{rows}], found {[list(value.shape) for value in values]}")
