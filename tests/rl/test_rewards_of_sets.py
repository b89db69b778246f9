"""Rewards by prompt set: who is asked, what is missing, advantages, metrics and galleries."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import ConfigError, GrpoPolicyConfig, load_config
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.trainer.rl import batch as batches
from cosmos_rl.reward import batch_reward
from cosmos_rl.reward.build import make_rewards
from cosmos_rl.reward.by_set import SetRewards
from cosmos_rl.reward.futures import join_futures
from cosmos_rl.reward.table import RewardTable
from cosmos_rl.rollout.sampler import Rollouts, Sample
from cosmos_rl.tracking.media import TOTAL
from tests.support.nft_runs import SETS, nft_toml, nft_train_task, nft_trainer, set_options
from tests.support.toy_models import FOUR_MODES, PlaneModel, PlaneNetwork, ToyModel
from tests.support.toy_tasks import bump, rightwards, run_loop, toy_config, toy_trainer

LABELS = ("here", "there")
TABLES = {
    "train.max_num_steps": 4,
    SETS: [
        {"name": "ocr", "label": "here", "rewards": ["a", "b"]},
        {"name": "geneval", "label": "there", "rewards": ["c"]},
    ],
}
WEIGHTS = {"a": 2.0, "b": -0.5, "c": 3.0}


def named(name: str) -> Callable[..., list[float]]:
    """A reward for batches, for its name and weight alone."""

    @batch_reward
    def give(media: np.ndarray) -> list[float]:
        return [0.0] * len(media)

    give.__name__ = name
    return give


# ---- advantages ----------------------------------------------------------------------------------------------------


def scored(
    job: GrpoPolicyConfig,
    *,
    global_std: bool,
    scores: Mapping[str, np.ndarray],
    reasons: Mapping[int, str] | None = None,
) -> batches.ScoredBatch:
    """A step of two prompts of the first set and one of the second, four samples each, the sets in turns."""
    config = toy_config(
        {**TABLES, **{f"train.train_policy.{k}": v for k, v in job.model_dump(exclude_unset=True).items()}}
    )
    rewards = make_rewards(config, {name: (named(name), weight) for name, weight in WEIGHTS.items()}, validation=False)
    rewards.close()
    sets = SetRewards.of_config(online_table(config), rewards)
    groups = [0] * 4 + [1] * 4 + [2] * 4
    samples = tuple(
        Sample(i, group, "here" if group != 1 else "there", {}, prompt_set=int(group == 1))
        for i, group in enumerate(groups)
    )
    total = np.where(
        np.array(groups) == 1, WEIGHTS["c"] * scores["c"], WEIGHTS["a"] * scores["a"] + WEIGHTS["b"] * scores["b"]
    )
    table = RewardTable(
        {name: torch.from_numpy(values) for name, values in scores.items()}, torch.from_numpy(total), reasons or {}
    )
    media = torch.zeros(12, 2)
    return batches.score_batch(
        samples,
        Rollouts(samples, media, media, torch.ones(12, dtype=torch.bool)),
        [table],
        rewards=rewards,
        sets=sets,
        job=online_table(config),
        global_std=global_std,
        in_pairs=False,
        context=Context(torch.device("cpu")),
    )


def given_scores() -> dict[str, np.ndarray]:
    """NaN where a reward is not asked; the second set's are a hundred times as large."""
    random = np.random.default_rng(0)
    first, second = np.array([True] * 4 + [False] * 4 + [True] * 4), np.array([False] * 4 + [True] * 4 + [False] * 4)
    values = {"a": random.normal(size=12) / 10, "b": random.normal(size=12), "c": random.normal(size=12)}
    return {name: np.where(second if name == "c" else first, value, np.nan) for name, value in values.items()}


def centred(values: np.ndarray, groups: np.ndarray, by_group: bool) -> np.ndarray:
    """NumPy: less the mean of the group, over the population deviation of all or of the group."""
    found = np.empty(len(values))
    for group in np.unique(groups):
        own = groups == group
        std = values[own].std() if by_group else values.std()
        found[own] = (values[own] - values[own].mean()) / (std + 1e-4)
    return found


