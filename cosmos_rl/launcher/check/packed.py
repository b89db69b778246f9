"""Bytes of frozen weights under adapters, which may be packed in 8 or 4 bits and may rest in host memory. No torch."""

import math

from cosmos_rl.launcher.acceptance.selection import Selection
from cosmos_rl.launcher.pipeline_files import Shapes, elements
from cosmos_rl.policy.config.model_rules import find_block, is_quantised, packed_bytes, unpacking_bytes

_FETCHED = 2
"""Blocks of an offloaded base that are counted on the device; one is there, the other is room for the next."""


def frozen_bytes(form: str, shapes: Shapes, chosen: Selection, size: int, shards: int) -> int:
    """Bytes on a rank of the denoisers' weights under adapters, whose numbers take ``size`` bytes where they are not
    packed; packed ones are whole on each rank."""
    packed = find_packed(form, shapes)
    rest = chosen.frozen - elements(packed)
    return size * rest // shards + sum(packed_bytes(form, shape, size) for shape in packed.values())


def offloaded_bytes(
    form: str, shapes: Shapes, chosen: Selection, size: int, shards: int, *, pinned: bool
) -> tuple[int, int]:
    """The same where the blocks' weights rest in host memory, whole for each rank: bytes on the device, and there."""
    packed, resting, blocks, host = find_packed(form, shapes), find_resting(shapes), dict[str, int](), 0
    for name, (block, shape) in resting.items():
        count = math.prod(shape)
        held = packed_bytes(form, shape, size) if name in packed else size * count
        codes = {"int8": count, "nf4": count // 2}[form] if name in packed else held
        blocks[block] = blocks.get(block, 0) + held
        host += pinned_bytes(codes) + pinned_bytes(held - codes) if pinned else held
    rest = chosen.frozen - sum(math.prod(shape) for _, shape in resting.values())
    others = {name: shape for name, shape in packed.items() if name not in resting}
    device = size * (rest - elements(others)) // shards
    device += sum(packed_bytes(form, shape, size) for shape in others.values())
    return device + sum(sorted(blocks.values())[-_FETCHED:]), host


def pinned_bytes(size: int) -> int:
    """Bytes of host memory that a GPU reads by itself: PyTorch takes the next power of two for each tensor."""
    return 1 << (size - 1).bit_length() if size else 0


def find_resting(shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Those of a model's tensors that `train.base_offload` keeps in host memory -> (block, shape)."""
    named = ((name, find_block(name), shape) for name, shape in shapes.items())
    return {name: (block, shape) for name, block, shape in named if block is not None}


def find_packed(form: str, shapes: Shapes) -> Shapes:
    """Those of a model's tensors that a form of `policy.lora.quantize_base` packs."""
    if form == "none":
        return {}
    return {name: shape for name, shape in shapes.items() if is_quantised(form, name, shape)}


def unpacking(form: str, shapes: Shapes, size: int) -> int:
    """Bytes of work on the largest packed weight, which becomes numbers of ``size`` bytes in each pass."""
    packed = find_packed(form, shapes)
    largest = max((math.prod(shape) for shape in packed.values()), default=0)
    return unpacking_bytes(form, largest, size)
