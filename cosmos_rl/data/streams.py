"""Streams: which item stands at which global position. A pure function of the position, so a resume skips nothing and
reads nothing twice, whatever the number of ranks."""

import functools
import hashlib
import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from cosmos_rl.data.items import BadSample, Item, take, to_item
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.utils.logging import logger

_REPLACED = "the next sample takes its place"
_TRIES = 10
"""Samples in a row that are tried before a position is given up."""


@dataclass(frozen=True)
class Position:
    """A position in the stream."""

    sample_id: int
    """Global position: ``step * batch`` plus the index in the batch; the key of all random draws for this sample."""
    index: int
    """Index into the data set."""
    size: Sides | None = None
    """Height and width that the samples of its step have; None: those of all samples."""


class Stream(Protocol):
    """Which item stands at which position of an endless run."""

    @property
    def length(self) -> int:
        """Items of the data set."""
        ...

    @property
    def batch(self) -> int:
        """Positions of a step, over all ranks."""
        ...

    def steps_until(self, epoch: int) -> int:
        """Steps of the first ``epoch`` passes over the data."""
        ...

    def epoch_of(self, step: int) -> int:
        """In which 0-based pass a step lies."""
        ...

    def positions(self, step: int) -> list[Position]:
        """The ``batch`` positions of 0-based ``step``."""
        ...

    def batches(self, first_step: int, last_step: int) -> Iterator[list[Position]]:
        """Positions of the steps ``first_step`` ... ``last_step - 1``."""
        ...

    def following(self, position: Position) -> Iterator[int]:
        """The item of a position and those that may take its place, in order."""
        ...


