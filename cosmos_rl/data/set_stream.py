"""A stream over several prompt sets, each with epochs of its own."""

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.data.set_schedule import SetSchedule
from cosmos_rl.data.streams import MapStream, Position, make_seed
from cosmos_rl.errors import UserError


@dataclass(frozen=True)
class SetStream:
    """``schedule`` says which set gives each prompt; within a set every epoch takes each of its prompts once.

    There is one epoch of the whole, the run: stages have no common multiple.
    """

    members: Sequence[Sequence[int]]
    """Of each set the indices of its prompts in the data set, ascending."""
    schedule: SetSchedule
    steps: int
    """Of the run."""
    seed: int
    shuffle: bool = True

    @property
    def length(self) -> int:
        """See `Stream`."""
        return sum(map(len, self.members))

    @property
    def batch(self) -> int:
        """See `Stream`."""
        return self.schedule.per_step

    def steps_until(self, epoch: int) -> int:
        """See `Stream`."""
        return epoch * self.steps

    def epoch_of(self, step: int) -> int:
        """See `Stream`."""
        return step // self.steps

    def positions(self, step: int) -> list[Position]:
        """See `Stream`."""
        found = self.schedule.draw(step)
        return [Position(step * self.batch + k, self._find(chosen, number)) for k, (chosen, number) in enumerate(found)]

    def batches(self, first_step: int, last_step: int) -> Iterator[list[Position]]:
        """See `Stream`."""
        return map(self.positions, range(first_step, last_step))

    def following(self, position: Position) -> Iterator[int]:
        """See `Stream`: the others of its set."""
        for members in self.members:
            first = bisect.bisect_left(members, position.index)
            if first < len(members) and members[first] == position.index:
                yield from (*members[first:], *members[:first])

    @functools.cached_property
    def _own(self) -> list[MapStream]:
        return [
            MapStream(len(members), 1, make_seed(f"{self.seed}/set/{number}"), self.shuffle)
            for number, members in enumerate(self.members)
        ]

    def _find(self, chosen: int, number: int) -> int:
        """Index of the prompt that a set gives as its ``number``-th."""
        epoch, place = divmod(number, len(self.members[chosen]))
        return self.members[chosen][self._order(chosen, epoch)[place]]

    @functools.cached_property
    def _order(self) -> Callable[[int, int], Sequence[int]]:
        """(set, epoch) -> the order of its prompts; kept of two epochs of each set, which one step may touch."""
        return functools.lru_cache(maxsize=2 * len(self.members))(lambda chosen, epoch: self._own[chosen].order(epoch))


def group_by_set(records: Sequence[PromptRecord], count: int) -> list[list[int]]:
    """Of each of ``count`` sets the indices of its prompts.

    Raises:
        UserError: a set has none, or a prompt is of no set.
    """
    members: list[list[int]] = [[] for _ in range(count)]
    for index, record in enumerate(records):
        if not 0 <= record.prompt_set < count:
            raise UserError(
                f"data set element {index}: prompt_set: found {record.prompt_set}; allowed: 0 to {count - 1}, the "
                "numbers of train.train_policy.dataset.sets"
            )
        members[record.prompt_set].append(index)
    for number, found in enumerate(members):
        if not found:
            raise UserError(
                f"train.train_policy.dataset.sets.{number}: the data set has no prompts of it; a script gives "
                f"PromptRecord(text, prompt_set={number}), as load_prompts of cosmos_rl.data.prompt_sets does"
            )
    return members


def interleave_sets(records: Sequence[PromptRecord]) -> list[PromptRecord]:
    """The first prompt of each set, the second of each, and so on: whoever takes only the first ones knows all sets."""
    numbers: dict[int, int] = {}
    ranked = []
    for record in records:
        number = numbers[record.prompt_set] = numbers.get(record.prompt_set, -1) + 1
        ranked.append((number, record.prompt_set, record))
    return [record for *_, record in sorted(ranked, key=lambda one: one[:2])]
