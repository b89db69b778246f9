"""The rules of the guard on made-up numbers: how often they alarm at nothing, and that they see what is wrong."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.algorithms.paired import PairedChange, compare_pairs, equivalent_normal_deviate
from cosmos_rl.policy.config import RewardHackingGuardConfig
from cosmos_rl.policy.config.plan import GUARD_SIGMAS
from cosmos_rl.policy.trainer.rl.guard_rules import (
    Measurement,
    UntrainedRewards,
    compare_measurements,
    compute_norm_metrics,
)

Drawn = Callable[[np.random.Generator, int], np.ndarray]
STEPS = 200
CONFIG = RewardHackingGuardConfig()
LOOKS = STEPS // CONFIG.freq
WANDER = 0.1
"""Standard deviation of the logarithms of loss and diversity from look to look; of an adapter that learns from rewards
of pure chance it was 0.0001 in runs of the tiny model."""


def tensor(*values: float | None) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


# ---- paired changes ------------------------------------------------------------------------------------------------


def change(first: Tensor, later: Tensor) -> PairedChange:
    found = compare_pairs(first, later)
    assert found is not None
    return found


def test_a_paired_change_by_hand() -> None:
    found = change(tensor(1, 2, 3, 4), tensor(0, 2, 2, 2))  # -1, 0, -1, -2
    assert found.mean == -1.0
    assert found.std == pytest.approx(math.sqrt(5 / 3))
    assert found.drop == pytest.approx(1 / math.sqrt(5 / 3))
    error = float(np.std([-1, 0, -1, -2, 0], ddof=1)) / math.sqrt(5)  # with one pair more that did not change
    assert found.sigmas == pytest.approx(equivalent_normal_deviate(-0.8 / error, 4))


@pytest.mark.parametrize(
    ("free", "t", "normal"),
    [(3, 5.841, 2.576), (7, 4.785, 3.090), (7, 5.408, 3.291), (15, 4.073, 3.291), (60, 3.232, 3.090)],
)
def test_the_tail_of_students_t(free: int, t: float, normal: float) -> None:
    """Tabulated quantiles of Student's t and of the normal distribution with the same tail."""
    assert equivalent_normal_deviate(t, free) == pytest.approx(normal, rel=0.02)
    assert equivalent_normal_deviate(-t, free) == -equivalent_normal_deviate(t, free)


@pytest.mark.parametrize("seed", range(4))
def test_another_zero_and_another_unit_change_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = torch.from_numpy(rng.normal(0.02, 1.0, 40))
    later = first + torch.from_numpy(rng.normal(-1.0, 0.5, 40))
    known = change(first, later)
    assert known.has_fallen(0.3, 4.0)
    for scale, shift in ((1.0, 10.0), (3.0, 0.0), (1e-6, 0.0), (1e6, -4.0)):
        found = change(scale * first + shift, scale * later + shift)
        assert (found.drop, found.sigmas) == pytest.approx((known.drop, known.sigmas), rel=1e-6)
        assert found.has_fallen(0.3, 4.0)


def test_missing_scores_are_left_out_and_too_few_say_nothing() -> None:
    found = change(tensor(1, 2, None, 4, 5), tensor(0, 1, 9, None, 4))
    assert found.mean == -1.0
    assert compare_pairs(tensor(1, 2, 3, 4), tensor(None, 1, None, None)) is None
    assert compare_pairs(tensor(1, 2, 3, 4, 5), tensor(1, 2, None, None, None)) is None
    assert compare_pairs(tensor(), tensor()) is None


def test_rounding_is_no_change_and_a_fall_of_all_equal_scores_is_one() -> None:
    assert change(tensor(0.3, 0.3, 0.3), tensor(0.1 + 0.2 - 1e-9, 0.3, 0.3)) == PairedChange(0.0, 0.0, 0.0)
    ones = torch.ones(8)
    assert not change(ones, ones).has_fallen(0.0, 0.0)
    assert change(ones, 0.1 * ones).has_fallen(0.3, 4.0)
    assert not change(ones[:7], 0.1 * ones[:7]).has_fallen(0.3, 4.0)  # too few to be sure of anything
    assert not change(ones[:1], 0.1 * ones[:1]).has_fallen(0.3, 4.0)
    assert not change(ones, 2 * ones).has_fallen(0.3, 4.0)


# ---- alarms at nothing ---------------------------------------------------------------------------------------------


def alarming_runs(drawn: Drawn, samples: int, *, runs: int, kept: float, looks: int = LOOKS, seed: int = 0) -> int:
    """Of so many runs, those in which the rule alarms although the distribution of the scores stays the same.

    The policy moves all the time, so a sample's score is drawn again at each look with the share ``1 - kept`` of its
    variance; 0: every look is independent of the first.
    """
    rng, alarms = np.random.default_rng(seed), 0
    for _ in range(runs):
        prompts, rule = drawn(rng, samples), UntrainedRewards(CONFIG)
        for look in range(looks + 1):
            scores = math.sqrt(kept) * prompts + math.sqrt(1 - kept) * drawn(rng, samples)
            rule.note(look * CONFIG.freq, {"side": torch.from_numpy(scores)}, "the same")
            if rule.check()[1]:
                alarms += 1
                break
    return alarms