@pytest.mark.parametrize("global_std", [True, False])
@pytest.mark.parametrize("mode", ["sum", "each", "gdpo"])
def test_advantages_are_those_of_each_set_by_itself(mode: Any, global_std: bool) -> None:
    scores = given_scores()
    batch = scored(GrpoPolicyConfig(normalise_rewards=mode), global_std=global_std, scores=scores)
    expected, groups = np.empty(12), np.array([0] * 4 + [1] * 4 + [2] * 4)
    for own, names in ((groups != 1, ("a", "b")), (groups == 1, ("c",))):
        of = groups[own]
        if mode == "sum":
            total = sum(WEIGHTS[name] * scores[name][own] for name in names)
            expected[own] = centred(np.asarray(total), of, not global_std)
        else:
            by_group = mode == "gdpo" or not global_std
            added = np.asarray(sum(WEIGHTS[name] * centred(scores[name][own], of, by_group) for name in names))
            expected[own] = added / (added.std() + 1e-4) if mode == "gdpo" else added
    np.testing.assert_allclose(batch.advantage_N.numpy(), expected, rtol=1e-9, atol=1e-12)
    assert bool(batch.kept_N.all())


def test_what_is_not_asked_is_not_missing_and_what_is_missing_is() -> None:
    scores = given_scores()
    scores["a"][0] = np.nan
    batch = scored(GrpoPolicyConfig(), global_std=True, scores=scores)
    metrics = batches.compute_reward_metrics(batch)
    assert metrics["rollout/missing"] == 1
    assert batch.kept_N.tolist() == [False] + [True] * 11
    assert metrics["reward/a_mean"] == pytest.approx(np.nanmean(scores["a"]))
    assert metrics["reward/c_mean"] == pytest.approx(scores["c"][4:8].mean())
    assert metrics["reward/there/mean"] == pytest.approx(3 * scores["c"][4:8].mean())
    here = 2 * scores["a"] - 0.5 * scores["b"]
    assert metrics["reward/here/mean"] == pytest.approx(np.nanmean(here))
    assert metrics["adv/here/zero_std_ratio"] == 0
    with pytest.raises(UserError, match="1 of 12 rewards of this step are missing"):
        scored(GrpoPolicyConfig(on_missing_reward="raise"), global_std=True, scores=scores)


def test_a_set_without_scores_ends_the_run_even_where_it_is_a_small_part_of_the_step() -> None:
    """Four of twelve are fewer than the bound on the step that is set here, and all of the second set."""
    scores = given_scores()
    scores["c"][:] = np.nan
    message = r"all 4 rewards of prompt set there in this step are missing \(only .*max_missing_frac = 1 allows that\)"
    with pytest.raises(UserError, match=message + r":\n  sample 4 \('there'\): no score$"):
        scored(GrpoPolicyConfig(max_missing_frac=0.5), global_std=True, scores=scores, reasons={0: "x", 4: "no score"})
    batch = scored(GrpoPolicyConfig(max_missing_frac=1.0), global_std=True, scores=scores)
    metrics = batches.compute_reward_metrics(batch)
    assert np.isnan(metrics["adv/there/zero_std_ratio"])
    assert np.isnan(metrics["reward/there/mean"])
    assert metrics["adv/here/zero_std_ratio"] == metrics["adv/zero_std_ratio"] == 0
    scores["c"][4:] = given_scores()["c"][4:]
    scores["c"][4] = np.nan  # 1 of 12 in the step: that it is 1 of 4 in the set does not end the run
    assert int(scored(GrpoPolicyConfig(), global_std=True, scores=scores).reward_N.isnan().sum()) == 1


