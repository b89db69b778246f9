"""Which sampling steps are trained."""

from collections import Counter

import numpy as np
import pytest
import torch

from cosmos_rl.diffusion.moving_window import MovingWindow
from cosmos_rl.diffusion.step_selection import StepSelection, spread_levels


def choices(selection: StepSelection, count: int = 200) -> list[tuple[int, ...]]:
    return [selection.choose(step, torch.Generator().manual_seed(step)) for step in range(count)]


def test_the_first_steps() -> None:
    assert set(choices(StepSelection(9, count=9))) == {tuple(range(9))}


def test_random_steps_are_distinct_ascending_and_reach_all_but_the_last() -> None:
    found = choices(StepSelection(9, "random", count=5))
    assert all(len(set(one)) == 5 and list(one) == sorted(one) for one in found)
    assert {index for one in found for index in one} == set(range(9))
    assert found == choices(StepSelection(9, "random", count=5))


def test_random_steps_may_lie_in_a_share_of_all() -> None:
    """Flow-DPPO: three steps of the first half."""
    found = choices(StepSelection(9, "random", count=3, end=5))
    assert {index for one in found for index in one} == set(range(5))


@pytest.mark.parametrize(
    "selection",
    [
        StepSelection(6, count=3),
        StepSelection(6, "random", count=2, end=4),
        StepSelection(6, "list", indices=(4, 1)),
        StepSelection(6, "list", indices=(1, -1)),
        StepSelection(9, "window", count=2, end=5),
        StepSelection(9, "window", count=2, moving=MovingWindow(7, stride=4, interval=3)),
        StepSelection(9, "window", count=1, moving=MovingWindow(8, "decay", stride=3, interval=3)),
    ],
)
def test_candidates_are_what_is_ever_chosen(selection: StepSelection) -> None:
    assert selection.candidates == {index for one in choices(selection) for index in one}


def test_a_list_is_filled_up_with_other_random_steps() -> None:
    found = choices(StepSelection(7, "list", indices=(0, 2, -1, -1)))
    assert all(len(set(one)) == 4 and {0, 2} <= set(one) and list(one) == sorted(one) for one in found)
    assert {index for one in found for index in one} == set(range(7))


def test_a_window_lies_in_its_share_of_the_steps() -> None:
    """Flow-GRPO-Fast: the start is uniform in 0 ... N / 2 - 3."""
    found = choices(StepSelection(9, "window", count=3, end=5))
    assert set(found) == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}
    assert all(found.count(one) > 40 for one in set(found))
    assert max(one[-1] for one in choices(StepSelection(9, "window", count=3))) == 8


def test_a_moving_window_is_at_its_place_and_draws_nothing() -> None:
    moving = MovingWindow(last=4, stride=2, interval=3)
    found = choices(StepSelection(6, "window", count=2, moving=moving), 12)
    assert found == [(0, 1)] * 3 + [(2, 3)] * 3 + [(4, 5)] * 3 + [(0, 1)] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"count": 10},
        {"count": 0},
        {"choice": "list", "indices": (9,)},
        {"choice": "list", "indices": (2, 2)},
        {"choice": "list"},
        {"choice": "window", "count": 4, "end": 3},
        {"choice": "window", "count": 4, "moving": MovingWindow(last=6)},
    ],
)
def test_steps_that_there_are_not_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="trained steps: found .* allowed"):
        StepSelection(9, **options)


@pytest.mark.parametrize(("count", "total", "apart"), [(1, 6, 6), (2, 6, 3), (3, 10, 3), (9, 10, 1), (10, 10, 1)])
def test_spread_levels_are_far_apart_and_equally_frequent(count: int, total: int, apart: int) -> None:
    chosen = [spread_levels(range(4, 4 + 2 * total), count, total, shift) for shift in range(total)]
    for samples in chosen:
        assert Counter(level for levels in samples for level in levels) == dict.fromkeys(range(total), 2 * count)
        for levels in samples:
            gaps = [(b - a) % total or total for a, b in zip(levels, levels[1:] + levels[:1], strict=True)]
            assert min(gaps) == apart
    for place in zip(*chosen, strict=True):  # over the shifts every sample has every level alike
        assert Counter(level for levels in place for level in levels) == dict.fromkeys(range(total), count)


def test_spread_levels_leave_a_mean_over_levels_where_it_is_with_less_variance() -> None:
    """The gradient of a step is such a mean; here of a sample's own share plus a part that depends on the level."""
    rng = np.random.default_rng(0)
    samples, count, total = 20, 2, 10
    value = (
        rng.normal(size=(samples, 1)) * 0.1 + np.linspace(-1, 1, total) ** 3 + rng.normal(size=(samples, total)) * 0.1
    )
    even, drawn = [], []
    for _ in range(2000):
        levels = spread_levels(range(samples), count, total, int(rng.integers(total)))
        even.append(np.mean([value[i, one].mean() for i, one in enumerate(levels)]))
        levels = [rng.permutation(total)[:count] for _ in range(samples)]
        drawn.append(np.mean([value[i, one].mean() for i, one in enumerate(levels)]))
    assert np.mean(even) == pytest.approx(value.mean(), abs=4 * np.std(even) / 2000**0.5)
    assert np.var(even) < 0.2 * np.var(drawn)
