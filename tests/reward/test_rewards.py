"""How scores are added up, which rewards a configuration means, and what is said about them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl.errors import UserError
from cosmos_rl.reward import examples
from cosmos_rl.reward.build import make_rewards
from cosmos_rl.reward.combine import Reward, RewardSum, Scores, combine, total
from cosmos_rl.reward.monitor import ScoreMonitor
from tests.support.scored import config, score

# ---- the sum ---------------------------------------------------------------------------------------------------------

FINITE = st.floats(-20, 20)
SCORE = st.one_of(FINITE, st.sampled_from([np.nan, np.inf, -np.inf]))


@st.composite
def sums_and_scores(draw: Any) -> tuple[list[RewardSum], dict[str, np.ndarray]]:
    count = draw(st.integers(1, 6))
    sums, scores = [], {}
    for place in range(draw(st.integers(1, 2))):
        rewards = []
        for number in range(draw(st.integers(1, 3))):
            name = f"r{place}{number}"
            weight = draw(st.one_of(st.just(0.0), st.floats(-3, 3)))
            rewards.append(Reward(name, weight, draw(st.floats(-9, -1)), draw(st.floats(0, 9))))
            scores[name] = np.array(draw(st.lists(SCORE, min_size=count, max_size=count)))
        sums.append(RewardSum(tuple(rewards), draw(st.floats(-2, 2)), draw(st.floats(-9, -1)), draw(st.floats(0, 9))))
    return sums, scores


@given(sums_and_scores())
@settings(derandomize=True, max_examples=200, deadline=None)
def test_the_total_is_the_documented_formula(case: tuple[list[RewardSum], dict[str, np.ndarray]]) -> None:
    sums, scores = case
    count = len(next(iter(scores.values())))
    expected = np.zeros(count)
    for k in range(count):
        for one in sums:
            added = 0.0
            for reward in one.rewards:
                value = scores[reward.name][k]
                if 0 in (one.scale, reward.weight):
                    continue
                added += (
                    reward.weight * np.clip(value, reward.clip_min, reward.clip_max) if np.isfinite(value) else np.nan
                )
            expected[k] += one.scale * np.clip(added, one.clip_min, one.clip_max)
    found = total(sums, {name: torch.from_numpy(value) for name, value in scores.items()})
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_two_rewards_by_hand() -> None:
    one = RewardSum((Reward("a", 1.0, -5.0, 5.0), Reward("b", 2.0, -5.0, 5.0)), 0.5, -5.0, 5.0)
    scores = {"a": torch.tensor([21.0, 22.0]), "b": torch.tensor([-1.0, 1.0])}
    assert total([one], scores).tolist() == [0.5 * 3.0, 0.5 * 5.0]  # 5 - 2, and 5 + 2 cut to 5


def test_bounds_of_a_reward_that_counts_alone() -> None:
    """Its own clip, and the sum's over the weight; scale times weight is how much it counts."""
    one = RewardSum((Reward("a", 2.0, -5.0, 5.0), Reward("b", -0.5, -1.0, 9.0), Reward("c", 0.0, 0, 1)), -3.0, -4.0, 2)
    a, b, _ = one.rewards
    assert [one.factor(reward) for reward in one.rewards] == [-6.0, 1.5, 0.0]
    assert [one.bounds(reward) for reward in one.rewards] == [(-2.0, 1.0), (-1.0, 8.0), (0, 1)]
    for reward in (a, b):
        score = torch.linspace(-12, 12, 97, dtype=torch.float64)
        alone = RewardSum((reward,), one.scale, one.clip_min, one.clip_max)
        expected = one.factor(reward) * score.clamp(*one.bounds(reward))
        torch.testing.assert_close(total([alone], {reward.name: score}), expected)


def test_a_table_that_is_switched_off_misses_no_score(rewards_of: Callable[..., Any]) -> None:
    off = RewardSum((Reward("b", 1.0, -5, 5),), 0.0, -5, 5)
    on = RewardSum((Reward("a", 1.0, -5, 5),), 1.0, -5, 5)
    values = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([torch.nan, 1.0])}
    table = combine([on, off], [Scores(values)])
    assert table.total_N.tolist() == [1.0, 2.0]
    assert table.reasons == {}


def test_only_scores_that_count_make_a_total_missing_and_each_is_named() -> None:
    one = RewardSum((Reward("a", 1.0, -5, 5), Reward("b", 0.0, -5, 5), Reward("c", -1.0, -5, 5)), 1.0, -5, 5)
    nan = torch.nan
    values = {"a": torch.tensor([1.0, nan, nan]), "b": torch.tensor([nan] * 3), "c": torch.tensor([1.0, 1.0, nan])}
    table = combine([one], [Scores(values, {"a": {1: "no face"}, "c": {2: "late"}})])
    assert table.missing_N.tolist() == [False, True, True]
    assert table.reasons == {1: "a: no face", 2: "a: no finite score; c: late"}
    assert torch.isnan(table.scores["b"]).all()


# ---- which rewards ---------------------------------------------------------------------------------------------------