def test_a_gallery_has_samples_of_every_set_and_the_scores_that_were_asked() -> None:
    batch = scored(GrpoPolicyConfig(), global_std=True, scores=given_scores())
    media = torch.zeros(12, 4, 4, 3, dtype=torch.uint8)
    shown = batches.build_gallery(batches.replace(batch, own=batches.replace(batch.own, media=media)))
    assert [(one.group, one.prompt) for one in shown] == [
        (kind, prompt) for kind in ("best", "worst") for prompt in ("here", "here", "there", "there")
    ]
    for one in shown:
        assert set(one.scores) == {TOTAL, *(("c",) if one.prompt == "there" else ("a", "b"))}


# ---- who is asked --------------------------------------------------------------------------------------------------


def test_a_reward_sees_the_samples_of_its_sets_and_scores_come_back_in_order(tmp_path: Path, tiny_sd3: Path) -> None:
    asked: dict[str, list[str]] = {"first": [], "second": [], "both": []}

    def make(name: str) -> Any:
        @batch_reward
        def give(media: np.ndarray, prompts: Sequence[str]) -> list[float]:
            asked[name] += prompts
            return [float(media[i].mean()) / 255 + {"a": 1.0, "b": 2.0}[prompts[i][0]] for i in range(len(media))]

        return give

    rows = {"rewards": ["first", "both"], "weight": 1.0}, {"rewards": ["both", "second"], "weight": 1.0}
    options = (*set_options(tmp_path, *rows, steps=1), "--train.ckpt.enable_checkpoint=false")
    options += ("--rollout.batch_size=3",)
    functions = {name: make(name) for name in asked}
    root, task = nft_train_task(nft_toml(tmp_path, tiny_sd3), *options, reward_fns=functions)
    texts = [sample.prompt for sample in task._samples(0)]
    assert {text[0] for text in texts} == {"a", "b"}
    assert sorted(asked["first"]) == sorted(text for text in texts if text[0] == "a")
    assert sorted(asked["second"]) == sorted(text for text in texts if text[0] == "b")
    assert sorted(asked["both"]) == sorted(texts)
    pending = task._scoring.submit(batches_of(task, texts))
    assert pending is not None
    found = pending.result(60)
    both = np.array([1.0 if text[0] == "a" else 2.0 for text in texts])
    np.testing.assert_allclose(found.scores["both"].numpy(), both)
    np.testing.assert_allclose(found.scores["first"].numpy(), np.where(both == 1, 1.0, np.nan))
    np.testing.assert_allclose(found.total_N.numpy(), 2 * both)
    assert found.reasons == {}
    assert root.is_dir()


def batches_of(task: Any, texts: Sequence[str]) -> Rollouts:
    """Black images of the samples of the first step."""
    samples = tuple(task._samples(0))
    assert [sample.prompt for sample in samples] == list(texts)
    media = torch.zeros(len(samples), 8, 8, 3, dtype=torch.uint8)
    return Rollouts(samples, torch.zeros(len(samples), 2), media, torch.ones(len(samples), dtype=torch.bool))


def test_a_joined_future_fails_with_its_parts_and_with_what_is_made_of_them() -> None:
    first, second = Future[int](), Future[int]()
    joined = join_futures([first, second], sum)
    second.set_result(2)
    assert not joined.done()
    first.set_result(1)
    assert joined.result(0) == 3
    broken = Future[int]()
    joined = join_futures([broken, second], sum)
    broken.set_exception(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        joined.result(0)
    with pytest.raises(ZeroDivisionError):
        join_futures([second], lambda parts: parts[0] // 0).result(0)
    with pytest.raises(ValueError, match="nothing to wait for"):
        join_futures([], sum)


# ---- what is refused -----------------------------------------------------------------------------------------------

LOCAL = "--train.train_policy.local_reward.reward_fns="
TWO = f'{LOCAL}[{{function = "m:sharpness"}}, {{function = "m:colour", weight = 0.0}}]'


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["sharpnes"],
            f'{SETS}.0.rewards: found "sharpnes"; allowed: rewards of the run (sharpness, colour); did you mean s',
        ),
        (["colour"], f"{SETS}.0.rewards: found ['colour'], all of weight 0; allowed: one at least that is trained on"),
    ],
)
def test_rewards_that_are_unknown_or_do_not_count_are_refused(
    tmp_path: Path, tiny_sd3: Path, names: list[str], message: str, capsys: Any
) -> None:
    options = set_options(tmp_path, {"rewards": names}, {})
    config = nft_toml(tmp_path, tiny_sd3)
    assert main(["check", "--config", str(config), *options, TWO]) == 2
    assert message in capsys.readouterr().err
    functions = {"sharpness": named("sharpness"), "colour": (named("colour"), 0.0)}
    with pytest.raises(UserError) as error:
        nft_trainer(config, *options, reward_fns=functions)
    assert message in str(error.value)


