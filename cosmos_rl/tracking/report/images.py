"""Which images the page shows: before and after, the same images over time, best and worst."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cosmos_rl.tracking.report.inlined import Placed
from cosmos_rl.tracking.report.record import Gallery, Record, find_same_images, pick_first_of_each_prompt

_PAIRS, _PAIR_SIDE = 6, 320
_ROWS, _COLUMNS, _STRIP_SIDE = 6, 8, 160
_EXTREMES, _EXTREME_SIDE = 6, 224


@dataclass(frozen=True)
class Pairs:
    """The same images in the first and in the last gallery."""

    first_step: int
    last_step: int
    shown: Sequence[tuple[Placed, Placed]]
    in_all: int
    scored: int
    """Images that have a total in both."""
    means: tuple[float, float] | None
    """Their mean total before and after."""

    def labels(self, finished: bool) -> tuple[str, str]:
        """What the two sides are called; a run that is not finished has no after."""
        began, ended = "first", "last"
        if self.first_step == 0:
            began, ended = "before", "after"
        if not finished:
            ended = "now"
        return began, ended


@dataclass(frozen=True)
class Images:
    """Which images the page shows."""

    pairs: Pairs | None
    only: tuple[int, Sequence[Placed]] | None
    """Step and images, when there is one gallery and nothing to compare it with."""
    strip: Sequence[Sequence[tuple[int, Placed]]]
    """Row by row, (step, image) of every column."""
    extremes: tuple[int, Mapping[str, Sequence[Placed]]] | None
    """Step and the groups "best" and "worst" of the newest rollouts."""

    def list_placed(self) -> list[Placed]:
        """All images with their sizes, as often as they are shown."""
        found: list[Placed] = []
        if self.pairs:
            found += [placed for both in self.pairs.shown for placed in both]
        if self.only:
            found += self.only[1]
        found += [placed for row in self.strip for _, placed in row]
        if self.extremes:
            found += [placed for group in self.extremes[1].values() for placed in group]
        return found


def choose_images(record: Record) -> Images:
    """What is shown of the galleries of a run."""
    galleries = find_same_images(record)
    only = None
    if len(galleries) == 1:
        ((step, gallery),) = galleries.items()
        only = step, _place(pick_first_of_each_prompt(gallery, lambda one: True, _PAIRS), _PAIR_SIDE)
    return Images(_pair_galleries(galleries), only, _choose_strip(galleries), _choose_extremes(record))


def _place(gallery: Gallery, side: int) -> list[Placed]:
    return [Placed(one, side) for one in gallery]


def _pair_galleries(galleries: Mapping[int, Gallery]) -> Pairs | None:
    """The first against the last gallery of the same prompts and noise; None with fewer than two galleries."""
    if len(galleries) < 2:
        return None
    first, last = min(galleries), max(galleries)
    later = {one.key: one for one in galleries[last]}
    both = [(one, later[one.key]) for one in galleries[first] if one.key in later]
    both = [pair for pair in both if pair[0].of_set == both[0][0].of_set]  # scores of two sets do not mix
    chosen = pick_first_of_each_prompt(galleries[first], lambda one: one.key in later, _PAIRS)
    shown = [(Placed(one, _PAIR_SIDE), Placed(later[one.key], _PAIR_SIDE)) for one in chosen]
    scored = [(a.total, b.total) for a, b in both if a.total is not None and b.total is not None]
    means = None
    if scored:
        means = (statistics.fmean([a for a, _ in scored]), statistics.fmean([b for _, b in scored]))
    return Pairs(first, last, shown, len(both), len(scored), means)


def _choose_strip(galleries: Mapping[int, Gallery]) -> list[list[tuple[int, Placed]]]:
    if len(galleries) < 3:  # two are before and after
        return []
    steps = sorted(galleries)
    last = len(steps) - 1
    columns = min(_COLUMNS, len(steps))
    picked = list(dict.fromkeys(steps[round(i * last / (columns - 1))] for i in range(columns)))
    by_step = {step: {one.key: one for one in galleries[step]} for step in picked}
    rows = pick_first_of_each_prompt(galleries[picked[0]], lambda one: one.key in by_step[picked[-1]], _ROWS)
    return [
        [(s, Placed(by_step[s][row.key], _STRIP_SIDE, moves=False)) for s in picked if row.key in by_step[s]]
        for row in rows
    ]


def _choose_extremes(record: Record) -> tuple[int, dict[str, list[Placed]]] | None:
    for step in sorted(record.rollout, reverse=True):
        gallery = record.rollout[step]
        groups = {name: [one for one in gallery if one.group == name][:_EXTREMES] for name in ("best", "worst")}
        if any(groups.values()):
            return step, {name: _place(found, _EXTREME_SIDE) for name, found in groups.items() if found}
    return None