def test_functions_of_the_configuration(rewards_of: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("CALLS = []\n\ndef red(image):\n    CALLS.append(1)\n    return image[..., 0].mean()\n")
    fns = [
        {"function": f"{file}:red", "weight": 2.0, "clip_max": 1.0},
        {"function": "cosmos_rl.reward.examples:brightness", "name": "light", "weight": 0.0},
    ]
    rewards = rewards_of(None, {"reward_fns": fns, "scale": 10.0, "reward_clip_max": 1.5})
    assert rewards.names == ("red", "light")
    assert score(rewards).total_N.tolist() == [0.0, 15.0, 15.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("none.py:red", r"reward_fns.0.function = \"none.py:red\": \S+/none.py does not exist"),
        ("no_such_package.x:red", "cannot be imported: No module named 'no_such_package'"),
        ("cosmos_rl.reward.examples:nope", 'has no function "nope"'),
    ],
)
def test_a_function_that_is_not_there_is_named_with_its_key(
    rewards_of: Callable[..., Any], function: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        rewards_of(None, {"reward_fns": [{"function": function}]})


def test_functions_of_the_script_replace_those_of_the_table(
    rewards_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fns = [{"function": "cosmos_rl.reward.examples:ink"}]
    assert rewards_of([examples.darkness], {"reward_fns": fns}).names == ("darkness",)
    assert "local_reward.reward_fns (ink): the functions of the script take their place" in capsys.readouterr().out


def names(local: Any, validation: Any, fns: Any = None, val_fns: Any = None, **job: Any) -> Sequence[str]:
    made = make_rewards(config(local, validation, **job), fns, val_fns, validation=True)
    made.close()
    return made.names


def test_validation_has_the_rewards_of_training_unless_it_has_its_own() -> None:
    ink = {"reward_fns": [{"function": "cosmos_rl.reward.examples:ink"}]}
    light = {"reward_fns": [{"function": "cosmos_rl.reward.examples:brightness", "weight": 0.0}]}
    assert names(ink, {}) == ("ink",)
    assert names(ink, {"local_reward": light}) == ("brightness",)  # one that training does not know
    assert names(ink, {}, [examples.sharpness]) == ("sharpness",)
    assert names(ink, {"local_reward": light}, [examples.sharpness]) == ("brightness",)
    assert names(ink, {"local_reward": light}, [examples.sharpness], [examples.darkness]) == ("darkness",)


def test_no_reward_at_all_and_nothing_to_train_on_are_refused(rewards_of: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="no reward: set train.train_policy.use_remote_reward = true, or name"):
        rewards_of(None)
    with pytest.raises(UserError, match="no reward"):
        rewards_of([])
    with pytest.raises(UserError, match=r"all have weight 0 or scale 0 \(ink\)"):
        rewards_of([(examples.ink, 0.0)])
    with pytest.raises(UserError, match=r"all have weight 0 or scale 0 \(ink\)"):
        rewards_of([examples.ink], {"scale": 0.0})
    with pytest.raises(UserError, match="the name ink appears twice"):
        rewards_of([examples.ink, examples.ink])


def test_bypassed_rewards_are_zeros_without_asking_anybody(rewards_of: Callable[..., Any]) -> None:
    missing = {"reward_fns": [{"function": "no_such_package:x"}]}
    found = score(rewards_of(None, missing, use_remote_reward=True, bypass_reward=True))
    assert found.total_N.tolist() == [0.0] * 3
    assert found.scores == {}


# ---- warnings --------------------------------------------------------------------------------------------------------


def test_a_clip_that_cuts_most_scores_is_reported_once(
    rewards_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = rewards_of({"pick": lambda image: 21.0 + image[0, 0, 0], "fine": examples.brightness})
    for _ in range(3):
        score(rewards)
    printed = capsys.readouterr().out
    assert printed.count("reward pick: 100% of a batch's scores (21 ... 23) are cut") == 1
    assert "reward fine" not in printed


def test_half_of_the_scores_at_a_bound_is_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    ScoreMonitor([Reward("a", 1.0, 0.0, 1.0)]).check({"a": torch.tensor([0.0, 0.5, 0.7, 1.0])})
    assert capsys.readouterr().out == ""


def test_a_reward_that_is_always_equal_is_named_after_five_batches(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = ScoreMonitor([Reward("zero", 1.0, -5, 5), Reward("varied", 1.0, -5, 5)])
    equal, varied, single = torch.zeros(4), torch.tensor([0.0, 1.0, torch.nan, 2.0]), torch.ones(1)
    for _ in range(4):
        monitor.check({"zero": equal, "varied": varied})
        monitor.check({"zero": single, "varied": single})  # one sample says nothing
    monitor.check({"zero": varied, "varied": varied})
    for _ in range(4):
        monitor.check({"zero": equal, "varied": varied})
    assert capsys.readouterr().out == ""
    monitor.check({"zero": equal, "varied": varied})
    monitor.check({"zero": equal, "varied": varied})
    printed = capsys.readouterr().out
    assert printed.count("reward zero: all samples of 5 batches in a row had equal scores (now 0)") == 1
    assert "varied" not in printed
