"""A stream whose steps take samples of one size each: the data set in buckets, one for each size."""

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cosmos_rl.data.streams import Position, make_seed
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.buckets import Sides


@dataclass(frozen=True)
class Bucket:
    """The items of one size."""

    size: Sides
    members: Sequence[int]
    """Indices into the data set, ascending."""

    def order(self, seed: int, number: int, *, shuffle: bool) -> Sequence[int]:
        """Positions in ``members`` in the 0-based pass ``number`` over them."""
        if not shuffle:
            return range(len(self.members))
        return _permute(len(self.members), make_seed(f"{seed}/{self.size}/{number}"))


@dataclass(frozen=True)
class BucketStream:
    """Endless epochs over a data set in buckets, ``batch`` samples of one of them per step over all ranks.

    With ``drop_last`` the items of a bucket that do not fill a step wait for the next epoch, so that over the epochs
    all are taken equally often and an epoch may have a step more or less than another. Without it the last step of
    each bucket is filled up from the start of the bucket's order.
    """

    length: int
    """Items of the data set, those in no bucket among them."""
    buckets: Sequence[Bucket]
    batch: int
    seed: int
    shuffle: bool = True
    drop_last: bool = True

    @classmethod
    def of_sizes(cls, sizes: Sequence[Sides | None], batch: int, seed: int, **options: bool) -> "BucketStream":
        """``sizes``: that of each item; None: it cannot be read, and is never taken."""
        members: dict[Sides, list[int]] = {}
        for index, size in enumerate(sizes):
            if size is not None:
                members.setdefault(size, []).append(index)
        buckets = [Bucket(size, members[size]) for size in sorted(members)]
        return cls(len(sizes), buckets, batch, seed, **options)

    def steps_until(self, epoch: int) -> int:
        """See `Stream`."""
        return sum(self._steps_of(bucket, epoch) for bucket in self.buckets)

    def epoch_of(self, step: int) -> int:
        """See `Stream`."""
        items = sum(len(bucket.members) for bucket in self.buckets)
        most = (step + 1 + len(self.buckets)) * self.batch // items + 2  # by then the step is over
        return bisect.bisect_right(range(most), step, key=self.steps_until) - 1

    def count_waiting(self, epoch: int) -> int:
        """Items that wait for a step after so many epochs; with ``drop_last`` false none does."""
        if not self.drop_last:
            return 0
        return sum(epoch * len(bucket.members) % self.batch for bucket in self.buckets)

    def require_steps(self, epochs: int) -> None:
        """
        Raises:
            UserError: so many epochs have no whole step.
        """
        if self.steps_until(epochs) == 0:
            raise UserError(
                f"the data set has {self.length} items in {len(self.buckets)} buckets (policy.diffusers.buckets), and "
                f"none of them fills a step of {self.batch} in {epochs} epochs; lower train.train_batch_per_replica or "
                "set train.train_policy.dataloader_drop_last = false"
            )

    def positions(self, step: int) -> list[Position]:
        """See `Stream`."""
        return next(self.batches(step, step + 1))

    def batches(self, first_step: int, last_step: int) -> Iterator[list[Position]]:
        """See `Stream`."""
        epoch, steps, start = -1, [], 0
        for step in range(first_step, last_step):
            if not start <= step < start + len(steps):
                epoch = self.epoch_of(step)
                steps, start = self._steps_in(epoch), self.steps_until(epoch)
            bucket, number = steps[step - start]
            indices = self._take(bucket, number)
            yield [Position(step * self.batch + k, index, bucket.size) for k, index in enumerate(indices)]

    def following(self, position: Position) -> Iterator[int]:
        """See `Stream`: the others of its bucket."""
        members = next(bucket.members for bucket in self.buckets if bucket.size == position.size)
        first = bisect.bisect_left(members, position.index)
        return (members[(first + offset) % len(members)] for offset in range(len(members)))

    def _steps_of(self, bucket: Bucket, epoch: int) -> int:
        """Steps of a bucket in the first ``epoch`` passes."""
        if self.drop_last:
            return epoch * len(bucket.members) // self.batch
        return epoch * -(-len(bucket.members) // self.batch)

    def _steps_in(self, epoch: int) -> list[tuple[Bucket, int]]:
        """(bucket, its own number of the step) of each step in an epoch, in order."""
        steps = [
            (bucket, number)
            for bucket in self.buckets
            for number in range(self._steps_of(bucket, epoch), self._steps_of(bucket, epoch + 1))
        ]
        if not self.shuffle:
            return steps
        return [steps[i] for i in _permute(len(steps), make_seed(f"{self.seed}/steps/{epoch}"))]

    def _take(self, bucket: Bucket, number: int) -> list[int]:
        """The items of a bucket's own step ``number``."""
        length = len(bucket.members)
        each = -(-length // self.batch)
        found = []
        for k in range(self.batch):
            if self.drop_last:
                passes, place = divmod(number * self.batch + k, length)
            else:
                passes, place = number // each, (number % each * self.batch + k) % length
            order = bucket.order(self.seed, passes, shuffle=self.shuffle)
            found.append(bucket.members[order[place]])
        return found


@functools.lru_cache(maxsize=64)  # a step of a small bucket may take several passes, and steps change between buckets
def _permute(length: int, seed: int) -> Sequence[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