@dataclass(frozen=True)
class MapStream:
    """Endless epochs over a data set of ``length`` items, ``batch`` of them per step over all ranks."""

    length: int
    batch: int
    seed: int
    shuffle: bool = True
    drop_last: bool = True
    batch_key: str = "train.train_batch_per_replica"
    """The key that sets the batch, for messages."""

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            raise UserError(
                f"the data set has {self.length} items, one step takes {self.batch} ({self.batch_key}) "
                "and train.train_policy.dataloader_drop_last drops incomplete steps, so an epoch would have no step; "
                f"lower {self.batch_key.partition(' ')[0]} or set train.train_policy.dataloader_drop_last = false"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in one pass; without ``drop_last`` the last one is filled up from the start of its epoch."""
        if self.drop_last:
            return self.length // self.batch
        return -(-self.length // self.batch)

    def steps_until(self, epoch: int) -> int:
        """See `Stream`."""
        return epoch * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """See `Stream`."""
        return step // self.steps_per_epoch

    def following(self, position: Position) -> Iterator[int]:
        """See `Stream`."""
        return ((position.index + offset) % self.length for offset in range(self.length))

    def order(self, epoch: int) -> Sequence[int]:
        """The order of the items in 0-based ``epoch``."""
        if self.shuffle:
            return _permute(self.length, self.seed + epoch)
        return range(self.length)

    def positions(self, step: int) -> list[Position]:
        """The ``batch`` positions of 0-based ``step``."""
        return next(self.batches(step, step + 1))

    def batches(self, first_step: int, last_step: int) -> Iterator[list[Position]]:
        """Positions of the steps ``first_step`` ... ``last_step - 1``."""
        for step in range(first_step, last_step):
            order = self.order(step // self.steps_per_epoch)
            first = (step % self.steps_per_epoch) * self.batch
            yield [Position(step * self.batch + k, order[(first + k) % self.length]) for k in range(self.batch)]


def find_items(stream: Stream, steps: int) -> Sequence[int]:
    """Indices of the items that the first ``steps`` steps take, ascending; over many epochs all."""
    if steps >= stream.steps_until(2):  # what one epoch leaves out, another takes
        return range(stream.length)
    return sorted({position.index for batch in stream.batches(0, steps) for position in batch})


def make_seed(text: str) -> int:
    """Of a generator: a hash, as torch's CPU generator uses 32 bits of a seed and no more."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


@functools.lru_cache(maxsize=4)  # a step asks several times, and a run has few streams
def _permute(length: int, seed: int) -> Sequence[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class Batch:
    """The items of one rank for one step."""

    positions: tuple[Position, ...]
    items: tuple[Item, ...]


@dataclass
class Skipped:
    """Samples that could not be read: each is named once, and too many of them end the run.

    A sample that a data set has several times counts once, so that repeats do not change how many are too many, and so
    does a file that several samples name.
    """

    length: int
    """Different samples in the data set."""
    max_frac: float
    """Share of them that may be left out; one always may, unless this is 0."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Index, the first one of a repeated sample -> what is wrong."""
    consequence: str = _REPLACED
    first_index_of: Callable[[int], int] | None = None
    """Gives one number to all indices of a sample; None: each has one index."""
    files: set[str] = field(default_factory=set)
    """Those among the reasons."""

    @classmethod
    def of(cls, dataset: Sequence[Any], max_frac: float, consequence: str = _REPLACED) -> "Skipped":
        """For the samples of a data set."""
        first_index_of, length = getattr(dataset, "first_index_of", None), len(dataset)
        if first_index_of is not None:
            length = len(set(map(first_index_of, range(length))))
        return cls(length, max_frac, consequence=consequence, first_index_of=first_index_of)

    def note(self, index: int, error: BadSample) -> None:
        """Count one.

        Raises:
            UserError: more than may be left out.
        """
        if self.first_index_of is not None:
            index = self.first_index_of(index)
        if index in self.reasons or error.file in self.files:
            return
        self.reasons[index] = reason = str(error)
        if error.file:
            self.files.add(error.file)
        limit = 0
        if self.max_frac > 0:
            limit = max(1, int(self.max_frac * self.length))
        if len(self.reasons) > limit:
            lines = "\n  ".join(list(self.reasons.values())[:20])
            raise UserError(
                f"{len(self.reasons)} of {self.length} samples cannot be read, more than "
                f"train.train_policy.max_skipped_frac = {self.max_frac:g} allows:\n  {lines}"
            )
        logger.warning(f"left out, {self.consequence}: {reason}")


def read_held_out(dataset: Sequence[Any], ids: Sequence[int], skipped: Skipped) -> tuple[list[int], list[Item]]:
    """Those of the elements ``ids`` of a validation set that can be read, and their positions.

    Raises:
        UserError: more cannot be read than ``skipped`` allows.
    """
    found: dict[int, Item] = {}
    for index in ids:
        try:
            found[index] = to_item(dataset[index], index)
        except BadSample as error:
            skipped.note(index, error)
    return list(found), list(found.values())


@dataclass(frozen=True)
class _Fetched:
    """What a loader worker gives: the item, or the error that ends the run; and what was left out on the way."""

    position: Position
    item: Item | None
    skipped: tuple[tuple[int, BadSample], ...] = ()
    error: UserError | None = None


class _ByPosition(Dataset[Any]):
    """Lets loader workers fetch by ``Position``. Errors travel as values: a worker would wrap them into tracebacks."""

    def __init__(self, dataset: Sequence[Any], stream: Stream) -> None:
        self._dataset, self._stream = dataset, stream

    def __getitem__(self, position: Position) -> _Fetched:  # pyright: ignore[reportIncompatibleMethodOverride]
        skipped: list[tuple[int, BadSample]] = []
        # a pure function of the position: a resume finds the same one
        for index in itertools.islice(self._stream.following(position), _TRIES):
            try:
                item = to_item(take(self._dataset, index, position.sample_id), index)
                return _Fetched(position, item, tuple(skipped))
            except BadSample as error:
                skipped.append((index, error))
            except UserError as error:
                return _Fetched(position, None, tuple(skipped), error)
            except Exception as error:
                error.add_note(f"in element {index} of the data set")
                raise
        reasons = "\n  ".join(str(error) for _, error in skipped)
        return _Fetched(position, None, (), UserError(f"{len(skipped)} samples in a row cannot be read:\n  {reasons}"))


class _ShareOfSteps:
    """Positions of this rank step by step, made while they are needed."""

    def __init__(self, stream: Stream, first_step: int, last_step: int, rank: int, world_size: int) -> None:
        self._steps = (stream, first_step, last_step)
        self._share = slice(rank, None, world_size)

    def __iter__(self) -> Iterator[list[Position]]:
        stream, first_step, last_step = self._steps
        for positions in stream.batches(first_step, last_step):
            yield positions[self._share]


def _to_batch(fetched: list[_Fetched], skipped: Skipped) -> Batch:
    items: list[Item] = []
    for one in fetched:
        for index, error in one.skipped:
            skipped.note(index, error)
        if one.item is None:
            assert one.error is not None
            raise one.error
        items.append(one.item)
    return Batch(positions=tuple(one.position for one in fetched), items=tuple(items))


def _stay_until_closed(_worker: int) -> None:
    """In a loader process: a stop signal to all processes is the run's to answer, which still needs its data.

    It ends when the run closes it or is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def load_batches(
    dataset: Sequence[Any],
    stream: Stream,
    first_step: int,
    last_step: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    skipped: Skipped | None = None,
) -> Iterator[Batch]:
    """Decoded batches of this rank (positions rank, rank + world, ... of each step) from ``first_step`` on.

    Only what is consumed counts: prefetched items have no state. A sample that cannot be read is replaced by the next
    one that can, counted in ``skipped`` (not given: none may be).
    """
    skipped = skipped or Skipped(len(dataset), 0.0)
    loader = DataLoader(
        _ByPosition(dataset, stream),
        batch_sampler=_ShareOfSteps(stream, first_step, last_step, rank, world_size),  # pyright: ignore[reportArgumentType]
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        collate_fn=list,
        worker_init_fn=_stay_until_closed,
    )
    for fetched in loader:
        yield _to_batch(fetched, skipped)
