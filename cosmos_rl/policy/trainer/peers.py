"""Context-parallel peers: ranks that compute the same samples, of whose tokens each has a part in the transformer."""

import math

from torch import Tensor

from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError

_ROUNDING = 1e-2
"""Of the largest number: far above what kernels of two devices differ in, far below what other noise or data would."""


def compare_peers(what: str, value: Tensor, context: Context) -> None:
    """Refuse peers that do not compute the same samples: their tokens would be mixed without any other sign.

    All ranks must call it, and all raise where any group of peers differs.

    Args:
        what: the tensor's name, for the message.
        value: what all peers must have; it travels within each group.

    Raises:
        UserError: names the ranks.
    """
    if context.cp_group is None:
        return
    own = value.detach().float().cpu()
    first = context.share_with_peers(lambda: own)
    apart = math.inf
    if first.shape == own.shape:
        size = max(float(first.nan_to_num().abs().max()), 1e-12)
        apart = float((own.nan_to_num() - first.nan_to_num()).abs().max()) / size
    ranks = range(context.world_size)
    apart_of = context.max_over_ranks([apart if rank == context.rank else 0.0 for rank in ranks])
    wrong = [rank for rank in ranks if apart_of[rank] > _ROUNDING]
    if wrong:
        rank = wrong[0]
        peer = rank - rank % context.cp_size
        raise UserError(
            f"ranks {peer} and {rank} share the samples of one data-parallel rank (policy.parallelism.cp_size = "
            f"{context.cp_size}), but {what} differ by {apart_of[rank]:.3g} of the largest number; data, model files "
            "and versions must be the same on all machines"
        )
