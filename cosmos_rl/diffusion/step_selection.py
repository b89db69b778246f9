"""Which steps of a sampling run are trained: a function of the training step and of keyed draws.

Indices count from the noise and ascend. Only steps with noise have a log-probability, so only they are trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cosmos_rl.diffusion.moving_window import MovingWindow

StepChoice = Literal["first", "random", "list", "window"]


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
    moving: MovingWindow | None = None
    """Where a window is; None: at a place that is drawn for each training step (Flow-GRPO-Fast)."""

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
        last = self._end - self.count
        if self.moving is not None and self.moving.last > last:
            raise ValueError(f"trained steps: found a window that begins at {self.moving.last}; allowed: 0 to {last}")

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
        start = self._window_start(training_step, generator)
        return tuple(range(start, start + self.count))

    def _window_start(self, training_step: int, generator: torch.Generator) -> int:
        if self.moving is not None:
            return self.moving.start_at(training_step)
        return int(torch.randint(len(self._starts), (), generator=generator))

    @property
    def _starts(self) -> Sequence[int]:
        """Places of a window."""
        if self.moving is not None:
            return self.moving.starts
        return range(self._end - self.count + 1)

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
