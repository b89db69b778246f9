"""What a pipeline's `encode_prompt` returned, kept so that rows can be taken out of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.errors import UserError

RAGGED = "list"
"""Where the prompts are in a plain list with one entry each."""
_FORM = "form"


@dataclass(frozen=True)
class MediaCond:
    """What pipelines make of the media that samples are conditioned on; the rows lie along the first axis.

    Attributes:
        prepared: the flat results of `prepare_latents`; the state's own elements in them mean nothing.
        shared: which of them all rows have in common.
        encoded: results of the methods that encode media, of the first row: what follows of those of the others is in
            ``inputs``.
        inputs: tensors of the denoiser's call that follow ``encoded``, by their path, ``[rows, ...]``, with guidance
            "off" and "on".
        kinds: of each row, how many of its latent frames are given: rows of one kind have one element mask.
    """

    prepared: tuple[Any, ...]
    shared: tuple[bool, ...]
    encoded: Mapping[str, Sequence[Any]]
    inputs: Mapping[str, Mapping[str, Tensor]]
    kinds: tuple[int, ...]

    def rows(self, index: Tensor) -> "MediaCond":
        """Some of the rows."""
        picked = [
            value if shared or not isinstance(value, Tensor) else value.index_select(0, index.to(value.device))
            for value, shared in zip(self.prepared, self.shared, strict=True)
        ]
        inputs = {
            mode: {key: value.index_select(0, index.to(value.device)) for key, value in table.items()}
            for mode, table in self.inputs.items()
        }
        kinds = tuple(self.kinds[row] for row in index.tolist())
        return replace(self, prepared=tuple(picked), inputs=inputs, kinds=kinds)

    def concat(self, other: "MediaCond") -> "MediaCond":
        """The rows of both."""
        triples = zip(self.prepared, other.prepared, self.shared, strict=True)
        prepared = [a if shared or not isinstance(a, Tensor) else torch.cat([a, b]) for a, b, shared in triples]
        inputs = {
            mode: {key: torch.cat([value, other.inputs[mode][key]]) for key, value in table.items()}
            for mode, table in self.inputs.items()
        }
        return replace(self, prepared=tuple(prepared), inputs=inputs, kinds=self.kinds + other.kinds)

    def to_tensors(self) -> dict[str, Tensor]:
        """Plain tensors for a file, see `DrivenCond.to_tensors`."""
        tensors: dict[str, Tensor] = {}
        encoded = [[name, list(results)] for name, results in self.encoded.items()]
        inputs = [[mode, [list(pair) for pair in table.items()]] for mode, table in self.inputs.items()]
        nested = _flatten([list(self.prepared), encoded, inputs], None, tensors)
        form = json.dumps({"values": nested, "shared": self.shared, "kinds": self.kinds})
        return {**tensors, _FORM: torch.tensor(list(form.encode()), dtype=torch.uint8)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "MediaCond":
        """What `to_tensors` made."""
        form = json.loads(bytes(tensors[_FORM].tolist()))
        (prepared, encoded, inputs), _ = _unflatten(form["values"], tensors)
        tables = {mode: dict(table) for mode, table in inputs}
        return cls(tuple(prepared), tuple(form["shared"]), dict(encoded), tables, tuple(form["kinds"]))

    def to(self, device: torch.device | str) -> "MediaCond":
        """The same on another device."""
        moved = [_move_nested(part, device) for part in (self.prepared, dict(self.encoded), dict(self.inputs))]
        return replace(self, prepared=moved[0], encoded=moved[1], inputs=moved[2])


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
    media: MediaCond | None = None
    """What the rows are conditioned on besides their texts."""
    element_mask: Tensor | None = None
    """``[size, ...]`` like the states: which elements count in means. None: all."""
    texts: tuple[tuple[str, str | None], ...] = ()
    """Prompt and negative prompt of each row, where media change what is made of them; else none."""

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.size

    def rows(self, index: Tensor | slice) -> "DrivenCond":
        """The rows ``index`` (int64 ``[K]``, or a slice). Rows of a single one are views."""
        if isinstance(index, slice):
            index = torch.arange(self.size)[index]
        picked = [_pick(value, axis, index, self.size) for value, axis in zip(self.values, self.axes, strict=True)]
        media, mask = self.media, self.element_mask
        if media is not None:
            media = media.rows(index)
        if mask is not None:
            mask = mask[index.to(mask.device)]
        texts = tuple(self.texts[row] for row in index.tolist() if self.texts)
        return replace(self, values=picked, size=len(index), media=media, element_mask=mask, texts=texts)

    def concat(self, other: "DrivenCond") -> "DrivenCond | None":
        """The rows of both; None where they were made with other lengths."""
        values = [_concat_nested(a, b, axis) for a, b, axis in zip(self.values, other.values, self.axes, strict=True)]
        if any(value is _UNEQUAL for value in values):
            return None
        if (self.media is None) != (other.media is None):
            raise ValueError("rows with and without media: give all of them a medium, or none")
        media, mask = self.media, self.element_mask
        if media is not None and other.media is not None:
            media = media.concat(other.media)
        if mask is not None and other.element_mask is not None:
            mask = torch.cat([mask, other.element_mask])
        size, guided, texts = self.size + other.size, self.guided and other.guided, self.texts + other.texts
        return replace(self, values=values, size=size, guided=guided, media=media, element_mask=mask, texts=texts)

    def to(self, device: torch.device | str) -> "DrivenCond":
        """The same on another device."""
        media, mask = self.media, self.element_mask
        if media is not None:
            media = media.to(device)
        if mask is not None:
            mask = mask.to(device)
        values = [_move_nested(value, device) for value in self.values]
        return replace(self, values=values, media=media, element_mask=mask)

    def to_tensors(self) -> dict[str, Tensor]:
        """Plain tensors for a file: those of the values by number, and how they are nested as the bytes of JSON."""
        if self.media is not None:
            raise ValueError("conditions with media are of one sample, not of a prompt")
        tensors: dict[str, Tensor] = {}
        nested = [_flatten(value, axis, tensors) for value, axis in zip(self.values, self.axes, strict=True)]
        form = json.dumps({"values": nested, "size": self.size, "guided": self.guided, "texts": self.texts})
        return {**tensors, _FORM: torch.tensor(list(form.encode()), dtype=torch.uint8)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "DrivenCond":
        """What `to_tensors` made."""
        form = json.loads(bytes(tensors[_FORM].tolist()))
        pairs = [_unflatten(entry, tensors) for entry in form["values"]]
        values, axes = [value for value, _ in pairs], [axis for _, axis in pairs]
        texts = tuple((prompt, away) for prompt, away in form.get("texts", ()))
        return cls(values, axes, form["size"], form["guided"], texts=texts)


def concat_all(conditions: Sequence[DrivenCond]) -> DrivenCond | None:
    """The rows of all; None where they were made with other lengths."""
    joined = list(conditions)
    while len(joined) > 1:  # in pairs, so that no tensor is copied many times
        merged: list[DrivenCond] = []
        for first in range(0, len(joined) - 1, 2):
            both = joined[first].concat(joined[first + 1])
            if both is None:
                return None
            merged.append(both)
        joined = merged + joined[len(merged) * 2 :]
    return joined[0]


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
    if isinstance(value, dict):
        return {key: _move_nested(item, device) for key, item in value.items()}
    return value


def _flatten(value: Any, axis: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A value and its axis as JSON, with its tensors put aside under their numbers."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name, "axis": axis}
    if isinstance(value, (list, tuple)):
        axes = axis
        if axis is None or axis == RAGGED:
            axes = [None] * len(value)
        items = [_flatten(item, inner, tensors) for item, inner in zip(value, axes, strict=True)]
        return {"items": items, "tuple": isinstance(value, tuple), "axis": axis if axis == RAGGED else "nested"}
    return {"plain": value}


def _unflatten(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """The value and its axis."""
    if "tensor" in entry:
        return tensors[entry["tensor"]], entry["axis"]
    if "items" not in entry:
        return entry["plain"], None
    pairs = [_unflatten(item, tensors) for item in entry["items"]]
    values, axes = [value for value, _ in pairs], [axis for _, axis in pairs]
    if entry["axis"] == RAGGED:
        return values, RAGGED
    if entry["tuple"]:
        return tuple(values), axes
    return values, axes
