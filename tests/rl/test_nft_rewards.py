"""From scores to what a DiffusionNFT step learns: groups, missing scores, modes, several rewards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import ConfigError
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.reward import batch_reward
from tests.support.nft_runs import StepRecord, nft_toml, nft_trainer, prompt_file, record_rows, recorded
from tests.support.states import assert_same_state

Score = float | None
TWO_GROUPS = ("--train.train_batch_per_replica=8",)


def listed(values: Sequence[Score]) -> Callable[..., list[Score]]:
    """A reward that gives these values in the order of the samples."""
    left = list(values)

    @batch_reward
    def give(media: np.ndarray, prompts: Sequence[str]) -> list[Score]:
        return [left.pop(0) for _ in media]

    return give


def learnt_values(trainer: OnlineTask) -> list[float]:
    """``r`` of the rows of the first optimiser step."""
    return trainer.algorithm.seen[0].value.tolist()  # type: ignore[attr-defined]


@pytest.fixture
def one_step(tmp_path: Path, tiny_sd3: Path) -> Callable[..., tuple[StepRecord, dict[str, float], OnlineTask]]:
    """A step with given scores for two groups of four."""

    def step(
        *values: Sequence[Score], options: Sequence[str] = (), weights: Sequence[float] = (1.0, 1.0)
    ) -> tuple[StepRecord, dict[str, float], OnlineTask]:
        rewards = {f"reward{i}": (listed(v), w) for i, (v, w) in enumerate(zip(values, weights, strict=False))}
        wide = "--train.train_policy.local_reward.reward_clip_max=1000.0"
        trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), *TWO_GROUPS, wide, *options, reward_fns=rewards)
        record_rows(trainer)
        with recorded() as records:
            metrics = dict(trainer.train_step(0).metrics)
        return records[0], metrics, trainer

    return step


def normalised(groups: Sequence[Sequence[float]], *, by_group: bool = False) -> list[float]:
    """Advantages by hand."""
    everything = np.concatenate([np.array(group) for group in groups])
    found = []
    for group in map(np.array, groups):
        found += list((group - group.mean()) / ((group if by_group else everything).std() + 1e-4))
    return found


A, B = (0.2, None, 0.4, 0.6), (1.0, 3.0, 2.0, 2.5)
SOME = "--train.train_policy.max_missing_frac=0.5"


def test_a_missing_score_is_in_no_statistic_and_not_trained_on(one_step: Callable[..., Any]) -> None:
    expected = normalised([(0.2, 0.4, 0.6), B])
    for missing in (None, float("nan"), float("inf")):
        record, metrics, trainer = one_step([0.2, missing, 0.4, 0.6, *B])
        assert record.kept == [True, False, True, True] + [True] * 4
        assert np.isnan(record.advantages[1])
        assert [a for a, kept in zip(record.advantages, record.kept, strict=True) if kept] == pytest.approx(expected)
        assert metrics["rollout/missing"] == 1
        assert metrics["train/samples_used"] == 7
        assert metrics["reward/mean"] == pytest.approx(np.mean([0.2, 0.4, 0.6, *B]))
        assert all(param.isfinite().all() for param in trainer.params.values())


def test_a_group_can_be_dropped_with_its_missing_score(one_step: Callable[..., Any]) -> None:
    record, _, _ = one_step([*A, *B], options=("--train.train_policy.on_missing_reward=drop_group",))
    assert record.kept == [False] * 4 + [True] * 4
    assert record.advantages[4:] == pytest.approx(normalised([(0.2, 0.4, 0.6), B])[3:])


def test_a_group_without_scores_is_left_out(one_step: Callable[..., Any]) -> None:
    record, metrics, _ = one_step([None] * 4 + list(B), options=(SOME,))
    assert record.kept == [False] * 4 + [True] * 4
    assert record.advantages[4:] == pytest.approx(normalised([B]))
    assert metrics["rollout/missing"] == 4


def test_too_many_missing_scores_stop_the_run(one_step: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r'1 of 8 .* \(train.train_policy.on_missing_reward = "raise"\):\n.*gave None'):
        one_step([*A, *B], options=("--train.train_policy.on_missing_reward=raise",))
    with pytest.raises(UserError, match="2 of 8 .*max_missing_frac = 0.2 allows fewer"):
        one_step([None, None, *A[2:], *B])
    with pytest.raises(UserError, match=r"8 of 8 rewards .* missing"):
        one_step([None] * 8)


def test_a_step_without_any_score_changes_nothing_where_that_is_allowed(
    one_step: Callable[..., Any], tmp_path: Path, tiny_sd3: Path
) -> None:
    record, metrics, trainer = one_step([None] * 8, options=("--train.train_policy.max_missing_frac=1.0",))
    fresh = nft_trainer(nft_toml(tmp_path, tiny_sd3), start=False)
    assert record.kept == [False] * 8
    assert metrics["train/samples_used"] == metrics["optim/steps"] == metrics["train/loss_mean"] == 0
    assert_same_state(
        {n: p.detach() for n, p in trainer.params.items()}, {n: p.detach() for n, p in fresh.params.items()}
    )
    assert trainer.policies.old_equals_current


def test_groups_are_prompt_entries_not_texts(one_step: Callable[..., Any], tmp_path: Path, tiny_sd3: Path) -> None:
    first, second = (1.0, 3.0, 1.0, 3.0), (10.0, 30.0, 10.0, 30.0)
    for by_group in (False, True):
        config = nft_toml(tmp_path, tiny_sd3)
        prompt_file(tmp_path, ["the same text"] * 2)
        options = ("--policy.diffusers.sample.global_std=" + str(not by_group).lower(), *TWO_GROUPS)
        options += ("--train.train_policy.local_reward.reward_clip_max=1000.0",)
        table = "--train.train_policy.local_reward.reward_fns=[]"
        rewards = {"given": (listed([v / 10 for v in (*first, *second)]), 1.0)}
        trainer = nft_trainer(config, *options, table, reward_fns=rewards)
        with recorded() as records:
            trainer.train_step(0)
        assert set(records[0].prompts) == {"the same text"}
        groups = [[v / 10 for v in group] for group in (first, second)]
        assert records[0].advantages == pytest.approx(normalised(groups, by_group=by_group), rel=1e-6)


def test_groups_of_equal_rewards_teach_nothing(one_step: Callable[..., Any]) -> None:
    equal = [0.7] * 4
    record, metrics, trainer = one_step([*equal, *B])
    assert metrics["adv/zero_std_ratio"] == 0.5
    assert record.advantages[:4] == [0.0] * 4
    assert record.kept == [True] * 8
    assert [learnt_values(trainer)[i] for i in (0, 1, 2, 3, 8, 9, 10, 11)] == [0.5] * 8
    record, metrics, _ = one_step([*equal, *B], options=("--train.train_policy.drop_equal_groups=true",))
    assert record.kept == [False] * 4 + [True] * 4
    record, metrics, trainer = one_step(equal * 2, options=("--train.train_policy.drop_equal_groups=true",))
    assert record.kept == [False] * 8
    assert trainer._optimizer_steps == 0


def test_a_share_of_the_samples_is_learnt_from(one_step: Callable[..., Any]) -> None:
    """Those that differ most from their group, whichever group that is; advantages are those of all samples."""
    values = [0.1, 0.5, 0.5, 0.5, 0.2, 0.7, 0.3, 0.4]
    record, metrics, trainer = one_step(values, options=("--train.train_policy.learnt_share=0.5",))
    assert record.advantages == pytest.approx(normalised([values[:4], values[4:]]), rel=1e-5)
    assert record.kept == [True, False, False, False, True, True, False, False] or sum(record.kept) == 4
    assert np.flatnonzero(record.kept).tolist() == sorted(np.argsort(-np.abs(record.advantages), kind="stable")[:4])
    assert metrics["train/samples_used"] == 4
    learnt = [a for a, kept in zip(record.advantages, record.kept, strict=True) if kept]
    assert sorted(set(learnt_values(trainer))) == pytest.approx(sorted({a / 10 + 0.5 for a in learnt}), rel=1e-5)


def test_a_step_that_teaches_nothing_is_reported_at_once(
    one_step: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    one_step([*[0.7] * 4, *B])
    assert "all have the same reward" not in capsys.readouterr().out
    one_step([*[0.7] * 4, *[0.2] * 4])
    assert "step 1: the samples of each prompt all have the same reward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", lambda a: a),
        ("positive_only", lambda a: np.maximum(a, 0)),
        ("negative_only", lambda a: np.minimum(a, 0)),
        ("one_only", lambda a: (a > 0) * 1.0),
        ("binary", np.sign),
    ],
)
def test_the_mode_of_the_advantage_reaches_the_loss(
    one_step: Callable[..., Any], mode: str, expected: Callable[..., Any]
) -> None:
    bounds = ("--train.train_policy.advantage_low=-1.0", "--train.train_policy.advantage_high=1.0")
    _, _, trainer = one_step(
        [*A[:1], 0.5, *A[2:], *B], options=(f"--train.train_policy.advantage_mode={mode}", *bounds)
    )
    a = np.array(normalised([(0.2, 0.5, 0.4, 0.6), B]))
    r = np.clip(np.clip(expected(a), -1.0, 1.0) / 2.0 + 0.5, 0.0, 1.0)
    assert learnt_values(trainer) == pytest.approx([*r, *r], abs=1e-6)


EACH = "--train.train_policy.normalise_rewards=each"


def local(**keys: float) -> tuple[str, ...]:
    return tuple(f"--train.train_policy.local_reward.{key}={value}" for key, value in keys.items())


def test_rewards_of_different_size_can_count_alike(one_step: Callable[..., Any]) -> None:
    small, big = [0.01, 0.02, 0.04, 0.03] * 2, [4.5, -5.0, 2.5, 2.0, 0.0, 1.0, 2.0, 3.0]
    options = (EACH, *local(reward_clip_min=-1000.0))
    record, metrics, _ = one_step(small, big, options=options, weights=(1.0, 2.0))
    parts = [np.array(normalised([values[:4], values[4:]])) for values in (small, big)]
    assert record.advantages == pytest.approx(list(parts[0] + 2.0 * parts[1]))
    assert metrics["reward/reward0_mean"] == pytest.approx(0.025)
    assert metrics["reward/reward1_mean"] == pytest.approx(np.mean(big))


def test_gdpo_takes_the_deviations_of_each_prompt_and_then_that_of_the_step(one_step: Callable[..., Any]) -> None:
    small, big = [0.01, 0.02, 0.04, 0.03] * 2, [4.5, -5.0, 2.5, 2.0, 0.0, 1.0, 2.0, 3.0]
    options = ("--train.train_policy.normalise_rewards=gdpo", *local(reward_clip_min=-1000.0))
    record, metrics, _ = one_step(small, big, options=options, weights=(1.0, 2.0))
    parts = [np.array(normalised([values[:4], values[4:]], by_group=True)) for values in (small, big)]
    added = parts[0] + 2.0 * parts[1]
    assert record.advantages == pytest.approx(list(added / (added.std() + 1e-4)))
    assert metrics["adv/std"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("each", [True, False])
def test_scale_weight_and_clips_count_however_rewards_are_normalised(one_step: Callable[..., Any], each: bool) -> None:
    """With one reward both ways are the same, but for the size of scale times weight."""
    values, mode = [0.1, 0.2, 0.3, 1000.0], (EACH,) if each else ()
    golden = [0.631, 0.583, 0.534, -1.748]  # of the scores cut at 5, turned round
    for options, weight in ((local(scale=-1.0), 1.0), ((), -1.0)):
        record, _, _ = one_step(values * 2, options=(*mode, *options), weights=(weight,))
        assert record.advantages == pytest.approx(golden * 2, abs=2e-2)
    cut = [min(value, 0.25) for value in values]
    for options, weight in ((local(reward_clip_max=0.25), 1.0), (local(reward_clip_min=-0.25), -1.0)):
        record, _, _ = one_step(values * 2, options=(*mode, *options), weights=(weight,))
        assert record.advantages == pytest.approx([weight * a for a in normalised([cut, cut])], rel=1e-6)
    doubled = (*mode, *local(scale=2.0, reward_clip_max=9.0))
    record, _, _ = one_step(values * 2, options=doubled, weights=(1.5,))
    cut = [min(value, 5.0) for value in values]
    if each:
        assert record.advantages == pytest.approx([3.0 * a for a in normalised([cut, cut])], rel=1e-6)
    else:
        total = [2.0 * min(1.5 * value, 9.0) for value in cut]
        assert record.advantages == pytest.approx(normalised([total, total]), rel=1e-6)


def test_equality_is_that_of_the_advantages_that_are_used(
    one_step: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The sum of two rewards is the same for all samples, while each reward tells them apart; and the other way."""
    drop = "--train.train_policy.drop_equal_groups=true"
    rising, falling = [1.0, 2.0, 3.0, 4.0] * 2, [4.0, 3.0, 2.0, 1.0] * 2
    record, metrics, _ = one_step(rising, [value / 2 for value in falling], options=(EACH, drop), weights=(1.0, 2.0))
    assert record.kept == [True] * 8
    assert record.advantages == pytest.approx([-a for a in normalised([rising[:4]] * 2)], rel=1e-3)  # eps over 0.5
    assert metrics["adv/zero_std_ratio"] == 0.0
    assert "all have the same reward" not in capsys.readouterr().out
    record, metrics, _ = one_step(rising, falling, options=(EACH, drop))  # here the advantages cancel
    assert record.kept == [False] * 8
    assert metrics["adv/zero_std_ratio"] == 1.0
    assert "all have the same reward" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["all", "one_only", "binary"])
def test_rewards_that_differ_by_rounding_are_equal(one_step: Callable[..., Any], mode: str) -> None:
    options = (f"--train.train_policy.advantage_mode={mode}",)
    _, metrics, trainer = one_step([0.3, 0.1 + 0.2] * 2 + list(B), options=options)
    assert metrics["adv/zero_std_ratio"] == 0.5
    assert [learnt_values(trainer)[i] for i in (0, 1, 2, 3, 8, 9, 10, 11)] == [0.5] * 8
    dropped = (*options, "--train.train_policy.drop_equal_groups=true")
    record, _, _ = one_step([0.3, 0.1 + 0.2] * 2 + list(B), options=dropped)
    assert record.kept == [False] * 4 + [True] * 4


def test_one_sample_per_prompt_is_refused(tmp_path: Path, tiny_sd3: Path) -> None:
    with pytest.raises(ConfigError, match="rollout.n_generation: found 1; allowed: 2 or more"):
        nft_trainer(nft_toml(tmp_path, tiny_sd3), "--rollout.n_generation=1")
