"""Context-parallel peers: ranks that compute the same samples, of whose tokens each has a part in the transformer."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError

_ROUNDING = 1e-2
"""Of the largest number: far above what kernels of two devices differ in, far below what other noise or data would."""


def compare_fingerprints(fingerprint: Mapping[str, Any], context: Context) -> None:
    """Refuse peers whose data or draws differ before they exchange tokens, where those with prompts of other lengths
    would wait for each other until the time limit.

    All ranks must call it with the same keys, and all raise where any group of peers differs.

    Args:
        fingerprint: what data and draws depend on (JSON-ready).

    Raises:
        UserError: names the ranks and what differs.
    """
    if context.cp_group is None or not fingerprint:
        return
    own = {name: json.dumps(value, sort_keys=True) for name, value in sorted(fingerprint.items())}
    first = context.share_with_peers(lambda: own)
    differ = [float(first.get(name) != value) for name, value in own.items()]
    ranks = range(context.world_size)
    found = context.max_over_ranks([one if rank == context.rank else 0.0 for rank in ranks for one in differ])
    for rank in ranks:
        names = [name for name, one in zip(own, found[rank * len(own) :], strict=False) if one]
        if names:
            raise _different(rank, context, f"{', '.join(names)} differ")


def compare_peers(what: str, values: Sequence[Tensor], context: Context) -> None:
    """Refuse peers that do not compute the same samples: their tokens would be mixed without any other sign.

    All ranks must call it, and all raise where any group of peers differs.

    Args:
        what: the tensors' name, for the message.
        values: what all peers must have, of one shape; they travel within each group.

    Raises:
        UserError: names the ranks.
    """
    if context.cp_group is None:
        return
    own = torch.stack([value.detach().float().cpu() for value in values])
    first = context.share_with_peers(lambda: own)
    apart = math.inf
    if first.shape == own.shape:
        size = max(float(first.nan_to_num().abs().max()), 1e-12)
        apart = float((own.nan_to_num() - first.nan_to_num()).abs().max()) / size
    ranks = range(context.world_size)
    apart_of = context.max_over_ranks([apart if rank == context.rank else 0.0 for rank in ranks])
    wrong = [rank for rank in ranks if apart_of[rank] > _ROUNDING]
    if wrong:
        raise _different(wrong[0], context, f"{what} differ by {apart_of[wrong[0]]:.3g} of the largest number")


def _different(rank: int, context: Context, how: str) -> UserError:
    peer = rank - rank % context.cp_size
    return UserError(
        f"ranks {peer} and {rank} share the samples of one data-parallel rank (policy.parallelism.cp_size = "
        f"{context.cp_size}), but {how}; data, model files and versions must be the same on all machines"
    )
