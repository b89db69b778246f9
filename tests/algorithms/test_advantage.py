"""Advantages and what DiffusionNFT makes of them, against hand-computed values, NumPy and properties."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cosmos_rl.algorithms.advantage import (
    all_equal,
    apply_mode,
    combine_advantages,
    gdpo_advantages,
    group_advantages,
    keep_largest,
    mean_group_std,
    measure_nearest,
    optimality,
    scale_by_diversity,
    select_rows,
    zero_std_share,
)

NAN = float("nan")
properties = settings(derandomize=True, max_examples=60, deadline=None)


def rewards(*values: float | None) -> Tensor:
    return torch.tensor([NAN if value is None else value for value in values], dtype=torch.float64)


def groups(*ids: int) -> Tensor:
    return torch.tensor(ids)


def reference(reward: np.ndarray, group: np.ndarray, global_std: bool, eps: float) -> np.ndarray:
    found = np.full(len(reward), np.nan)
    for key in np.unique(group):
        rows = (group == key) & ~np.isnan(reward)
        if not rows.any():
            continue
        std = np.std(reward[~np.isnan(reward)]) if global_std else np.std(reward[rows])
        found[rows] = (reward[rows] - np.mean(reward[rows])) / (std + eps)
    return found


@pytest.mark.parametrize("global_std", [True, False])
def test_one_group_has_the_golden_advantages(global_std: bool) -> None:
    found = group_advantages(rewards(0.2, 0.4, 0.9, 0.5), groups(3, 3, 3, 3), global_std=global_std)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([-1.176236, -0.392078, 1.568314, 0.0], abs=1e-6)


def test_global_and_group_std_by_hand() -> None:
    reward, group = rewards(1, 10, 3, 30), groups(7, 2, 7, 2)  # means 2 and 20
    own = group_advantages(reward, group, global_std=False)
    assert own.tolist() == pytest.approx([-1 / 1.0001, -10 / 10.0001, 1 / 1.0001, 10 / 10.0001], abs=1e-6)
    std = (sum((value - 11) ** 2 for value in (1, 10, 3, 30)) / 4) ** 0.5  # about the mean of all, 11
    shared = group_advantages(reward, group, global_std=True)
    assert shared.tolist() == pytest.approx([v / (std + 1e-4) for v in (-1, -10, 1, 10)], abs=1e-6)


def test_the_mean_std_of_groups_by_hand() -> None:
    reward, group = rewards(1, 10, 3, 30, None, None), groups(7, 2, 7, 2, 7, 5)
    assert mean_group_std(reward, group) == pytest.approx((1 + 10) / 2)  # the group without a reward is left out
    assert mean_group_std(rewards(4, 4, 4), groups(0, 0, 1)) == 0


@pytest.mark.parametrize("global_std", [True, False])
def test_a_missing_reward_leaves_the_others_as_if_it_were_not_there(global_std: bool) -> None:
    reward, group = rewards(0.2, None, 0.4, 0.6, 5.0, 7.0), groups(0, 0, 0, 0, 1, 1)
    found = group_advantages(reward, group, global_std=global_std)
    there = [0, 2, 3, 4, 5]
    assert found[1].isnan()
    assert torch.equal(found[there], group_advantages(reward[there], group[there], global_std=global_std))


@pytest.mark.parametrize("global_std", [True, False])
def test_groups_without_contrast(global_std: bool) -> None:
    reward = rewards(0.1, 0.1, 0.1, None, None, 3.0, None, 9.0)
    found = group_advantages(reward, groups(0, 0, 0, 1, 1, 2, 2, 3), global_std=global_std)
    assert found.tolist() == pytest.approx([0, 0, 0, NAN, NAN, 0, NAN, 0], abs=0, nan_ok=True)
    nothing = group_advantages(rewards(None, None), groups(0, 1), global_std=global_std)
    assert nothing.isnan().all()
    assert group_advantages(rewards(), groups(), global_std=global_std).shape == (0,)


def test_an_infinite_reward_counts_as_missing() -> None:
    found = group_advantages(rewards(1.0, float("inf"), 3.0), groups(0, 0, 0), global_std=True)
    assert found.tolist() == pytest.approx([-1 / 1.0001, NAN, 1 / 1.0001], nan_ok=True)


def test_rewards_and_groups_must_be_of_one_length() -> None:
    with pytest.raises(ValueError, match=r"rewards \[2\] and groups \[3\]; allowed: both \[N\]"):
        group_advantages(rewards(1, 2), groups(0, 0, 0), global_std=True)
    with pytest.raises(ValueError, match=r"rewards \[1, 2\]"):
        group_advantages(rewards(1, 2)[None], groups(0, 0)[None], global_std=True)


@st.composite
def steps(draw: Any, missing: bool = True) -> tuple[Tensor, Tensor]:
    size = draw(st.integers(1, 12))
    value = st.integers(-50, 50).map(lambda n: n / 10)
    value = st.one_of(value, st.just(NAN)) if missing else value
    reward = draw(st.lists(value, min_size=size, max_size=size))
    group = draw(st.lists(st.integers(-2, 3), min_size=size, max_size=size))
    return torch.tensor(reward, dtype=torch.float64), torch.tensor(group)


@properties
@given(steps(), st.booleans(), st.sampled_from([1e-4, 1e-2]))
def test_advantages_equal_a_loop_over_groups(step: tuple[Tensor, Tensor], global_std: bool, eps: float) -> None:
    found = group_advantages(*step, global_std=global_std, eps=eps)
    expected = reference(step[0].numpy(), step[1].numpy(), global_std, eps)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)  # order of summation, over eps


@properties
@given(steps(), st.booleans(), st.floats(-1000, 1000))
def test_advantages_do_not_change_with_a_shift(step: tuple[Tensor, Tensor], global_std: bool, shift: float) -> None:
    found = [group_advantages(step[0] + by, step[1], global_std=global_std) for by in (0.0, shift)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-8, equal_nan=True)  # rounding of 1000, over eps


@properties
@given(steps(), st.booleans(), st.randoms(use_true_random=False))
def test_advantages_follow_their_rows(step: tuple[Tensor, Tensor], global_std: bool, random: Any) -> None:
    order = list(range(len(step[0])))
    random.shuffle(order)
    whole = group_advantages(*step, global_std=global_std)
    shuffled = group_advantages(step[0][order], step[1][order], global_std=global_std)
    torch.testing.assert_close(shuffled, whole[order], rtol=1e-9, atol=1e-9, equal_nan=True)


@properties
@given(steps(), st.booleans(), st.floats(1, 1000))
def test_advantages_do_not_change_with_a_scale(step: tuple[Tensor, Tensor], global_std: bool, scale: float) -> None:
    found = [group_advantages(step[0] * by, step[1], global_std=global_std) for by in (1.0, scale)]
    # eps weighs less after scaling: at most eps over the smallest deviation of these rewards, 0.1 sqrt(11) / 12
    torch.testing.assert_close(found[0], found[1], rtol=1e-4 / 0.0276, atol=1e-9, equal_nan=True)


@properties
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8), st.booleans())
def test_advantages_are_finite_for_all_finite_rewards(values: list[float], global_std: bool) -> None:
    group = torch.arange(len(values)) // 3
    assert group_advantages(torch.tensor(values), group, global_std=global_std).isfinite().all()


@properties
@given(steps(missing=False))
def test_the_advantages_of_a_group_add_up_to_0(step: tuple[Tensor, Tensor]) -> None:
    found = group_advantages(*step, global_std=False)
    for key in step[1].unique():
        assert float(found[step[1] == key].sum()) == pytest.approx(0.0, abs=1e-9)


def test_combined_rewards_are_normalised_each() -> None:
    group = groups(0, 0, 1, 1)
    scores = {
        "small": rewards(0.001, 0.003, 0.005, 0.001),
        "large": rewards(100, 50, 70, 70),
        "off": rewards(*[None] * 4),
    }
    found = combine_advantages(scores, {"small": 2.0, "large": 0.5, "off": 0.0}, group, global_std=False)
    small = [value / (0.001 + 1e-4) for value in (-0.001, 0.001)] + [v / (0.002 + 1e-4) for v in (0.002, -0.002)]
    large = [25 / 25.0001, -25 / 25.0001, 0.0, 0.0]
    assert found.tolist() == pytest.approx([2 * s + 0.5 * g for s, g in zip(small, large, strict=True)], rel=1e-9)


@pytest.mark.parametrize("global_std", [True, False])
def test_a_sample_that_lacks_one_reward_is_left_out_of_all(global_std: bool) -> None:
    group = groups(0, 0, 0)
    scores = {"a": rewards(1, 2, 4), "b": rewards(3, None, 5)}
    found = combine_advantages(scores, {"a": 1.0, "b": 1.0}, group, global_std=global_std)
    there = {name: score[[0, 2]] for name, score in scores.items()}
    expected = combine_advantages(there, {"a": 1.0, "b": 1.0}, group[[0, 2]], global_std=global_std)
    assert found[1].isnan()
    assert torch.equal(found[[0, 2]], expected)


def test_a_weight_without_a_reward_is_an_error() -> None:
    for weights in ({"a": 1.0, "x": 1.0}, {"a": 0.0}, {}):
        with pytest.raises(ValueError, match=r"rewards given: \['a'\]"):
            combine_advantages({"a": rewards(1, 2)}, weights, groups(0, 0), global_std=True)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [-7.0, -0.5, 0.0, 0.5, 7.0]),
        ("positive_only", [0.0, 0.0, 0.0, 0.5, 7.0]),
        ("negative_only", [-7.0, -0.5, 0.0, 0.0, 0.0]),
        ("one_only", [0.0, 0.0, 0.0, 1.0, 1.0]),
        ("binary", [-1.0, -1.0, 0.0, 1.0, 1.0]),
    ],
)
def test_modes(mode: Any, expected: list[float]) -> None:
    found = apply_mode(rewards(-7.0, -0.5, 0.0, 0.5, 7.0, None), mode)
    assert found.tolist() == pytest.approx([*expected, NAN], abs=0, nan_ok=True)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r'advantage mode: found "none"; allowed: all, positive_only'):
        apply_mode(rewards(1.0), cast(Any, "none"))


def test_optimality_table() -> None:
    advantage = rewards(0.0, 5.0, -5.0, 9.0, -9.0, 2.0, -1.0, None)
    expected = [0.5, 1.0, 0.0, 1.0, 0.0, 0.7, 0.4, NAN]
    assert optimality(advantage, -5.0, 5.0).tolist() == pytest.approx(expected, abs=0, nan_ok=True)
    assert optimality(advantage, -1.0, 2.0)[:4].tolist() == [0.5, 1.0, 0.25, 1.0]
    assert optimality(advantage, -9.0, 3.0)[2] == 0.0  # beyond -high
    for low, high in ((-5.0, 0.0), (5.0, 5.0)):
        with pytest.raises(ValueError, match=r"allowed: low < high and high > 0"):
            optimality(advantage, low, high)


def test_share_of_groups_that_teach_nothing() -> None:
    reward = rewards(0.1, 0.1, 0.1, 1.0, 2.0, 4.0, None, None, 5.0, None)
    # equal; differs; one reward; none; the last two rows are one more group with one reward
    group = groups(0, 0, 0, 1, 1, 2, 2, 3, 4, 4)
    assert zero_std_share(group_advantages(reward, group, global_std=True), group) == 0.75
    assert zero_std_share(rewards(None), groups(0)) == 0.0


# ---- rounding ------------------------------------------------------------------------------------------------------

TIES = {
    "sums in another order": [0.3] * 12 + [0.1 + 0.2] * 12,
    "float32": torch.nextafter(torch.full((24,), 0.7), torch.arange(24.0)).tolist(),
    "in the thousands": [4096.0] * 12 + [4096.0 + 2.0**-12] * 12,  # float32 has 2^-11 there
}


@pytest.mark.parametrize("mode", ["all", "positive_only", "negative_only", "one_only", "binary"])
@pytest.mark.parametrize("name", TIES)
@pytest.mark.parametrize("global_std", [True, False])
def test_rewards_that_are_equal_but_for_rounding_teach_nothing(name: str, mode: Any, global_std: bool) -> None:
    reward, group = rewards(*TIES[name], 1.0, 2.0), groups(*[0] * 24, 1, 1)
    assert len(set(TIES[name])) > 1
    used = apply_mode(group_advantages(reward, group, global_std=global_std), mode)
    assert used[:24].tolist() == [0.0] * 24
    assert optimality(used, -5.0, 5.0)[:24].tolist() == [0.5] * 24
    assert zero_std_share(used, group) == 0.5
    kept = select_rows(used, group, whole_groups=False, drop_equal_groups=True)
    assert kept.tolist() == [False] * 24 + [True] * 2


def test_a_reward_at_the_mean_of_its_group_has_no_sign() -> None:
    found = group_advantages(rewards(0.1, 0.3, 0.1 + 0.2, 0.5), groups(0, 0, 0, 0), global_std=True)
    assert apply_mode(found, "binary").tolist() == [-1.0, 0.0, 0.0, 1.0]


def test_small_differences_between_large_rewards_still_count() -> None:
    found = group_advantages(rewards(1000.0, 1000.1, 1000.2), groups(0, 0, 0), global_std=True)
    assert found.tolist() == pytest.approx([-1.2231, 0.0, 1.2231], abs=1e-3)


def test_what_cancels_but_for_rounding_is_nothing() -> None:
    """A reward less the same reward: what is left has the size of the terms' rounding, not of the sum."""
    second = [0.3, 0.7, 0.9]
    first = np.array(second, dtype=np.float32).tolist()
    left = rewards(*(a - b for a, b in zip(first, second, strict=True)))
    assert left.unique().numel() == 3
    group, size = groups(0, 0, 0), 2 * rewards(*second)
    assert group_advantages(left, group, global_std=True, size_N=size).tolist() == [0.0] * 3
    both = {"a": rewards(*first), "b": rewards(*second)}
    assert combine_advantages(both, {"a": 1.0, "b": -1.0}, group, global_std=True).tolist() == [0.0] * 3


