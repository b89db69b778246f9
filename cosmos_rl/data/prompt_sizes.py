"""Sizes that the rows of a file of prompts name for their samples. No torch."""

from collections.abc import Sequence

from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.data.texts import printable
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.buckets import Sides, choose_size

SIZED_SETS = (
    "rows name sizes of their samples (policy.diffusers.buckets), which several sets cannot do yet; leave the sizes "
    "out of the rows, then each step draws one"
)
_ALLOWED = '"size": [height, width], or "height" and "width", whole numbers > 0'


def list_sizes(records: Sequence[PromptRecord], sizes: Sequence[Sides]) -> list[Sides | None]:
    """The size that each prompt names, as ``size`` or as ``height`` and ``width``; None: it names none.

    Raises:
        UserError: it is none of ``sizes``.
    """
    return [_find_size(record, sizes, number) for number, record in enumerate(records)]


def _find_size(record: PromptRecord, sizes: Sequence[Sides], number: int) -> Sides | None:
    row = record.metadata
    found: object = row.get("size")
    if found is None:
        found = [row.get("height"), row.get("width")]
        if found == [None, None]:
            return None
    what = f"prompt {number} ({printable(record.prompt[:40])!r}): size: found {found!r}"
    sides = [side for side in found if type(side) is int and side > 0] if isinstance(found, list | tuple) else []
    if len(sides) != 2 or sides != found:
        raise UserError(f"{what}; allowed: {_ALLOWED}")
    size = sides[0], sides[1]
    if size not in sizes:
        near = list(choose_size(size, sizes))
        raise UserError(f"{what}; allowed: one of policy.diffusers.buckets, of which {near} is the nearest")
    return size
