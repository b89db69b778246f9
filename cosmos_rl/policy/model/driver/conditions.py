"""What a pipeline's `encode_prompt` returned, kept so that rows can be taken out of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.errors import UserError

RAGGED = "list"
"""Where the prompts are in a plain list with one entry each."""


@dataclass(frozen=True)
class DrivenCond:
    """Conditions of ``size`` rows.

    Attributes:
        values: what `encode_prompt` returned, call by call.
        axes: the same tree with the axis of the prompts in place of each tensor, ``RAGGED`` for a list with one entry
            per prompt, None for what all prompts share.
        guided: made with guidance; such conditions also serve without it.
    """

    values: list[Any]
    axes: list[Any]
    size: int
    guided: bool
    element_mask: Tensor | None = None
    """``[size, ...]``, broadcastable to the states: which elements count in means. None: all."""

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.size

    def rows(self, index: Tensor | slice) -> "DrivenCond":
        """The rows ``index`` (int64 ``[K]``, or a slice). Rows of a single one are views."""
        if isinstance(index, slice):
            index = torch.arange(self.size)[index]
        picked = [_pick(value, axis, index, self.size) for value, axis in zip(self.values, self.axes, strict=True)]
        return replace(self, values=picked, size=len(index))

    def concat(self, other: "DrivenCond") -> "DrivenCond | None":
        """The rows of both; None where they were made with other lengths."""
        values = [_concat_nested(a, b, axis) for a, b, axis in zip(self.values, other.values, self.axes, strict=True)]
        if any(value is _UNEQUAL for value in values):
            return None
        return replace(self, values=values, size=self.size + other.size, guided=self.guided and other.guided)

    def to(self, device: torch.device | str) -> "DrivenCond":
        """The same on another device."""
        return replace(self, values=[_move_nested(value, device) for value in self.values])


def describe_nesting(value: Any) -> Any:
    """What two results have in common whose prompts lie along the same axes: the nesting and numbers of dimensions."""
    if isinstance(value, Tensor):
        return value.ndim
    if isinstance(value, list) and value and all(isinstance(item, Tensor) for item in value):
        return RAGGED, value[0].ndim
    if isinstance(value, (list, tuple)):
        return tuple(describe_nesting(item) for item in value)
    return type(value).__name__


def locate(once: Any, twice: Any, n: int) -> Any:
    """Finds the axis of the prompts: ``once`` was made of n prompts, ``twice`` of the same ones, two times.

    Raises:
        UserError: no single axis has doubled.
    """
    if isinstance(once, Tensor):
        grown = [axis for axis, sides in enumerate(zip(once.shape, twice.shape, strict=True)) if sides == (n, 2 * n)]
        if len(grown) > 1 or (not grown and once.shape != twice.shape):
            raise UserError(
                f"encode_prompt gives {tuple(once.shape)} for {n} prompts and {tuple(twice.shape)} for {2 * n}: its "
                "prompts have no axis of their own"
            )
        return next(iter(grown), None)
    if isinstance(once, list) and (len(once), len(twice)) == (n, 2 * n):
        return RAGGED
    if isinstance(once, (list, tuple)):
        return [locate(a, b, n) for a, b in zip(once, twice, strict=True)]
    return None


def count_rows(values: Sequence[Any], axes: Sequence[Any]) -> set[int]:
    """All numbers of prompts that the values hold."""
    found: set[int] = set()
    for value, axis in zip(values, axes, strict=True):
        if axis == RAGGED:
            found.add(len(value))
        elif isinstance(axis, int):
            found.add(value.shape[axis])
        elif isinstance(axis, list):
            found |= count_rows(value, axis)
    return found


def _pick(value: Any, axis: Any, index: Tensor, size: int) -> Any:
    if isinstance(axis, int):
        if size == 1 and not index.any():
            return value.expand(*(len(index) if k == axis else -1 for k in range(value.ndim)))
        return value.index_select(axis, index.to(value.device))
    if axis == RAGGED:
        return [value[row] for row in index.tolist()]
    if isinstance(axis, list):
        return type(value)(_pick(v, a, index, size) for v, a in zip(value, axis, strict=True))
    return value


_UNEQUAL = object()


def _concat_nested(a: Any, b: Any, axis: Any) -> Any:
    """Two results as one along the axis of the prompts; `_UNEQUAL` where they do not fit."""
    if isinstance(axis, int):
        sides = [[side for k, side in enumerate(value.shape) if k != axis] for value in (a, b)]
        return torch.cat([a, b], axis) if sides[0] == sides[1] else _UNEQUAL
    if axis == RAGGED:
        return [*a, *b]
    if isinstance(axis, list):
        parts = [_concat_nested(x, y, inner) for x, y, inner in zip(a, b, axis, strict=True)]
        return _UNEQUAL if any(part is _UNEQUAL for part in parts) else type(a)(parts)
    if isinstance(a, Tensor) and not (isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)):
        return _UNEQUAL
    return a


def _move_nested(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_move_nested(item, device) for item in value)
    return value