def test_equal_values() -> None:
    assert all_equal(rewards(0.3, 0.1 + 0.2, None))
    assert all_equal(rewards())
    assert all_equal(rewards(0.0, 0.0))
    assert not all_equal(rewards(0.3, 0.3001))
    assert not all_equal(rewards(0.0, 1e-9))


@pytest.mark.parametrize(
    ("whole_groups", "drop_equal_groups", "expected"),
    [
        (False, False, [1, 1, 1, 0, 1, 1, 0]),
        (False, True, [1, 1, 1, 0, 0, 0, 0]),
        (True, False, [1, 1, 0, 0, 1, 1, 0]),
        (True, True, [1, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_rows_that_are_trained_on(whole_groups: bool, drop_equal_groups: bool, expected: list[int]) -> None:
    group = groups(0, 0, 1, 1, 2, 2, 3)
    reward = rewards(1, 2, 1, None, 0.3, 0.3, None)
    if drop_equal_groups:  # give the group with a hole a contrast
        group, reward = torch.cat([group, groups(1)]), torch.cat([reward, rewards(2)])
        expected = [*expected, int(not whole_groups)]
    advantage = group_advantages(reward, group, global_std=True)
    kept = select_rows(advantage, group, whole_groups=whole_groups, drop_equal_groups=drop_equal_groups)
    assert kept.tolist() == [bool(row) for row in expected]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 0.01])
def test_the_share_with_the_largest_advantages_of_either_sign(share: float) -> None:
    rng = np.random.default_rng(1)
    advantage = rng.normal(size=20)
    advantage[[3, 7]] = np.nan
    kept = np.isfinite(advantage)
    kept[5] = False  # left out by another rule, however large
    advantage[5] = 100.0
    found = keep_largest(torch.from_numpy(advantage), torch.from_numpy(kept), share)
    count = max(round(share * 17), 1)
    expected = sorted(np.flatnonzero(kept), key=lambda i: -abs(advantage[i]))[:count]
    assert sorted(torch.nonzero(found).flatten().tolist()) == sorted(expected)


def test_half_of_normal_advantages_have_most_of_their_squares() -> None:
    """Beyond the quartile q lie 2 (q phi(q) + 1/4) = 0.93 of the squares and phi(q) / phi(0) = 0.80 of the sizes."""
    advantage = torch.special.ndtri((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)
    half = keep_largest(advantage, torch.ones(20_000, dtype=torch.bool), 0.5)
    assert float((advantage[half] ** 2).sum() / (advantage**2).sum()) == pytest.approx(0.9287, abs=2e-3)
    assert float(advantage[half].abs().sum() / advantage.abs().sum()) == pytest.approx(0.7966, abs=2e-3)


def test_of_equal_advantages_the_first_are_kept() -> None:
    kept = torch.tensor([True, False, True, True, True])
    found = keep_largest(torch.tensor([1.0, 1.0, -1.0, 0.0, 1.0]), kept, 0.5)
    assert found.tolist() == [True, False, True, False, False]
    assert not keep_largest(torch.zeros(5), torch.zeros(5, dtype=torch.bool), 0.5).any()


def test_gdpo_equals_an_independent_computation() -> None:
    rng = np.random.default_rng(0)
    group = np.repeat([3, 1, 8], 4)
    rewards = {"small": rng.normal(size=12) * 1e-3, "large": rng.normal(size=12) * 50 + 7, "off": rng.normal(size=12)}
    weights = {"small": 1.0, "large": 0.5, "off": 0.0}
    added = np.zeros(12)
    for name in ("small", "large"):
        for one in set(group):
            value = rewards[name][group == one]
            added[group == one] += weights[name] * (value - value.mean()) / (value.std() + 1e-4)
    given = {name: torch.from_numpy(value) for name, value in rewards.items()}
    found = gdpo_advantages(given, weights, torch.from_numpy(group))
    np.testing.assert_allclose(found, (added - added.mean()) / (added.std() + 1e-4), rtol=1e-9)


def test_gdpo_leaves_out_what_is_missing_and_keeps_zeros() -> None:
    rewards = {"a": torch.tensor([1.0, 2.0, 3.0, 3.0, torch.nan]), "b": torch.tensor([0.0, 1.0, 2.0, 2.0, 1.0])}
    found = gdpo_advantages(rewards, {"a": 1.0, "b": 1.0}, torch.tensor([0, 0, 1, 1, 1]))
    assert found[2:4].tolist() == [0.0, 0.0]
    assert bool(found[4].isnan())
    assert found[:2].tolist() == pytest.approx([-(2**0.5), 2**0.5], rel=1e-3)
    nothing = gdpo_advantages({"a": torch.full((2,), torch.nan)}, {"a": 1.0}, torch.zeros(2))
    assert bool(nothing.isnan().all())


def test_the_golden_diversity_counts_a_good_sample_by_how_far_it_is_from_the_others() -> None:
    features = torch.tensor([[1.0, 0, 0], [0.8, 0.6, 0], [0, 1, 0], [0, 0, 1]])
    reward, group = torch.tensor([0.9, 0.8, 0.2, 0.1], dtype=torch.float64), torch.zeros(4)
    nearest = measure_nearest(7 * features, group)
    assert nearest.tolist() == pytest.approx([0.2, 0.2, 0.4, 1.0], abs=1e-6)
    paper = np.array([0.177778, 0.133333, -0.3, -0.4])
    found = scale_by_diversity(reward, nearest, group)
    np.testing.assert_allclose(found, paper - paper.mean(), atol=1e-6)
    assert paper.mean() == pytest.approx(-0.0972, abs=1e-4)


def test_diversity_is_that_of_the_group_alone() -> None:
    features = torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 0], [1, 1]])
    group = torch.tensor([0, 0, 1, 1, 2])
    assert measure_nearest(features, group).tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0, 0.0], abs=1e-12)
    reward = torch.tensor([1.0, 0.0, 1.0, 0.0, torch.nan])
    found = scale_by_diversity(reward, measure_nearest(features, group), group)
    assert found[:4].tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5])  # equal samples count alike
    assert bool(found[4].isnan())


def test_centring_leaves_no_rounding_that_a_mode_would_make_something_of() -> None:
    reward, group = torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3)
    found = scale_by_diversity(reward.double(), torch.full((3,), 0.3), group)
    assert apply_mode(found, "binary").tolist() == [-1.0, 0.0, 1.0]
    assert apply_mode(scale_by_diversity(reward, torch.full((3,), 0.3), group), "one_only").tolist() == [0.0, 0.0, 1.0]


def test_equal_features_have_no_distance() -> None:
    features = torch.tensor([[0.1, 0.7, 0.3]]).repeat(4, 1) * torch.tensor([[1.0], [3.0], [7.0], [0.3]])
    assert measure_nearest(features.double(), torch.zeros(4)).max() < 1e-12
    assert measure_nearest(torch.tensor([[0.1, 0.7, 0.3]] * 4), torch.zeros(4)).tolist() == [0.0] * 4
