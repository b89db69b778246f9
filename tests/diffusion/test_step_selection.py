"""Which sampling steps are trained."""

import functools

import pytest
import torch

from cosmos_rl.diffusion.churn import Churn, build_churn, karras_sigmas
from cosmos_rl.diffusion.kernels import Kernel, build_kernel, dpm2, euler
from cosmos_rl.diffusion.step_selection import (
    Window,
    choose_fraction,
    choose_listed,
    choose_window,
    split_trainable,
    with_noise_only_at,
)

HARD = [1.0, 0.9, 0.5, 0.1, 0.0]


def keyed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("fraction", "steps", "count"),
    [(1.0, 10, 9), (0.99, 10, 9), (0.6, 16, 9), (0.58, 50, 29), (0.05, 10, 0), (1.0, 1, 0)],
)
def test_a_fraction_is_rounded_down_and_leaves_the_last_step_out(fraction: float, steps: int, count: int) -> None:
    assert choose_fraction(fraction, steps) == tuple(range(count))
    drawn = choose_fraction(fraction, steps, keyed(0))
    assert len(set(drawn)) == count
    assert list(drawn) == sorted(drawn)
    assert set(drawn) <= set(range(steps - 1))


def test_a_random_fraction_reaches_all_steps_alike_and_is_the_same_for_the_same_key() -> None:
    assert choose_fraction(0.4, 6, keyed(3)) == choose_fraction(0.4, 6, keyed(3))
    counts = torch.zeros(6)
    for seed in range(600):
        counts[list(choose_fraction(0.4, 6, keyed(seed)))] += 1
    assert counts[5] == 0
    assert counts[:5].tolist() == pytest.approx([240] * 5, abs=60)  # five standard deviations


def test_listed_steps_ascend_and_minus_one_is_another_one() -> None:
    assert choose_listed([6, 0, 2], 10, keyed(0)) == (0, 2, 6)
    reached = set()
    for seed in range(100):
        chosen = choose_listed([-1, 3, 0, -1], 6, keyed(seed))
        assert len(set(chosen)) == 4
        assert {0, 3} <= set(chosen) <= set(range(5))
        assert chosen == choose_listed([-1, 3, 0, -1], 6, keyed(seed))
        reached |= set(chosen)
    assert reached == set(range(5))
    assert choose_listed([-1] * 5, 6, keyed(0)) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 9], r"found \[0, 9\]; allowed: different ones from 0 to 8, or -1"),
        ([1, 1], r"found \[1, 1\]; allowed: different ones"),
        ([-2], r"found \[-2\]; allowed: different ones"),
        ([-1] * 10, "found 10 of 10; allowed: at most 9"),
    ],
)
def test_a_list_that_cannot_be_trained_is_refused(indices: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_listed(indices, 10, keyed(0))


def test_a_progressive_window_moves_by_its_stride_and_rolls_back() -> None:
    """MixGRPO's recipe: 25 steps, a window of 4, moved by 1 every 25 training steps."""
    choose = functools.partial(choose_window, Window(4), 25)
    assert choose(0) == choose(24) == (0, 1, 2, 3)
    assert choose(25) == (1, 2, 3, 4)
    last = 25 * 20
    assert choose(last) == choose(last + 24) == (20, 21, 22, 23)
    assert choose(last + 25) == (0, 1, 2, 3)
    staying = Window(4, roll_back=False)
    assert choose_window(staying, 25, last + 25) == choose_window(staying, 25, 10**6) == (20, 21, 22, 23)


def test_a_window_keeps_within_its_bounds() -> None:
    window = Window(2, interval=1, stride=2, first=1, end=6)
    assert [choose_window(window, 10, step)[0] for step in range(5)] == [1, 3, 1, 3, 1]
    assert list(Window(2, end=99).starts(5)) == [0, 1, 2]
    for impossible in (Window(10), Window(2, first=3, end=4), Window(0)):
        with pytest.raises(ValueError, match="found a window of"):
            choose_window(impossible, 10, 0)


def test_a_decaying_window_stays_ever_shorter() -> None:
    window = Window(2, "decay", interval=10, least_interval=1, stride=3)
    assert list(window.starts(13)) == [0, 3, 6, 9]
    assert window.intervals(13) == [10, 7, 4, 1]
    starts = [choose_window(window, 13, step)[0] for step in range(23)]
    assert starts == [0] * 10 + [3] * 7 + [6] * 4 + [9] + [0]
    assert Window(12, "decay", interval=10).intervals(13) == [10]


def test_an_exponentially_decaying_window_stays_for_the_published_times() -> None:
    """``ceil(25 exp(-0.1 max(start - 13, 0)))``."""
    window = Window(4, "exp_decay")
    assert window.intervals(25) == [25] * 14 + [23, 21, 19, 17, 16, 14, 13]
    assert choose_window(window, 25, 25 * 14 - 1)[0] == 13
    assert choose_window(window, 25, 25 * 14)[0] == 14
    assert choose_window(window, 25, 25 * 14 + 23)[0] == 15


def test_a_random_window_is_drawn_from_its_bounds_by_its_key_alone() -> None:
    """Flow-GRPO-Fast: three steps in the first half of ten."""
    window = Window(3, "random", end=5)
    found = [choose_window(window, 10, 7, keyed(seed)) for seed in range(60)]
    assert set(found) == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}
    assert found[5] == choose_window(window, 10, 99, keyed(5))
    with pytest.raises(ValueError, match="needs a generator"):
        choose_window(window, 10, 7)


@pytest.mark.parametrize("outside", [euler, dpm2])
def test_outside_of_the_trained_steps_another_kernel_runs(outside: Kernel) -> None:
    kernel = build_kernel("flow", noise_level=0.7, deterministic=False)
    composed = with_noise_only_at(kernel, (1, 2), outside)
    for index in range(4):
        expected = kernel if index in (1, 2) else outside
        assert composed(index, HARD) == expected(index, HARD)


def test_steps_without_noise_are_split_off() -> None:
    kernel = build_kernel("cps", noise_level=0.8, deterministic=False)
    assert split_trainable((0, 2, 3), kernel, HARD) == ((0, 2), (3,))
    grid, bounded = build_churn("2ab", karras_sigmas(11), Churn(least=0.05, most=50.0))
    # a step is noisy where the next sigma is within the bounds: 33 is the first, 0.07 the last
    assert split_trainable(range(11), bounded, grid.tolist()) == (tuple(range(2, 9)), (0, 1, 9, 10))
