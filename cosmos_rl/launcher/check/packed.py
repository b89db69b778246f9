"""Bytes of frozen weights that are stored in 8 or 4 bits. No torch."""

import math

from cosmos_rl.launcher.acceptance.selection import Selection
from cosmos_rl.launcher.pipeline_files import Shapes, elements
from cosmos_rl.policy.config.model_rules import is_quantised, packed_bytes, unpacking_bytes


def frozen_bytes(form: str, shapes: Shapes, chosen: Selection, size: int, shards: int) -> int:
    """Bytes on a rank of the denoisers' weights under adapters, whose numbers take ``size`` bytes where they are not
    packed; packed ones are whole on each rank."""
    packed = find_packed(form, shapes)
    rest = chosen.frozen - elements(packed)
    return size * rest // shards + sum(packed_bytes(form, shape, size) for shape in packed.values())


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
