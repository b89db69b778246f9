"""The names that a transformer's layers have in the file of its authors, which other tools read: both ways.

The names themselves are rows of `original_tables.py`. Layers that are parts of one layer there, such as ``qkv``, are
joined along their outputs, in the order query, key, value, feed-forward.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.original_tables import NAMES, Names

Pair = tuple[Tensor, Tensor]
"""Down matrix ``[r, in]`` and up matrix ``[out, r]`` of an adapter, of convolutions with their kernel."""
Rows = Mapping[str, int]
"""Outputs of all layers of a transformer, by diffusers' names."""

_PARTS = {"to_q": 0, "to_k": 1, "to_v": 2, "add_q_proj": 0, "add_k_proj": 1, "add_v_proj": 2, "proj_mlp": 3}
"""Last name of a layer that may be a part of a larger one -> its place there."""


@dataclass(frozen=True)
class Place:
    """Where a layer, or a tensor that belongs to none, is in the original."""

    name: str
    part: int = 0
    """Its place among the layers of this name."""
    halves_swapped: bool = False
    """Scale and shift, or value and gate, are in the other order."""


def find_place(names: Names, layer: str, last_block: int) -> Place:
    """Where a layer, or a tensor that belongs to none, is in the original."""
    name = layer
    for pattern, original in names.rules:
        name = re.sub(pattern, original, name)
    swapped = re.fullmatch(names.swapped.replace("{last}", str(last_block)), layer) is not None
    return Place(name, _PARTS.get(layer.rpartition(".")[2], 0), swapped)


def original_names(class_name: str) -> Names | None:
    """The original names of a class of transformers, where they are known."""
    return NAMES.get(class_name)


def find_names(class_name: str, purpose: str, instead: str) -> Names:
    """The original names of a class of transformers.

    Args:
        purpose, instead: what they are for, and what works without them, for the message.

    Raises:
        UserError: they are not known here.
    """
    names = original_names(class_name)
    if names is None:
        raise UserError(
            f"{purpose}: the original names of a {class_name} are not known here, only those of {', '.join(NAMES)}; "
            f"{instead}"
        )
    return names


def find_unknown(names: Names, keys: Iterable[str]) -> list[str]:
    """The tensors, or layers, whose original names no row says; by diffusers' names."""
    return [key for key in keys if not _is_known(names, _split(key)[0])]


def _is_known(names: Names, layer: str) -> bool:
    if re.fullmatch(names.same, layer):
        return True
    name = layer
    for pattern, original in names.rules:
        if pattern.endswith("$") and re.search(pattern, name):
            return True
        name = re.sub(pattern, original, name)
    return False


def _require_known(names: Names, keys: Iterable[str], purpose: str) -> None:
    unknown = find_unknown(names, keys)
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(
            f"{purpose}: the original name of {unknown[0]}{more} is not known here; keep the names of diffusers: a "
            "pipeline folder, or --format diffusers"
        )


_PURPOSE = "original names"


def to_original(names: Names, state: Mapping[str, Tensor], purpose: str = _PURPOSE) -> dict[str, Tensor]:
    """All tensors of a transformer under their original names, prefix included.

    Args:
        purpose: what they are for, for the message.

    Raises:
        UserError: the original names of some are not known here.
    """
    _require_known(names, state, purpose)
    joined = {}
    for key, parts in _group(names, state).items():
        values = [_swap_halves(state[name]) if swapped else state[name] for name, swapped in parts]
        joined[names.prefix + key] = torch.cat(values) if len(values) > 1 else values[0]
    return joined


