"""How much each optimiser keeps for the weights that it trains. No torch."""

import math
from collections.abc import Callable, Sequence

from cosmos_rl.distributed.blocks import BLOCK, blocks_in_a_row
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.optimizers import find_kind, short_name

Shape = tuple[int, ...]


def _two(shape: Shape) -> float:
    """Two numbers for each weight, in float32: means of the gradient and of its square."""
    return 8.0 * math.prod(shape)


def _eight_bit(shape: Shape) -> float:
    """Both in a byte, with a scale for each block, where the tensor is large enough."""
    if not blocks_in_a_row(shape):
        return _two(shape)
    return 2 * (1 + 4 / BLOCK) * math.prod(shape)


def _muon(shape: Shape) -> float:
    """One buffer of a matrix."""
    return _two(shape) / 2 if len(shape) == 2 else _two(shape)


def _adafactor(shape: Shape) -> float:
    """A mean for each row and each column of the last two dimensions; of vectors one for each number."""
    if len(shape) < 2:
        return 4.0 * math.prod(shape)
    *outer, rows, columns = shape
    return 4.0 * math.prod(outer) * (rows + columns)


def _prodigy(slices: int) -> Callable[[Shape], float]:
    """Two moments, and of every ``slices``-th weight its start and a sum of gradients."""
    return lambda shape: _two(shape) + 8.0 * math.ceil(math.prod(shape) / slices)


def optimizer_state(config: Config, shapes: Sequence[Shape]) -> int:
    """Bytes for trained tensors of these shapes, all ranks together."""
    slices = config.train.optm_kwargs.get("slice_p", 1)
    sizes: dict[str, Callable[[Shape], float]] = {
        "AdamW8bit": _eight_bit,
        "Adam8bit": _eight_bit,
        "Muon": _muon,
        "Adafactor": _adafactor,
        "Prodigy": _prodigy(int(slices) if isinstance(slices, int | float) and slices >= 1 else 1),
    }
    return round(sum(map(sizes.get(short_name(config.train.optm_name), _two), shapes)))


def optimizer_state_of_rank(config: Config, shapes: Sequence[Shape], shards: int) -> int:
    """Bytes of them on one of so many ranks that share the weights."""
    if find_kind(config.train.optm_name).gathers:
        return optimizer_state(config, shapes)
    return optimizer_state(config, shapes) // shards


def gathered_for_a_step(config: Config, shapes: Sequence[Shape], shards: int) -> int:
    """Bytes that come and go where each weight is whole for its step: the largest one, its gradient, its estimated
    squares and its new value, in float32."""
    if shards == 1 or not find_kind(config.train.optm_name).gathers:
        return 0
    return 16 * max(map(math.prod, shapes), default=0)
