"""Which steps of a sampling run are trained: a function of the training step and of keyed draws.

Indices count from the noise and ascend. Only steps with noise have a log-probability, so only they are trained.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

StepChoice = Literal["first", "random", "list", "window"]
WindowOrder = Literal["random", "progressive", "decay"]


@dataclass(frozen=True)
class StepSelection:
    """Which of the first ``noisy_steps`` sampling steps are trained; the steps after them have no noise."""

    noisy_steps: int
    choice: StepChoice = "first"
    """``first``, ``random``: so many of all. ``list``: ``indices``. ``window``: neighbours."""
    count: int = 0
    """Trained steps of ``first`` and ``random``, and size of a window."""
    indices: tuple[int, ...] = ()
    """-1 stands for a random one that is not listed."""
    end: int = 0
    """Windows and random steps lie before this step; 0: they lie anywhere."""
    order: WindowOrder = "random"
    """Where a window is. ``random``: drawn for each training step (Flow-GRPO-Fast). The others move from the noise to
    the data, then start again (MixGRPO, Li et al. 2025, arXiv 2507.21802), and stay at each place for ``interval``
    training steps (``progressive``), or for ever fewer, linearly down to ``least_interval`` (``decay``)."""
    stride: int = 1
    """Sampling steps between two places of a window."""
    interval: int = 25
    least_interval: int = 1

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: it names steps that there are not, or none.
        """
        listed = [index for index in self.indices if index >= 0]
        if any(index >= self.noisy_steps for index in listed) or len(set(listed)) != len(listed):
            allowed = f"different ones from 0 to {self.noisy_steps - 1}, or -1"
            raise ValueError(f"trained steps: found {list(self.indices)}; allowed: {allowed}")
        most = self.noisy_steps if self.choice in ("first", "list") else self._end
        if not 1 <= self.size <= most:
            raise ValueError(f"trained steps: found {self.size} of {self.noisy_steps}; allowed: 1 to {most}")

    @property
    def size(self) -> int:
        """How many steps are trained."""
        if self.choice == "list":
            return len(self.indices)
        return self.count

    @property
    def candidates(self) -> frozenset[int]:
        """Steps that some training step may choose."""
        if self.choice == "first":
            return frozenset(range(self.count))
        if self.choice == "list" and -1 not in self.indices:
            return frozenset(self.indices)
        if self.choice == "list":
            return frozenset(range(self.noisy_steps))
        if self.choice == "random":
            return frozenset(range(self._end))
        return frozenset(start + k for start in self._starts for k in range(self.count))

    def choose(self, training_step: int, generator: torch.Generator) -> tuple[int, ...]:
        """Ascending indices for one training step, counted from 0; ``generator`` is keyed by it."""
        if self.choice == "first":
            return tuple(range(self.count))
        if self.choice == "random":
            return tuple(sorted(torch.randperm(self._end, generator=generator)[: self.count].tolist()))
        if self.choice == "list":
            return self._fill_list(generator)
        starts = self._starts
        if self.order == "random":
            place = int(torch.randint(len(starts), (), generator=generator))
        else:
            ends = list(accumulate(self.intervals(starts)))
            place = next(k for k, end in enumerate(ends) if training_step % ends[-1] < end)
        return tuple(range(starts[place], starts[place] + self.count))

    def intervals(self, starts: range) -> list[int]:
        """For how many training steps a moving window stays at each of its places."""
        if self.order == "progressive":
            return [self.interval] * len(starts)
        shares = [start / max(starts[-1], 1) for start in starts]
        exact = [self.interval + share * (self.least_interval - self.interval) for share in shares]
        return [max(math.floor(round(value, 9)), 1) for value in exact]

    @property
    def _starts(self) -> range:
        """Places of a window."""
        return range(0, self._end - self.count + 1, 1 if self.order == "random" else self.stride)

    def _fill_list(self, generator: torch.Generator) -> tuple[int, ...]:
        listed = [index for index in self.indices if index >= 0]
        others = [index for index in range(self.noisy_steps) if index not in listed]
        drawn = torch.randperm(len(others), generator=generator)[: len(self.indices) - len(listed)].tolist()
        return tuple(sorted([*listed, *(others[k] for k in drawn)]))

    @property
    def _end(self) -> int:
        """Windows and random steps lie before it."""
        return min(self.end or self.noisy_steps, self.noisy_steps)


def spread_levels(positions: Sequence[int], count: int, total: int, shift: int) -> list[list[int]]:
    """``count`` of ``total`` noise levels for the sample at each position of an optimiser step, spread evenly.

    ``(position + shift + floor(k total / count)) mod total``: those of a sample are as far apart as can be, and
    ``total`` samples in a row have every level ``count`` times. With a shift drawn evenly from all levels each sample
    has each level with the same probability, as if its own were drawn without the others'.
    """
    offsets = [k * total // count for k in range(count)]
    return [[(position + shift + offset) % total for offset in offsets] for position in positions]