def from_original(names: Names, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a transformer by diffusers' names.

    Args:
        found: by their original names, without the prefix; exactly those of ``wanted``, in their shapes.
        wanted: tensors of the transformer, whose shapes count; they may be on the meta device.
    """
    state = {}
    for key, parts in _group(names, wanted).items():
        values = [found[key]]
        if len(parts) > 1:
            values = [value.clone() for value in found[key].split([wanted[name].shape[0] for name, _ in parts])]
        for (name, swapped), value in zip(parts, values, strict=True):
            state[name] = _swap_halves(value) if swapped else value
    return state


def name_tensor(names: Names, key: str) -> str:
    """The original name of a tensor, or of the joined one that it is a part of, without the prefix."""
    layer, leaf = _split(key)
    name = find_place(names, layer, -1).name
    if leaf == ".weight" and re.search(rf"(^|\.){names.scales}$", name):
        leaf = ".scale"
    return name + leaf


def _group(names: Names, keys: Mapping[str, Tensor]) -> dict[str, list[tuple[str, bool]]]:
    """Original tensor -> the tensors that are its parts, in order, and whether their halves are swapped."""
    last, groups = last_block(keys), dict[str, list[tuple[int, str, bool]]]()
    for key in keys:
        place = find_place(names, _split(key)[0], last)
        groups.setdefault(name_tensor(names, key), []).append((place.part, key, place.halves_swapped))
    return {key: [(name, swapped) for _, name, swapped in sorted(parts)] for key, parts in groups.items()}


def adapters_to_original(
    names: Names, adapters: Mapping[str, Pair], rows: Rows, purpose: str = _PURPOSE
) -> dict[str, Pair]:
    """Adapters under the original names of their layers, without the prefix.

    Those of the parts of one layer become one of the sum of their ranks, whose up matrix has blocks: the same product.

    Raises:
        UserError: the original names of some layers are not known here; ``purpose`` is for the message.
    """
    _require_known(names, adapters, purpose)
    joined = {}
    for name, places in _group_layers(names, rows).items():
        members = [layer for layer, _ in places if layer in adapters]
        if len(places) > 1 and members:
            joined[name] = _join([layer for layer, _ in places], adapters, rows)
        elif members:
            [(layer, place)] = places
            down, up = adapters[layer]
            joined[name] = (down, _swap_halves(up) if place.halves_swapped else up)
    return joined


def adapters_from_original(
    names: Names, found: Mapping[str, Pair], rows: Rows
) -> tuple[dict[str, tuple[str, Pair]], list[str]]:
    """Adapters by diffusers' names of their layers, each with its name in ``found``; and what belongs to no layer.

    Args:
        names: of the transformer.
        found: by the original name without the prefix, with ``_`` in place of every dot, as adapters of kohya have it.
        rows: of the transformer.
    """
    pairs, used = dict[str, tuple[str, Pair]](), set[str]()
    for name, places in _group_layers(names, rows).items():
        key = name.replace(".", "_")
        if key not in found:
            continue
        used.add(key)
        down, up = found[key]
        parts, sizes = [up] * len(places), [rows[layer] for layer, _ in places]
        if len(places) > 1 and sum(sizes) == len(up):  # else of another model, as its shape shows
            parts = up.split(sizes)
        for (layer, place), part in zip(places, parts, strict=True):
            pairs[layer] = (key, (down, _swap_halves(part) if place.halves_swapped else part))
    return pairs, sorted(set(found) - used)


def _group_layers(names: Names, rows: Rows) -> dict[str, list[tuple[str, Place]]]:
    """Original layer -> the layers that are its parts, in order."""
    last, groups = last_block(rows), dict[str, list[tuple[str, Place]]]()
    for layer in rows:
        place = find_place(names, layer, last)
        groups.setdefault(place.name, []).append((layer, place))
    return {name: sorted(places, key=lambda entry: entry[1].part) for name, places in groups.items()}


def _join(layers: Sequence[str], adapters: Mapping[str, Pair], rows: Rows) -> Pair:
    """One adapter of a layer whose parts are ``layers``, some of them without an adapter."""
    found = [adapters[layer] for layer in layers if layer in adapters]
    _, first = found[0]
    joined = first.new_zeros(sum(rows[layer] for layer in layers), sum(up.shape[1] for _, up in found))
    row = column = 0
    for layer in layers:
        if layer in adapters:
            _, up = adapters[layer]
            joined[row : row + up.shape[0], column : column + up.shape[1]] = up
            column += up.shape[1]
        row += rows[layer]
    return torch.cat([down for down, _ in found]), joined


def _swap_halves(value: Tensor) -> Tensor:
    first, second = value.chunk(2, dim=0)
    return torch.cat([second, first])


def _split(key: str) -> tuple[str, str]:
    """A tensor's layer and ``.weight`` or ``.bias``; a tensor of another name is its own layer."""
    for leaf in (".weight", ".bias"):
        if key.endswith(leaf):
            return key.removesuffix(leaf), leaf
    return key, ""


def last_block(names: Sequence[str] | Mapping[str, object]) -> int:
    """The largest number of a block in names of layers or tensors; -1: none has one."""
    return max(_block_numbers(names), default=-1)


def _block_numbers(names: Sequence[str] | Mapping[str, object]) -> Iterator[int]:
    for name in names:
        match = re.match(r"transformer_blocks\.(\d+)\.", name)
        if match:
            yield int(match[1])
