"""Which of several prompt sets gives the prompt at each position of a run. Exact integers; no torch."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import PromptSetConfig

Drawn = tuple[int, int]
"""A set and how many of its prompts were drawn before."""


@dataclass(frozen=True)
class Stage:
    """Steps in which the same sets are drawn."""

    first: int
    last: int | None
    """The step after its last one; None: it has no end."""
    shares: tuple[tuple[int, int], ...]
    """(set, share) in the order of the sets; shares are whole numbers without a common divisor."""

    @property
    def period(self) -> int:
        """Draws after which the order begins again, in which each set has exactly its share."""
        return sum(share for _, share in self.shares)

    def count(self, draws: int) -> list[int]:
        """How many of the first ``draws`` are of each set of the stage.

        The j-th draw of a set (from 0) has its place at (2 j + 1) / (2 p) for a share p of all: in the middle of its
        part of the sequence; the draws are in the order of their places, of equal ones the earlier set is first. That
        is the apportionment of Webster, so a set is less than one draw from its share among two or three sets, and at
        most 1/2 + k p / 2 among k.
        """
        rounds, rest = divmod(draws, self.period)
        counts = [(2 * rest * share + self.period) // (2 * self.period) for _, share in self.shares]
        while sum(counts) < rest:
            counts[self._find_next(counts)] += 1
        while sum(counts) > rest:
            counts[self._find_last(counts)] -= 1
        return [rounds * share + count for (_, share), count in zip(self.shares, counts, strict=True)]

    def draw(self, first: int, count: int) -> Iterator[Drawn]:
        """The sets of the draws ``first`` ... ``first + count - 1`` of the stage, in order."""
        counts = self.count(first)
        for _ in range(count):
            chosen = self._find_next(counts)
            yield self.shares[chosen][0], counts[chosen]
            counts[chosen] += 1

    @functools.cached_property
    def _apart(self) -> list[int]:
        """Half the distance between two places of each set, in a unit in which all are whole."""
        unit = math.lcm(*(share for _, share in self.shares))
        return [unit // share for _, share in self.shares]

    def _find_next(self, counts: Sequence[int]) -> int:
        return min(((2 * n + 1) * apart, i) for i, (n, apart) in enumerate(zip(counts, self._apart, strict=True)))[1]

    def _find_last(self, counts: Sequence[int]) -> int:
        return max(((2 * n - 1) * apart, i) for i, (n, apart) in enumerate(zip(counts, self._apart, strict=True)))[1]


@dataclass(frozen=True)
class SetSchedule:
    """Which set gives each prompt of each step: shares by weight, as exact as whole numbers allow."""

    sets: tuple[PromptSetConfig, ...]
    per_step: int
    """Prompts of a step, over all ranks."""
    whole_steps: bool = False
    """A step takes prompts of one set; false: of all that are active in it."""

    @functools.cached_property
    def stages(self) -> list[Stage]:
        """All steps from 0 on, without gaps; a stage may have no sets."""
        ends = [end for one in self.sets for end in (one.first_step, one.last_step) if end is not None]
        borders: list[int | None] = [*sorted({0, *ends}), None]
        return [
            Stage(first, last, self._share(first)) for first, last in itertools.pairwise(borders) if first is not None
        ]

    def find_stage(self, step: int) -> Stage:
        """The stage of a 0-based step."""
        return next(stage for stage in self.stages if stage.last is None or step < stage.last)

    def draw(self, step: int) -> list[Drawn]:
        """The sets of the prompts of 0-based ``step``, in order.

        Raises:
            UserError: no set is drawn in it.
        """
        stage = self.find_stage(step)
        if not stage.shares:
            raise UserError(f"train.train_policy.dataset.sets: none is drawn in step {step}")
        before = self._count_before(stage.first)
        done = (step - stage.first) * self._draws_per_step
        found = [(chosen, before[chosen] + number) for chosen, number in stage.draw(done, self._draws_per_step)]
        if not self.whole_steps:
            return found
        ((chosen, number),) = found
        return [(chosen, number * self.per_step + k) for k in range(self.per_step)]

    @property
    def _draws_per_step(self) -> int:
        return 1 if self.whole_steps else self.per_step

    def _count_before(self, first: int) -> list[int]:
        """Draws of each set in the stages before the one that begins with step ``first``."""
        counts = [0] * len(self.sets)
        for stage in self.stages:
            if stage.last is None or stage.last > first:
                break
            draws = (stage.last - stage.first) * self._draws_per_step
            if stage.shares:
                for (number, _), count in zip(stage.shares, stage.count(draws), strict=True):
                    counts[number] += count
        return counts

    def _share(self, step: int) -> tuple[tuple[int, int], ...]:
        """The sets that are drawn in a step, and their shares."""
        weights = {number: one.exact_weight for number, one in enumerate(self.sets) if one.is_drawn(step)}
        scale = math.lcm(*(weight.denominator for weight in weights.values()))
        whole = {number: int(weight * scale) for number, weight in weights.items()}
        divisor = math.gcd(*whole.values())
        return tuple((number, share // divisor) for number, share in whole.items())
