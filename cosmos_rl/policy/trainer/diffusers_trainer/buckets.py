"""At which size each sample of a data set is trained, the same on all ranks."""

import hashlib
import json
import operator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cosmos_rl.data.items import BadSample
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.buckets import Sides

_AT_ONCE = 8
"""Files that are looked at together."""
_KEY = "policy.diffusers.buckets"


@dataclass(frozen=True)
class Buckets:
    """The sizes of a data set's elements."""

    sizes: Sequence[Sides | None]
    """Height and width of each; None: it cannot be read."""
    unreadable: dict[int, BadSample]
    """Index -> what is wrong."""

    @property
    def digest(self) -> str:
        """Of all sizes, in order."""
        return hashlib.sha256(repr(list(self.sizes)).encode()).hexdigest()[:16]

    def split(self) -> list[tuple[Sides, list[int]]]:
        """Each size with its elements, in a fixed order."""
        found = sorted({size for size in self.sizes if size is not None})
        return [(size, [i for i, own in enumerate(self.sizes) if own == size]) for size in found]


def find_buckets(dataset: Any, config: Config, context: Context) -> Buckets | None:
    """The sizes of all elements, looked up by the main rank; None: all have one.

    All ranks must call it.

    Raises:
        UserError: the data set does not know them, or has others than the configuration.
    """
    if config.policy.diffusers.buckets is None:
        return None
    bucket_of = getattr(dataset, "bucket_of", None)
    if bucket_of is None:
        raise UserError(
            f"{_KEY}: the data set does not say which size an element has; give it a method bucket_of(index) that "
            "returns (height, width), or leave the table out"
        )
    found, unreadable, text = list[Sides | None](), dict[int, BadSample](), ""
    if context.is_main:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            text = json.dumps(list(pool.map(lambda index: _look_up(bucket_of, index), range(len(dataset)))))
    for index, entry in enumerate(json.loads(context.broadcast_from_main(text))):
        if "found" in entry:
            raise UserError(
                f"{_KEY}: bucket_of({index}) of the data set gave {entry['found']}; allowed: (height, width), "
                "two whole numbers"
            )
        size = entry.get("size") and tuple(entry["size"])
        if size is None:
            unreadable[index] = BadSample(entry["why"])
            unreadable[index].file = entry["file"]
        elif size not in config.policy.diffusers.training_sizes:
            raise UserError(
                f"{_KEY}: element {index} of the data set has the size {list(size)}, which is not among them"
            )
        found.append(size)
    return Buckets(found, unreadable)


def _look_up(bucket_of: Any, index: int) -> dict[str, Any]:
    """The size of an element, why it cannot be read, or what was found in place of a size; all ranks refuse that."""
    try:
        found = bucket_of(index)
    except BadSample as error:
        return {"why": str(error), "file": error.file}
    try:
        height, width = map(operator.index, found)
    except (TypeError, ValueError):
        return {"found": repr(found)[:100]}
    return {"size": (height, width)}
