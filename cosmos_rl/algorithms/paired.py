"""Has a score changed? The same samples scored twice, compared one by one, in units of their own standard deviation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_rl.algorithms.advantage import ROUNDING


@dataclass(frozen=True)
class PairedChange:
    """What became of ``N`` scores. Another zero or another unit of the scores changes ``drop`` and ``sigmas`` not."""

    mean: float
    """Of later minus first."""
    std: float
    """Standard deviation of the first scores."""
    sigmas: float
    """The mean over its standard error, as the deviation of a normal distribution that is as unlikely."""

    @property
    def drop(self) -> float:
        """How far the mean fell, in standard deviations of the first scores; negative: it rose."""
        if self.mean == 0.0:
            return 0.0
        if not self.std > 0.0:
            return math.copysign(math.inf, -self.mean)
        return -self.mean / self.std

    def has_fallen(self, min_drop: float, min_sigmas: float) -> bool:
        """Whether the fall is larger than ``min_drop``, and larger than chance makes it with ``min_sigmas``."""
        return self.drop > min_drop and self.sigmas < -min_sigmas


def compare_pairs(first_N: Tensor, later_N: Tensor) -> PairedChange | None:
    """Compare the scores of the same samples; None: not known, as more than half of the pairs are missing, or all.

    Args:
        first_N, later_N: ``[N]``, sample by sample; what is not finite is missing and its pair left out.

    The standard error counts one pair more, without a change: that a few scores of 0 or 1 all changed is no certainty.
    So ``sigmas`` of ``N`` pairs is at most that of ``t = N``, 3.7 for seven pairs and 4.1 for eight.
    """
    first, later = first_N.double(), later_N.double()
    there = first.isfinite() & later.isfinite()
    pairs = int(there.sum())
    if pairs == 0 or 2 * pairs < len(first):
        return None
    first, later = first[there], later[there]
    change = later - first
    mean, std = float(change.mean()), float(first.std(correction=min(pairs - 1, 1)))
    if abs(mean) <= ROUNDING * float(torch.maximum(first.abs(), later.abs()).max()):
        return PairedChange(0.0, std, 0.0)
    cautious = torch.cat([change, change.new_zeros(1)])
    t = float(cautious.mean() / cautious.std()) * math.sqrt(len(cautious))
    return PairedChange(mean, std, equivalent_normal_deviate(t, pairs))


def equivalent_normal_deviate(t: float, free: int) -> float:
    """The deviation of a normal distribution that is as unlikely as Student's ``t`` with ``free`` degrees of freedom.

    By Wallace (1959): within a few percent, for one or two degrees of freedom too large a one.
    """
    size = (8 * free + 1) / (8 * free + 3) * math.sqrt(free * math.log1p(t * t / free))
    return math.copysign(size, t)
