"""Which rewards score the samples of which prompt set. A score that is not asked is NaN, and not counted as missing."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import GrpoPolicyConfig
from cosmos_rl.policy.config.prompt_sets import find_reward_problems
from cosmos_rl.reward.futures import join_futures
from cosmos_rl.reward.table import Rewards, RewardTable, ScoringRequest


@dataclass(frozen=True)
class SetRewards:
    """The prompt sets of a run and the rewards of each."""

    labels: tuple[str, ...] = ()
    """Names of the sets in metrics; empty: there is one set, which has all rewards."""
    rewards: tuple[frozenset[str] | None, ...] = ()
    """Of each set its rewards, their terms among them; None: all."""

    @classmethod
    def of_config(cls, job: GrpoPolicyConfig, rewards: Rewards) -> "SetRewards":
        """
        Raises:
            UserError: a set names an unknown reward, or none that counts.
        """
        sets = job.dataset.sets
        if job.bypass_reward:
            return cls(tuple(one.shown_name for one in sets), (None,) * len(sets))
        known = {name: weight for name, weight in rewards.weights.items() if name not in rewards.terms}
        if problem := next(find_reward_problems(sets, known), None):
            raise UserError(problem)
        named = (
            None if one.rewards is None else frozenset((*one.rewards, *_find_terms(one.rewards, rewards)))
            for one in sets
        )
        return cls(tuple(one.shown_name for one in sets), tuple(named))

    def counts(self, number: int, name: str) -> bool:
        """Whether a reward is asked for the samples of a set."""
        asked = self.rewards[number] if self.rewards else None
        return asked is None or name in asked

    def is_used(self, name: str) -> bool:
        """Whether a reward is asked for the samples of any set."""
        return not self.rewards or any(self.counts(number, name) for number in range(len(self.rewards)))

    def split(self, prompt_sets: Sequence[int]) -> list[tuple[int, list[int]]]:
        """(set, its rows) of samples of these sets, in the order of the sets; all of set 0 where there is one."""
        if not self.labels:
            return [(0, list(range(len(prompt_sets))))]
        numbers = sorted(set(prompt_sets))
        return [(number, [row for row, own in enumerate(prompt_sets) if own == number]) for number in numbers]

    def submit(self, rewards: Rewards, request: ScoringRequest, prompt_sets: Sequence[int]) -> "Future[RewardTable]":
        """Begin to score; samples of sets with the same rewards travel together, and no others."""
        parts: dict[frozenset[str] | None, list[int]] = {}
        for row, number in enumerate(prompt_sets):
            parts.setdefault(self.rewards[number] if self.rewards else None, []).append(row)
        if len(parts) == 1:
            (asked,) = parts
            return rewards.submit(replace(request, rewards=asked))
        rows = [torch.tensor(own) for own in parts.values()]
        futures = [rewards.submit(request.take(own, asked)) for own, asked in zip(rows, parts, strict=True)]
        return join_futures(futures, lambda tables: _merge(tables, rows))


def _find_terms(names: Sequence[str], rewards: Rewards) -> list[str]:
    """The shown terms of these rewards: those of the same reward of the service, whose name a function may have too."""
    origins = {rewards.origins[name] for name in names}
    return [term for term in rewards.terms if rewards.origins[term] in origins]


def _merge(tables: Sequence[RewardTable], rows: Sequence[Tensor]) -> RewardTable:
    """The tables of parts of a request, whose samples were at ``rows`` of it, as one."""
    order = torch.cat(list(rows)).argsort()
    scores = {name: torch.cat([table.scores[name] for table in tables])[order] for name in tables[0].scores}
    reasons = {
        int(own[row]): why for table, own in zip(tables, rows, strict=True) for row, why in table.reasons.items()
    }
    return RewardTable(scores, torch.cat([table.total_N for table in tables])[order], reasons)