def test_check_says_which_rewards_a_set_has(tmp_path: Path, tiny_sd3: Path, capsys: Any) -> None:
    options = set_options(tmp_path, {"rewards": ["sharpness"]}, {})
    assert main(["check", "--config", str(nft_toml(tmp_path, tiny_sd3)), *options, TWO]) == 0
    assert "set first: sharpness" in capsys.readouterr().out


def test_check_names_a_reward_that_no_set_uses(tmp_path: Path, tiny_sd3: Path, capsys: Any) -> None:
    two = TWO.replace(", weight = 0.0", "")
    config, note = str(nft_toml(tmp_path, tiny_sd3)), "note: colour has a weight, but no prompt set names it"
    for rows, weights, said in (
        (({"rewards": ["sharpness"]},) * 2, two, True),
        (({"rewards": ["sharpness"]},) * 2, TWO, False),
        (({"rewards": ["sharpness"]}, {}), two, False),
        (({"rewards": ["sharpness"]}, {"rewards": ["colour"]}), two, False),
    ):
        assert main(["check", "--config", config, *set_options(tmp_path, *rows), weights]) == 0
        assert (note in " ".join(capsys.readouterr().out.split())) == said


def test_the_guard_watches_a_reward_that_no_set_uses() -> None:
    """Both have the weight 1."""
    functions, prompts = {"bump": bump, "rightwards": rightwards}, [PromptRecord(f"{i}", prompt_set=i) for i in (0, 1)]
    tables = {
        "train.train_batch_per_replica": 8,
        "train.max_num_steps": 1,
        "rollout.n_generation": 4,
        "train.train_policy.mini_batch": 8,
        "validation.enable": True,
        "validation.dataset.name": "own",
    }
    for named, untrained in (
        ({"rewards": ["bump"]}, {"rightwards"}),
        ({"rewards": ["bump", "rightwards"]}, set()),
        ({}, set()),
    ):
        sets = [{"local_dir": f"{name}.txt", **named} for name in "ab"]
        task = toy_trainer(toy_config({**tables, SETS: sets}), PlaneModel(), prompts, reward_fns=functions)
        validated = task._validation.run(1, 1, lambda name, data: None)
        assert validated is not None
        assert validated.untrained.keys() == untrained


def test_a_gate_over_different_rewards_and_objects_that_prompts_lack_are_refused(
    tmp_path: Path, tiny_sd3: Path
) -> None:
    config, gate = nft_toml(tmp_path, tiny_sd3), "--train.train_policy.kl_gate.rewards=['colour']"
    with pytest.raises(ConfigError, match=r"kl_gate.rewards: found \['colour'\]; allowed: none where .* rewards of"):
        load_config(config, [*set_options(tmp_path, {"rewards": ["sharpness"]}, {}), TWO, gate])
    load_config(config, [*set_options(tmp_path), TWO, gate])
    remote = "--train.train_policy.remote_reward.reward_fns=[{name = 'gen_eval'}, {name = 'pickscore'}]"
    for rewards, why in (({}, "unset, so all"), ({"rewards": ["gen_eval"]}, r"found \['gen_eval'\]")):
        options = set_options(tmp_path, {"local_dir": "", "name": "pickscore", **rewards}, {})
        with pytest.raises(ConfigError, match=rf'sets.0.rewards: {why} for "pickscore"; allowed: without "gen_eval"'):
            load_config(config, [*options, remote, "--train.train_policy.use_remote_reward=true"])
    options = set_options(tmp_path, {"local_dir": "", "name": "pickscore", "rewards": ["pickscore"]}, {})
    load_config(config, [*options, remote, "--train.train_policy.use_remote_reward=true"])


