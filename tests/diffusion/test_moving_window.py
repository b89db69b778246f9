"""Where a moving window of trained sampling steps is, against schedules that are written out and counted by hand."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cosmos_rl.diffusion.moving_window import MovingWindow, WindowOrder

MIX = MovingWindow(last=20, stride=1, interval=25)
"""MixGRPO: a window of 4 of the 24 steps with noise of 25, moved by 1."""


def starts_of(window: MovingWindow, count: int) -> list[int]:
    return [window.start_at(step) for step in range(count)]


def test_the_published_schedule_takes_525_training_steps_to_the_end_and_begins_again() -> None:
    starts = starts_of(MIX, 25 * 21 + 30)
    assert starts == [start for start in range(21) for _ in range(25)] + [0] * 25 + [1] * 5


def test_an_exponential_decay_stays_ever_shorter_beyond_its_threshold() -> None:
    """25 exp(-0.1 (l - 13)), rounded up: 22.6, 20.5, 18.5, 16.8, 15.2, 13.7, 12.4 at 14 ... 20."""
    window = replace(MIX, order="exp_decay")
    expected = [25] * 14 + [23, 21, 19, 17, 16, 14, 13]
    assert window.intervals == expected
    assert starts_of(window, sum(expected) + 1) == [at for at, stay in enumerate(expected) for _ in range(stay)] + [0]


def test_an_exponential_decay_stays_for_at_least_one_training_step() -> None:
    """2 exp(-0.7 (l - 1)), rounded up: 0.99 at 2; the smallest float at the end."""
    window = MovingWindow(12, "exp_decay", stride=2, interval=2, decay_rate=0.7, decay_threshold=1)
    assert window.intervals == [2, 1, 1, 1, 1, 1, 1]
    assert MovingWindow(20, "exp_decay", decay_rate=1e4, decay_threshold=0).intervals == [25] + [1] * 20


def test_a_linear_decay_ends_at_its_least_interval() -> None:
    """10 - 9 l / 20, rounded down."""
    window = MovingWindow(20, "decay", interval=10)
    assert window.intervals == [10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 1]
    assert MovingWindow(0, "decay", interval=10).intervals == [10]


def count_steps(window: MovingWindow, roll_back: bool) -> Iterator[int]:
    """The window as a counter that forgets nothing but where it is and for how long: no sums, no modulo."""
    start, stayed = 0, 0
    while True:
        yield start
        stayed += 1
        due = window.interval
        if window.order == "exp_decay" and start > window.decay_threshold:
            due = max(math.ceil(window.interval * math.e ** (window.decay_rate * (window.decay_threshold - start))), 1)
        if window.order == "decay":
            due = ((window.last - start) * window.interval + start * window.least_interval) // window.last
        if stayed >= due:
            stayed = 0
            if start < window.last:
                start = min(start + window.stride, window.last)
            elif roll_back:
                start = 0


@pytest.mark.parametrize("roll_back", [True, False], ids=["rolls back", "stays"])
@pytest.mark.parametrize("order", ["progressive", "decay", "exp_decay"])
@pytest.mark.parametrize(("last", "stride", "interval"), [(20, 1, 25), (21, 4, 7), (5, 2, 3), (3, 3, 1), (4, 9, 2)])
def test_it_is_where_a_counter_would_have_moved_it(
    order: WindowOrder, last: int, stride: int, interval: int, roll_back: bool
) -> None:
    window = MovingWindow(last, order, stride, interval, decay_rate=0.3, decay_threshold=2, roll_back=roll_back)
    count = 3 * sum(window.intervals) + 2
    counter = count_steps(window, roll_back)
    assert starts_of(window, count) == [next(counter) for _ in range(count)]
    assert window.start_at(10**9) in window.starts


def test_without_a_roll_back_it_stays_at_the_last_place() -> None:
    window = MovingWindow(4, interval=2, stride=2, roll_back=False)
    assert starts_of(window, 9) == [0, 0, 2, 2, 4, 4, 4, 4, 4]
    assert window.start_at(10**6) == 4


@pytest.mark.parametrize(
    ("stride", "starts"),
    [
        (1, [*range(21)]),
        (3, [0, 3, 6, 9, 12, 15, 18, 20]),
        (4, [0, 4, 8, 12, 16, 20]),
        (8, [0, 8, 16, 20]),
        (50, [0, 20]),
    ],
)
def test_the_last_place_is_where_the_last_whole_window_begins_whatever_the_stride(
    stride: int, starts: list[int]
) -> None:
    window = replace(MIX, stride=stride, interval=1)
    assert starts_of(window, len(starts) + 1) == [*starts, 0]
    if stride <= 4:  # MixGRPO's 4 steps: every one that has noise is in some window
        assert {start + k for start in starts for k in range(4)} == set(range(24))
