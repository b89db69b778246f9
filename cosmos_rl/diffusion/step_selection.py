"""Which steps of a sampling run are trained: pure functions of the number of steps, the training step and keyed draws.

The last step never has noise, so it is never among them. Indices count from the noise and ascend.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from cosmos_rl.diffusion.kernels import Kernel, Transition, euler

WindowOrder = Literal["progressive", "random", "decay", "exp_decay"]


def choose_fraction(fraction: float, num_steps: int, generator: torch.Generator | None = None) -> tuple[int, ...]:
    """``fraction`` of ``num_steps``, rounded down, without the last one: the first, or with a generator random ones."""
    # as decimal numbers: 0.58 of 50 are 29, although floats make 28.99... of it
    count = min(math.floor(round(fraction * num_steps, 9)), num_steps - 1)
    if generator is None:
        return tuple(range(count))
    return tuple(sorted(torch.randperm(num_steps - 1, generator=generator)[:count].tolist()))


def choose_listed(indices: Sequence[int], num_steps: int, generator: torch.Generator) -> tuple[int, ...]:
    """The listed steps; each -1 stands for another random one that is not listed.

    Raises:
        ValueError: a step that there is not, one that is listed twice, or more of them than there are.
    """
    listed, last = [index for index in indices if index != -1], num_steps - 1
    if len(set(listed)) != len(listed) or not set(listed) <= set(range(last)):
        raise ValueError(f"trained steps: found {list(indices)}; allowed: different ones from 0 to {last - 1}, or -1")
    if len(indices) > last:
        raise ValueError(f"trained steps: found {len(indices)} of {num_steps}; allowed: at most {last}")
    others = [index for index in range(last) if index not in listed]
    drawn = torch.randperm(len(others), generator=generator)[: len(indices) - len(listed)].tolist()
    return tuple(sorted([*listed, *(others[k] for k in drawn)]))


@dataclass(frozen=True)
class Window:
    """Neighbouring steps whose position depends on the training step (MixGRPO, Li et al. 2025, arXiv 2507.21802)."""

    size: int
    order: WindowOrder = "progressive"
    """``random``: anywhere, drawn for each training step. The others move from the noise to the data and stay at each
    position for some training steps: ``progressive``: ``interval``; ``decay``: falling linearly from ``interval`` to
    ``least_interval`` at the end; ``exp_decay``: falling exponentially from step ``decay_from`` on."""
    interval: int = 25
    least_interval: int = 1
    stride: int = 1
    """Sampling steps between two positions."""
    first: int = 0
    """Start of the first position."""
    end: int | None = None
    """No position reaches this step; None: the last step."""
    roll_back: bool = True
    """After the last position comes the first one again; false: it stays."""
    decay_from: int = 13
    decay_rate: float = 0.1

    def starts(self, num_steps: int) -> range:
        """The positions.

        Raises:
            ValueError: there is none.
        """
        end = num_steps - 1
        if self.end is not None:
            end = min(self.end, end)
        starts = range(self.first, end - self.size + 1, self.stride)
        if self.size < 1 or not starts:
            raise ValueError(f"trained steps: found a window of {self.size} between steps {self.first} and {end}")
        return starts

    def intervals(self, num_steps: int) -> list[int]:
        """For how many training steps it stays at each position."""
        starts = self.starts(num_steps)
        if self.order == "decay":
            shares = [(start - self.first) / max(starts[-1] - self.first, 1) for start in starts]
            exact = [self.interval + share * (self.least_interval - self.interval) for share in shares]
            return [max(math.floor(round(value, 9)), 1) for value in exact]
        if self.order == "exp_decay":
            beyond = [max(start - self.decay_from, 0) for start in starts]
            return [math.ceil(round(self.interval * math.exp(-self.decay_rate * steps), 9)) for steps in beyond]
        return [self.interval] * len(starts)


def choose_window(
    window: Window, num_steps: int, training_step: int, generator: torch.Generator | None = None
) -> tuple[int, ...]:
    """The steps of a window in a training step, from 0; the same ones after a resume.

    Args:
        generator: keyed by the training step; for the order ``random``.

    Raises:
        ValueError: a window that does not fit, or no generator for ``random``.
    """
    starts = window.starts(num_steps)
    if window.order == "random":
        if generator is None:
            raise ValueError("a window at random positions needs a generator")
        start = starts[int(torch.randint(len(starts), (), generator=generator))]
    else:
        start = starts[_find_position(window.intervals(num_steps), training_step, window.roll_back)]
    return tuple(range(start, start + window.size))


def _find_position(intervals: Sequence[int], training_step: int, roll_back: bool) -> int:
    ends = list(accumulate(intervals))
    step = min(training_step, ends[-1] - 1)
    if roll_back:
        step = training_step % ends[-1]
    return next(position for position, end in enumerate(ends) if step < end)


def with_noise_only_at(kernel: Kernel, indices: Sequence[int], outside: Kernel = euler) -> Kernel:
    """The kernel at these steps, and another one, without noise, at the others."""
    chosen = frozenset(indices)

    def composed(index: int, sigmas: Sequence[float]) -> Transition:
        if index in chosen:
            return kernel(index, sigmas)
        return outside(index, sigmas)

    return composed


def split_trainable(
    indices: Sequence[int], kernel: Kernel, sigmas: Sequence[float]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of these steps, those that have noise and so a log-probability, and those that have none."""
    noisy = tuple(index for index in indices if kernel(index, sigmas).s > 0.0)
    return noisy, tuple(index for index in indices if index not in noisy)
