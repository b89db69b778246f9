"""Where a window of trained sampling steps is in each training step (MixGRPO, Li et al. 2025, arXiv 2507.21802).

No torch: what `cosmos-rl check` says of a window is read here too.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

WindowOrder = Literal["progressive", "decay", "exp_decay"]


@dataclass(frozen=True)
class MovingWindow:
    """A window that moves from the noise to the data: a function of the training step alone.

    ``order`` says for how many training steps it stays at each place: ``interval`` at all of them (``progressive``);
    ``interval`` at the first, linearly less down to ``least_interval`` at the last (``decay``); or ``interval`` up to
    sampling step ``decay_threshold``, then exponentially less (``exp_decay``).
    """

    last: int
    """The last sampling step at which a whole window can begin."""
    order: WindowOrder = "progressive"
    stride: int = 1
    """Sampling steps between two places; fewer before the last one, where it does not divide ``last``."""
    interval: int = 25
    least_interval: int = 1
    decay_rate: float = 0.1
    """Of ``exp_decay``, per sampling step."""
    decay_threshold: int = 13
    roll_back: bool = True
    """After its last place the window begins at the first one again; false: it stays at the last one."""

    @property
    def starts(self) -> tuple[int, ...]:
        """The first sampling step of the window at each of its places, up to ``last`` whatever the stride."""
        return (*range(0, self.last, self.stride), self.last)

    @property
    def intervals(self) -> list[int]:
        """Training steps at each place, at least 1.

        ``exp_decay``: ``ceil(interval exp(-decay_rate max(start - decay_threshold, 0)))``, as in the authors' code.
        """
        if self.order == "progressive":
            return [self.interval] * len(self.starts)
        if self.order == "decay":
            shares = [start / max(self.starts[-1], 1) for start in self.starts]
            exact = [self.interval + share * (self.least_interval - self.interval) for share in shares]
            return [max(math.floor(round(value, 9)), 1) for value in exact]
        late = [max(start - self.decay_threshold, 0) for start in self.starts]
        return [max(math.ceil(self.interval * math.exp(-self.decay_rate * steps)), 1) for steps in late]

    def start_at(self, training_step: int) -> int:
        """The first sampling step of the window in a training step; both count from 0."""
        ends = list(accumulate(self.intervals))
        if training_step >= ends[-1] and not self.roll_back:
            return self.starts[-1]
        return self.starts[bisect_right(ends, training_step % ends[-1])]
