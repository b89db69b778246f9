"""Which moments an 8-bit optimiser holds in 8 bits. A rule of the whole tensor, so that any number of ranks agrees."""

import math
from collections.abc import Sequence

BLOCK = 256
"""Values that share a scale."""
_SMALL = 4096


def blocks_in_a_row(shape: Sequence[int]) -> int:
    """Blocks in one entry of the first dimension; 0: the moments stay in float32.

    A tensor is split over ranks along its first dimension, so no block may reach over two of its entries. Small tensors
    are not worth it (Dettmers et al. 2021, arXiv:2110.02861).
    """
    row = math.prod(shape[1:])
    if len(shape) > 1 and math.prod(shape) >= _SMALL and row % BLOCK == 0:
        return row // BLOCK
    return 0