def test_a_resume_says_that_a_set_has_other_rewards(tmp_path: Path, tiny_sd3: Path, caplog: Any) -> None:
    config, functions = nft_toml(tmp_path, tiny_sd3), {"a": named("a"), "b": named("b")}
    before = nft_trainer(config, *set_options(tmp_path, {"rewards": ["a"]}, {}), reward_fns=functions, start=False)
    now = nft_trainer(config, *set_options(tmp_path, {"rewards": ["a", "b"]}, {}), reward_fns=functions, start=False)
    now._scoring.warn_if_changed(now._scoring.settings())
    assert "scores before and after" not in caplog.text
    now._scoring.warn_if_changed(before._scoring.settings())
    assert "the run that is resumed (those of the set first: other" in caplog.text


# ---- a run ---------------------------------------------------------------------------------------------------------


class ShiftedNetwork(PlaneNetwork):
    """The mixture's velocity plus a constant for each label, 0 at the start."""

    def __init__(self) -> None:
        super().__init__(FOUR_MODES)
        self.residual.requires_grad_(False)
        self.shift = nn.Embedding(3, 2)
        nn.init.zeros_(self.shift.weight)

    def forward(self, latents: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        return super().forward(latents, sigma, labels) + self.shift(labels)


class TwoPrompts(PlaneModel):
    """Points of the plane by two prompts, whose samples can move apart."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        ToyModel.__init__(self, ShiftedNetwork(), LABELS, (2,))


def run_opposite(folder: Path, rewards: Sequence[Sequence[str]]) -> tuple[list[float], list[dict[str, Any]]]:
    """Train on two prompts whose rewards are opposite; mean first coordinate of each prompt, and the metrics."""

    @batch_reward
    def right(media: np.ndarray) -> np.ndarray:
        return media[:, 0].astype(np.float64)

    @batch_reward
    def left(media: np.ndarray) -> np.ndarray:
        return -media[:, 0].astype(np.float64)

    config = toy_config(
        {
            "train.train_batch_per_replica": 128,
            "train.max_num_steps": 25,
            "train.optm_lr": 3e-2,
            "train.ckpt.enable_checkpoint": False,
            "rollout.n_generation": 32,
            "train.train_policy.mini_batch": 64,
            "policy.diffusers.timesteps_fraction": 0.4,
            "train.train_policy.local_reward.reward_clip_max": 50.0,
            SETS: [{"name": "ocr", "label": one, "rewards": own} for one, own in zip(LABELS, rewards, strict=True)],
        }
    )
    prompts = [PromptRecord(text, prompt_set=number) for number, text in enumerate(LABELS)]
    model = TwoPrompts()
    task = toy_trainer(config, model, prompts, reward_fns={"right": right, "left": left})
    metrics = run_loop(config, task, folder)
    noise = torch.randn(500, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        made = [
            model.sample_latents(model.encode_prompts([one] * 500), noise, num_steps=10, guidance=1.0) for one in LABELS
        ]
    return [float(one[:, 0].mean()) for one in made], metrics


def test_two_sets_with_opposite_rewards_each_learn_their_own(tmp_path: Path) -> None:
    (here, there), metrics = run_opposite(tmp_path / "own", [["right"], ["left"]])
    assert here > 0.5
    assert there < -0.5
    for label, reward in zip(LABELS, ("right", "left"), strict=True):
        own = [line[f"reward/{label}/mean"] for line in metrics]
        assert np.mean(own[-5:]) > np.mean(own[:5]) + 0.3
        assert own == pytest.approx([line[f"reward/{reward}_mean"] for line in metrics])
    (here, there), metrics = run_opposite(tmp_path / "all", [["right", "left"]] * 2)
    assert abs(here - there) < 0.2  # the rewards cancel
    assert all(line["adv/zero_std_ratio"] == 1 for line in metrics)
