"""A dynamic loss scale: float16 gradients vanish without a factor on the loss, and are infinite with too large a one.

As in Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2. All factors are powers of two, so they change no bit of
a gradient that float16 can hold.
"""

from collections.abc import Sequence

START = 2.0**16
SMALLEST = 2.0**-8
GROWTH_INTERVAL = 2000


class LossScale:
    """The factor on the losses of a run. It depends only on what all ranks know, so it is the same on all of them."""

    def __init__(self, start: float = START, growth_interval: int = GROWTH_INTERVAL) -> None:
        """``growth_interval``: optimiser steps without an overflow after which the factor is doubled."""
        self.value = start
        self._growth_interval = growth_interval
        self._good_steps = 0

    def record_success(self) -> None:
        """A step was applied; every ``growth_interval``-th in a row doubles the factor."""
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self.value *= 2.0
            self._good_steps = 0

    def lower(self) -> bool:
        """A gradient was not finite: halve the factor. False when it is as small as it may be, so is not the reason."""
        self._good_steps = 0
        if self.value <= SMALLEST:
            return False
        self.value /= 2.0
        return True

    def state(self) -> list[float]:
        """What a resumed run continues with (JSON-ready)."""
        return [self.value, float(self._good_steps)]

    def restore(self, state: Sequence[float]) -> None:
        """Take over the state of a checkpoint."""
        self.value, self._good_steps = float(state[0]), int(state[1])
