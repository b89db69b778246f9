"""Streams: which item stands at which global position. A pure function of the position, so a resume skips nothing and
reads nothing twice, whatever the number of ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from cosmos_rl.data.items import Item, as_item
from cosmos_rl.errors import UserError


@dataclass(frozen=True)
class Position:
    """A place in the stream."""

    sample_id: int
    """Global position: ``step * batch + slot``; the key of all random draws for this sample."""
    index: int
    """Index into the data set."""


@dataclass(frozen=True)
class MapStream:
    """Endless epochs over a data set of ``length`` items, ``batch`` of them per step over all ranks."""

    length: int
    batch: int
    seed: int
    shuffle: bool = True
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            raise UserError(
                f"the data set has {self.length} items, one step takes {self.batch} (train_batch_per_replica x ranks) "
                "and train.train_policy.dataloader_drop_last drops incomplete steps, so an epoch would have no step; "
                "lower train.train_batch_per_replica or set dataloader_drop_last = false"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in one pass; without ``drop_last`` the last one is filled up from the start of its epoch."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def order(self, epoch: int) -> list[int]:
        """The order of the items in 0-based ``epoch``."""
        if not self.shuffle:
            return list(range(self.length))
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()

    def positions(self, step: int) -> list[Position]:
        """The ``batch`` positions of 0-based ``step``."""
        return next(self.batches(step, step + 1))

    def batches(self, first_step: int, last_step: int) -> Iterator[list[Position]]:
        """Positions of the steps ``first_step`` ... ``last_step - 1``; each epoch is permuted once."""
        epoch, order = -1, []
        for step in range(first_step, last_step):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = self.order(epoch)
            first = (step % self.steps_per_epoch) * self.batch
            yield [Position(step * self.batch + k, order[(first + k) % self.length]) for k in range(self.batch)]


@dataclass(frozen=True)
class Batch:
    """The items of one rank for one step."""

    positions: tuple[Position, ...]
    items: tuple[Item, ...]


class _ByPosition(Dataset[Any]):
    """Lets loader workers fetch by ``Position``."""

    def __init__(self, dataset: Sequence[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, position: Position) -> "_Fetched":  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return position, as_item(self._dataset[position.index], position.index)
        except UserError as error:  # as a value: a worker process would wrap it into a traceback
            return position, error


_Fetched = tuple[Position, Item | UserError]


class _ShareOfSteps:
    """Positions of this rank step by step, made while they are needed."""

    def __init__(self, stream: MapStream, first_step: int, last_step: int, rank: int, world_size: int) -> None:
        self._steps = (stream, first_step, last_step)
        self._share = slice(rank, None, world_size)

    def __iter__(self) -> Iterator[list[Position]]:
        stream, first_step, last_step = self._steps
        for positions in stream.batches(first_step, last_step):
            yield positions[self._share]


def _as_batch(pairs: list[_Fetched]) -> Batch | UserError:
    items: list[Item] = []
    for _, item in pairs:
        if isinstance(item, UserError):
            return item
        items.append(item)
    return Batch(positions=tuple(position for position, _ in pairs), items=tuple(items))


def load_batches(
    dataset: Sequence[Any],
    stream: MapStream,
    first_step: int,
    last_step: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """Decoded batches of this rank (positions rank, rank + world, ... of each step) from ``first_step`` on.

    Only what is consumed counts: prefetched items have no state.
    """
    mine = _ShareOfSteps(stream, first_step, last_step, rank, world_size)
    loader = DataLoader(
        _ByPosition(dataset),
        batch_sampler=mine,
        num_workers=num_workers,
        collate_fn=_as_batch,  # pyright: ignore
    )
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        yield batch
