"""How samples are split over ranks, optimiser steps and forward passes; the same on all ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.phase import count_parts


@dataclass(frozen=True)
class Split:
    """One rank's part of a list of samples. Every rank gets as many, so that all run as many sharded forward passes."""

    indices: tuple[int, ...]
    positions: tuple[int, ...]
    """Where each is in the list."""
    weights: tuple[float, ...]
    """0 for samples that only fill up: they are run, and count for nothing."""


def split_evenly(indices: Sequence[int], rank: int, ranks: int, *, in_turn: bool = False) -> Split:
    """``ceil(len(indices) / ranks)`` for each rank: contiguous blocks, or ``in_turn`` every ``ranks``-th one from
    ``rank`` on, as `distributed.pairwise` adds them. The last ones are filled up with the first index."""
    count, size = len(indices), math.ceil(len(indices) / ranks)
    positions = range(rank * size, (rank + 1) * size)
    if in_turn:
        positions = range(rank, size * ranks, ranks)
    places = tuple(p if p < count else 0 for p in positions)
    return Split(tuple(indices[p] for p in places), places, tuple(float(p < count) for p in positions))


def optimizer_batches(
    kept: Sequence[int], *, size: int | None, passes: int, seed: int, purpose: str, step: int
) -> list[list[int]]:
    """The samples of each optimiser step of a training step.

    Args:
        kept: indices of all samples that are trained on, in order.
        size: samples per optimiser step over all ranks, at most; None: all of them. Where they do not divide, the
            batches are as equal as can be: 73 samples at 72 are 37 and 36, as an optimiser step moves the weights as
            far whatever its batch.
        passes: how often each sample is used.

    A pass that is one batch keeps the order, so that samples stay where they were made; else each pass is shuffled.
    """
    batches: list[list[int]] = []
    if not kept:
        return batches
    for number in range(passes):
        order = list(kept)
        if size is not None and size < len(order):
            generator = randomness.generator(seed, f"{purpose}/order", step, number)
            order = [order[i] for i in torch.randperm(len(order), generator=generator).tolist()]
        count = math.ceil(len(order) / (size or len(order)))
        batches += [part.tolist() for part in torch.tensor(order).tensor_split(count)]
    return batches


def split_chunks(count: int, size: int, rank: int, ranks: int) -> Iterator[tuple[list[int], bool]]:
    """Positions 0 ... count - 1 of a rank in chunks of ``size``; (positions, do they count).

    Every rank gets as many chunks; one that has none left repeats a position, and that chunk does not count.
    """
    own = list(range(rank, count, ranks))
    rounds = math.ceil(math.ceil(count / ranks) / size)
    for number in range(rounds):
        chunk = own[number * size : (number + 1) * size]
        yield chunk or [rank % count], bool(chunk)


def gather_over_ranks(
    count: int, size: int, context: Context, make: Callable[[Sequence[int], int], Sequence[Tensor]]
) -> list[Tensor]:
    """Rows 0 ... count - 1 made on all ranks and gathered: every rank has all of them, in order, on the CPU.

    Args:
        size: rows of one call.
        make: (positions, number of the call) -> one or more tensors ``[len(positions), ...]``.
    """
    rank, ranks = context.dp_rank, context.dp_size
    rows = math.ceil(count / ranks)
    own: list[Tensor] = []
    chunks = list(split_chunks(count, size, rank, ranks))
    for number, (ids, counts) in enumerate(chunks):
        count_parts(number, len(chunks))
        parts = make(ids, number)
        own = own or [torch.zeros(rows, *part.shape[1:], dtype=part.dtype) for part in parts]
        if counts:
            for whole, part in zip(own, parts, strict=True):
                whole[[i // ranks for i in ids]] = part.cpu()
    order = [(i % ranks) * rows + i // ranks for i in range(count)]  # gathered rank after rank
    return [context.gather_rows(whole)[order] for whole in own]
