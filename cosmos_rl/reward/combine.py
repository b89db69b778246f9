"""How several scores become one number. Pure functions; a missing score stays missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cosmos_rl.reward.table import RewardTable


@dataclass(frozen=True)
class Reward:
    """One score and how it counts."""

    name: str
    weight: float
    clip_min: float
    clip_max: float
    origin: str = ""
    """What gives it, with a digest of a function's source: so that a resumed run notices another one."""


@dataclass(frozen=True)
class RewardSum:
    """Rewards that are added up: ``scale * clip(sum of weight * clip(score))``."""

    rewards: tuple[Reward, ...]
    scale: float
    clip_min: float
    clip_max: float


@dataclass(frozen=True)
class Scores:
    """What the rewards of one place gave for ``N`` samples."""

    values: Mapping[str, Tensor]
    """Reward name -> float64 ``[N]``, NaN: missing."""
    reasons: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Reward name -> row -> why it is missing."""


def total(sums: Sequence[RewardSum], values: Mapping[str, Tensor]) -> Tensor:
    """float64 ``[N]``: all ``sums`` added; NaN where a score is missing whose weight is not 0."""
    parts = [_one_sum(one, values) for one in sums]
    return torch.stack(parts).sum(0)


def _one_sum(one: RewardSum, values: Mapping[str, Tensor]) -> Tensor:
    first = next(iter(values.values()))
    added = torch.zeros_like(first, dtype=torch.float64)
    for reward in one.rewards:
        if reward.weight != 0:  # 0 * NaN would be NaN
            score = values[reward.name].to(torch.float64)
            score = torch.where(torch.isfinite(score), score, torch.nan)  # a clip would make inf a number
            added = added + reward.weight * score.clamp(reward.clip_min, reward.clip_max)
    return one.scale * added.clamp(one.clip_min, one.clip_max)


def combined(sums: Sequence[RewardSum], scores: Sequence[Scores]) -> RewardTable:
    """The table of the ``scores`` that belong to ``sums``."""
    values = {name: value for part in scores for name, value in part.values.items()}
    reasons = {name: rows for part in scores for name, rows in part.reasons.items()}
    totals = total(sums, values)
    counted = [reward.name for one in sums for reward in one.rewards if reward.weight != 0]
    why = {}
    for row in torch.isnan(totals).nonzero().flatten().tolist():
        missing = [name for name in counted if not torch.isfinite(values[name][row])]
        why[row] = "; ".join(f"{name}: {reasons.get(name, {}).get(row, 'no finite score')}" for name in missing)
    return RewardTable(scores=values, total_N=totals, reasons=why)