def binary(share: float) -> Drawn:
    return lambda rng, count: (rng.random(count) < share).astype(float)


KINDS: dict[str, Drawn] = {
    "normal, mean 0.1": lambda rng, count: rng.normal(0.1, 1.0, count),
    "binary, 0.67": binary(0.67),
    "binary, 0.05": binary(0.05),
    "skewed": lambda rng, count: rng.lognormal(0.0, 1.0, count),
    "heavy tails": lambda rng, count: rng.standard_t(3, count),
}


@pytest.mark.parametrize("samples", [4, 24])
@pytest.mark.parametrize("name", KINDS)
def test_untrained_rewards_that_do_not_change_give_no_alarm(name: str, samples: int) -> None:
    """At worst, when all looks are independent, 0 to 3 of 1,000 runs of 2 to 256 samples alarm."""
    assert alarming_runs(KINDS[name], samples, runs=40, kept=0.0) <= 1


def look(diversity: float = 0.3, loss: float = 1.0, norm: float = 1.0) -> Measurement:
    return Measurement(loss, torch.full((32, len(GUARD_SIGMAS)), norm, dtype=torch.float64), diversity)


def test_an_unchanged_policy_never_alarms_and_a_moving_one_hardly() -> None:
    """Same points, same noise: nothing is left to chance but what the policy does. Here loss and diversity wander by a
    tenth from look to look, and alarms stay below 1 % of the runs."""
    start = look()
    assert compare_measurements(CONFIG, start, start)[1] == []
    wander = np.exp(0.1 * np.random.default_rng(0).normal(size=(2, 300, LOOKS)))
    worst = zip(0.3 * wander[0].min(1), wander[1].max(1), strict=True)  # of each run
    assert sum(bool(compare_measurements(CONFIG, start, look(*one))[1]) for one in worst) <= 3


@pytest.mark.slow
def test_all_rules_together_alarm_in_less_than_one_of_a_hundred_unchanged_runs() -> None:
    """200 steps, a look at every fifth, of a policy that is on the average what it was.

    It moves, so that loss and diversity are other ones at each look, and half of each sample's scores is drawn again
    while the noise is the same: two rewards that are not trained on, one like ImageReward and one of 0 and 1.
    """
    rng, runs, samples, alarms = np.random.default_rng(0), 200, 32, 0
    side = [KINDS[name] for name in ("normal, mean 0.1", "binary, 0.67")]

    def scores(prompts: Sequence[np.ndarray]) -> dict[str, Tensor]:
        again = [math.sqrt(0.5) * (kept + drawn(rng, samples)) for kept, drawn in zip(prompts, side, strict=True)]
        return {str(number): torch.from_numpy(score) for number, score in enumerate(again)}

    for _ in range(runs):
        loss, diversity = np.exp(rng.normal(0.0, WANDER, (2, LOOKS)))
        worst = look(0.3 * diversity.min(), loss.max())
        found = compare_measurements(CONFIG, look(), worst)[1]
        prompts, rule = [drawn(rng, samples) for drawn in side], UntrainedRewards(CONFIG)
        for number in range(LOOKS + 1):
            rule.note(number * CONFIG.freq, scores(prompts), "the same")
            found += rule.check()[1]
        alarms += bool(found)
    assert alarms <= runs // 100


# ---- what is wrong is seen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "fall", "seen"), [(16, 1.0, True), (64, 0.5, True), (64, 0.2, False), (1024, 0.35, True)]
)
def test_a_fall_in_standard_deviations_is_found(samples: int, fall: float, seen: bool) -> None:
    rng = np.random.default_rng(1)
    first = rng.normal(0.0, 1.0, samples)
    first = 2.0 * (first - first.mean()) / first.std() - 3.0
    rule = UntrainedRewards(CONFIG)
    assert rule.note(0, {"side": torch.from_numpy(first)}, "one") == 0
    later = first + 2.0 * (rng.normal(-fall, 0.1, samples))
    assert rule.note(5, {"side": torch.from_numpy(later)}, "one") == (0 if seen else 5)
    metrics, wrong = rule.check()
    assert metrics["guard/untrained_drop/side"] == pytest.approx(fall, abs=0.1)
    assert bool(wrong) == seen
    assert all("the reward side, which is not trained on, fell from -" in text for text in wrong)


