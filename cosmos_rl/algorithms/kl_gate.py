"""GARDO's gate (arXiv 2512.24138): the distance to the reference acts where the reward is least to be trusted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

REMEMBERED = 20
"""Steps with which a step is compared."""
FACTOR = 1.1


def measure_uncertainty(reward_N: Tensor, auxiliary: Sequence[Tensor]) -> Tensor:
    """How far the rank of the trained reward is above the mean rank of auxiliary rewards, float64 ``[N]`` in [-1, 1];
    NaN where a score is missing.

    A sample that the trained reward likes better than the others do is one whose reward may be exploited. (The authors'
    code has the sign the other way round, which is not what their text says.)
    """
    stacked_KN = torch.stack([reward_N, *auxiliary]).double()
    known_N = stacked_KN.isfinite().all(0)
    found_N = stacked_KN.new_full((len(reward_N),), torch.nan)
    if bool(known_N.any()):
        rank_KN = torch.stack([_rank(values) for values in stacked_KN[:, known_N]])
        found_N[known_N] = rank_KN[0] - rank_KN[1:].mean(0)
    return found_N


def gate_rows(uncertainty_N: Tensor, share: float) -> Tensor:
    """The ``share`` of the samples (rounded, at least one) with the largest uncertainty above 0, bool ``[N]``; and
    those of which it is not known."""
    unknown_N = uncertainty_N.isnan()
    value_N = torch.where(unknown_N, 0.0, uncertainty_N)
    count = min(max(round(share * int((~unknown_N).sum())), 1), int((value_N > 0).sum()))
    chosen_N = torch.zeros_like(unknown_N)
    chosen_N[value_N.argsort(descending=True, stable=True)[:count]] = True
    return chosen_N | unknown_N


@dataclass(frozen=True)
class GateShare:
    """The share of the samples that the gate takes, which follows how uncertain they are."""

    share: float
    means: tuple[float, ...] = ()
    """Mean uncertainty above 0 of the last ``REMEMBERED`` steps."""

    def follow(self, uncertainty_N: Tensor, least: float, most: float) -> "GateShare":
        """Times ``FACTOR`` after a step that is more uncertain than all that are remembered, times 2 - ``FACTOR`` after
        one that is less; within bounds. Nothing changes until so many are remembered."""
        above_N = uncertainty_N[uncertainty_N > 0]
        mean = float(above_N.mean()) if len(above_N) else 0.0
        share, kept = self.share, (*self.means, mean)[-REMEMBERED:]
        if len(self.means) == REMEMBERED and mean > max(self.means):
            share *= FACTOR
        elif len(self.means) == REMEMBERED and mean < min(self.means):
            share *= 2.0 - FACTOR
        return GateShare(min(max(share, least), most), kept)


def _rank(value_N: Tensor) -> Tensor:
    """0 for the smallest to 1 for the largest; equal ones share their mean."""
    below_N = (value_N[None, :] < value_N[:, None]).sum(1)
    equal_N = (value_N[None, :] == value_N[:, None]).sum(1)
    return (below_N.double() + (equal_N - 1) / 2) / max(len(value_N) - 1, 1)
