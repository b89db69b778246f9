"""How several scores become one number. Pure functions; a missing score stays missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cosmos_rl.reward.table import Rewards, RewardTable


@dataclass(frozen=True)
class Reward:
    """One score and how it counts."""

    name: str
    weight: float
    clip_min: float
    clip_max: float
    origin: str = ""
    """What gives it, with a digest of a function's source: so that a resumed run notices another one."""
    is_term: bool = False
    """Whether it is only shown, as a term of another one."""


@dataclass(frozen=True)
class RewardSum:
    """Rewards that are added up: ``scale * clip(sum of weight * clip(score))``."""

    rewards: tuple[Reward, ...]
    scale: float
    clip_min: float
    clip_max: float

    def factor(self, reward: Reward) -> float:
        """How much the reward counts in the total; 0: not at all."""
        return self.scale * reward.weight

    def bounds(self, reward: Reward) -> tuple[float, float]:
        """Between which scores the reward differs when it is all that the sum has: its own clip and the sum's."""
        if reward.weight == 0:
            return reward.clip_min, reward.clip_max
        low, high = sorted((self.clip_min / reward.weight, self.clip_max / reward.weight))
        return min(max(reward.clip_min, low), high), min(max(reward.clip_max, low), high)


@dataclass(frozen=True)
class Scores:
    """What the rewards of one source gave for ``N`` samples."""

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
    if one.scale == 0:  # switched off: a score that is missing is not missed
        return added
    for reward in one.rewards:
        if reward.weight != 0:  # 0 * NaN would be NaN
            added = added + reward.weight * _clip(values[reward.name], reward.clip_min, reward.clip_max)
    return one.scale * added.clamp(one.clip_min, one.clip_max)


def _clip(score: Tensor, low: float, high: float) -> Tensor:
    score = score.to(torch.float64)
    return torch.where(torch.isfinite(score), score, torch.nan).clamp(low, high)  # a clip would make inf a number


def clip_scores(rewards: Rewards, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the given rewards that count, the scores float64 ``[N]`` within their bounds; NaN: missing."""
    counted = (name for name, factor in rewards.weights.items() if factor != 0 and name in scores)
    return {name: _clip(scores[name], *rewards.bounds[name]) for name in counted}


def combine(sums: Sequence[RewardSum], scores: Sequence[Scores]) -> RewardTable:
    """The table of the ``scores`` that belong to ``sums``."""
    values = {name: value for part in scores for name, value in part.values.items()}
    reasons = {name: rows for part in scores for name, rows in part.reasons.items()}
    totals = total(sums, values)
    counted = [reward.name for one in sums for reward in one.rewards if one.factor(reward) != 0]
    why = {}
    for row in torch.isnan(totals).nonzero().flatten().tolist():
        missing = [name for name in counted if not torch.isfinite(values[name][row])]
        why[row] = "; ".join(f"{name}: {reasons.get(name, {}).get(row, 'no finite score')}" for name in missing)
    return RewardTable(scores=values, total_N=totals, reasons=why)