def test_numbers_near_zero_are_no_alarm() -> None:
    """0.02 -> 0.01, -0.01 -> -0.02, 0 -> -1e-9 where scores differ by about 1: shares of the mean said nothing."""
    rng = np.random.default_rng(2)
    noise = rng.normal(0, 1, 64)
    noise -= noise.mean()
    for first, later in ((0.02, 0.01), (-0.01, -0.02), (0.0, -1e-9)):
        rule = UntrainedRewards(CONFIG)
        rule.note(0, {"side": torch.from_numpy(first + noise)}, "one")
        rule.note(5, {"side": torch.from_numpy(later + noise)}, "one")
        assert rule.check()[1] == []


def test_a_reward_that_is_missing_is_neither_good_nor_an_alarm() -> None:
    rule, scores = UntrainedRewards(CONFIG), tensor(*range(12))
    assert rule.note(0, {"side": scores}, "one") == 0
    assert rule.note(5, {"side": scores}, "one") == 5
    assert rule.note(10, {"side": scores * math.nan}, "one") == 5
    assert rule.check()[1] == []
    assert math.isnan(rule.check()[0]["guard/untrained_reward/side"])
    assert rule.note(15, {"side": scores}, "one") == 15
    late = UntrainedRewards(CONFIG)  # what was missing at first is compared from when it is there
    assert late.note(5, {"side": scores * math.nan, "other": scores}, "one") == 0
    assert late.note(10, {"side": scores, "other": scores}, "one") == 10
    assert late.note(15, {"side": scores - 9, "other": scores}, "one") == 10


def test_one_validation_sample_gives_no_warning() -> None:
    rule = UntrainedRewards(CONFIG)
    assert [rule.note(step, {"side": tensor(value)}, "one") for step, value in ((0, 1.0), (5, -9.0))] == [0, 5]
    assert rule.check() == ({"guard/untrained_reward/side": -9.0}, [])  # with a std of 0 the drop has no size


def test_what_a_resumed_run_continues_from_and_another_validation(capsys: pytest.CaptureFixture[str]) -> None:
    rule, scores = UntrainedRewards(CONFIG), tensor(None, *range(12))
    rule.note(5, {"side": scores}, "one")
    rule.note(10, {"side": scores - 9}, "one")
    resumed = UntrainedRewards(CONFIG)
    resumed.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert resumed.check() == rule.check()
    assert len(rule.check()[1]) == 1
    assert resumed.state_dict() == rule.state_dict()
    assert resumed.note(15, {"side": scores - 9}, "one") == 5
    assert "are compared with their scores of step" not in capsys.readouterr().out
    assert resumed.note(20, {"side": scores - 9}, "other prompts") == 20
    assert resumed.check()[1] == []
    assert "are compared with their scores of step 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("now", "text"),
    [
        (look(loss=3.1), "loss is 3.1 times that of the start (reward_hacking_guard.max_loss_ratio = 3)"),
        (look(loss=math.nan), "loss is nan times that of the start"),
        (
            look(diversity=0.14),
            "differ only 0.467 times as much as at the start (reward_hacking_guard.min_diversity_ratio = 0.5)",
        ),
        (look(diversity=math.nan), "differ only nan times"),
    ],
)
def test_the_ratios_that_alarm(now: Measurement, text: str) -> None:
    wrong = compare_measurements(CONFIG, look(), now)[1]
    assert len(wrong) == 1
    assert text in wrong[0]


def test_norms_by_quarter_of_the_sigmas() -> None:
    """Against NumPy; NaN rows are those that only fill up."""
    rng = np.random.default_rng(3)
    ratio, sigma = rng.lognormal(0, 0.2, 400), np.concatenate([rng.uniform(0, 0.5, 399), [1.0]])
    ratio[5] = math.nan
    found = compute_norm_metrics("train", torch.from_numpy(ratio), torch.from_numpy(sigma))
    expected: dict[str, Any] = {}
    for low, level in ((0.0, "0.125"), (0.25, "0.375")):
        there = ratio[(sigma >= low) & (sigma < low + 0.25) & ~np.isnan(ratio)]
        expected[f"train/velocity_norm_ratio/{level}"] = np.quantile(there, 0.5)
        expected[f"train/velocity_norm_ratio_p90/{level}"] = np.quantile(there, 0.9)
    expected["train/velocity_norm_ratio/0.875"] = expected["train/velocity_norm_ratio_p90/0.875"] = ratio[-1]
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected)


def test_norms_are_compared_row_by_row() -> None:
    start, rows = look(), torch.linspace(0.5, 2.0, 32, dtype=torch.float64)[:, None] * torch.ones(len(GUARD_SIGMAS))
    start = Measurement(start.loss, rows, start.diversity)
    metrics, _ = compare_measurements(CONFIG, start, Measurement(start.loss, 1.1 * rows, start.diversity))
    norms = {key: value for key, value in metrics.items() if "norm" in key}
    assert len(norms) == 2 * len(GUARD_SIGMAS)
    assert norms == pytest.approx(dict.fromkeys(norms, 1.1))
