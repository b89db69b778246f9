"""Several validation sets in one run: each is judged as if it were the only one."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.data.subsets import choose_indices
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, ConfigError, cross_check, notes, unsupported_settings
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.config.prompt_sets import PromptSetConfig, find_reward_problems
from cosmos_rl.policy.config.validation_sets import list_validation_sets, unknown_rewards
from cosmos_rl.policy.model.diffusers.cond import Cond
from cosmos_rl.reward import batch_reward
from cosmos_rl.reward.build import make_rewards
from cosmos_rl.reward.by_set import SetRewards
from cosmos_rl.tracking.media import Shown, build_caption, save_gallery
from tests.support.nft_runs import nft_toml, nft_trainer, prompt_file
from tests.support.toy_models import TEXT, PlaneModel
from tests.support.toy_tasks import bump, metrics_of, rightwards, run_loop, toy_config, toy_sft_config, toy_trainer

TABLE = dict[str, Any]
REWARDS = {"bump": bump, "rightwards": rightwards}
POINTS = [PromptRecord(f"point {number}") for number in range(6)]
SMALL = {
    "train.train_batch_per_replica": 8,
    "train.max_num_steps": 4,
    "rollout.n_generation": 4,
    "train.train_policy.mini_batch": 8,
    "validation.enable": True,
    "validation.val_before_train": True,
    "validation.freq": 2,
}
FIRST = {"name": "near", "dataset": {"name": "own", "limit": 3}, "rewards": ["rightwards"], "num_steps": 3}
SECOND = {"name": "far", "dataset": {"name": "own"}, "rewards": ["bump"], "guidance_scale": 3.0, "n_generation": 2}


class Labelled(PlaneModel):
    """Where samples go depends on the prompt, so that guidance matters."""

    def __init__(self) -> None:
        super().__init__()
        self._labels = {record.prompt: number for number, record in enumerate(POINTS)}

    def predict(self, latents: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
        return super().predict(latents, timestep, cond) + 0.1 * cond.text[TEXT][:, None]


def ignore(name: str, data: TABLE) -> None:
    """No hook."""


def with_sets(*sets: TABLE, **changes: Any) -> Config:
    return toy_config({**SMALL, "validation.sets": list(sets), **changes})


def validate(config: Config, rewards: TABLE = REWARDS) -> dict[str, float]:
    trainer = toy_trainer(config, Labelled(), POINTS, reward_fns=rewards)
    return dict(trainer.validate(0, ignore).metrics)


def test_each_of_two_sets_is_judged_as_in_a_run_that_has_it_alone() -> None:
    both = validate(with_sets(FIRST, SECOND))
    sample = {"num_steps": 10, "guidance_scale": 1.0, "solver": "euler", "deterministic_sampling": True}
    alone = {
        "near": validate(
            toy_config(
                SMALL
                | {"validation.dataset": {"name": "own", "limit": 3}}
                | {"policy.diffusers.sample": {**sample, "eval_num_steps": 3}}
            ),
            {"rightwards": rightwards},
        ),
        "far": validate(
            toy_config(
                SMALL
                | {"validation.dataset.name": "own", "validation.n_generation": 2}
                | {"policy.diffusers.sample": {**sample, "guidance_scale": 3.0}}
            ),
            {"bump": bump},
        ),
    }
    expected = {key.replace("val/", f"val/{name}/"): value for name, one in alone.items() for key, value in one.items()}
    assert both == expected
    assert both["val/near/samples"] == 3
    assert both["val/far/samples"] == 12
    assert both["val/near/reward/mean"] == both["val/near/reward/rightwards_mean"] != both["val/far/reward/bump_mean"]
    assert "val/near/reward/bump_mean" not in both
    unguided = validate(with_sets(SECOND | {"guidance_scale": 1.0}))
    assert unguided["val/far/reward/mean"] != both["val/far/reward/mean"]


def test_the_first_set_is_the_objective_and_a_set_may_have_a_slower_rhythm(tmp_path: Path) -> None:
    config = with_sets(FIRST, SECOND | {"freq": 4}, **{"train.max_num_steps": 6})
    trainer = toy_trainer(config, PlaneModel(), POINTS, reward_fns=REWARDS)
    report = trainer.validate(2, ignore)
    assert report.objective == -report.metrics["val/near/reward/mean"]
    assert not [key for key in report.metrics if "far" in key]
    lines = run_loop(config, toy_trainer(config, PlaneModel(), POINTS, reward_fns=REWARDS), tmp_path)
    found = {name: [line["step"] for line in lines if f"val/{name}/reward/mean" in line] for name in ("near", "far")}
    assert found == {"near": [0, 2, 4, 6], "far": [0, 4, 6]}
    late = toy_trainer(with_sets(FIRST | {"freq": 4}, SECOND), PlaneModel(), POINTS, reward_fns=REWARDS)
    assert late.validate(2, ignore).objective is None


def test_validating_on_several_sets_changes_no_step(tmp_path: Path) -> None:
    def run(config: Config, place: str) -> list[TABLE]:
        run_loop(config, toy_trainer(config, PlaneModel(), POINTS, reward_fns=REWARDS), tmp_path / place)
        return metrics_of(tmp_path / place)

    whole = run(with_sets(FIRST, SECOND), "whole")
    without = run(toy_config({**SMALL, "validation.enable": False}), "without")
    trained = ("train/loss_mean", "reward/mean", "optim/grad_norm")
    for line, other in zip(whole[1:], without, strict=True):
        assert [line[key] for key in trained] == [other[key] for key in trained]


def test_prompts_are_the_first_or_spread_over_the_list() -> None:
    assert list(choose_indices(10, 4, spread=False)) == [0, 1, 2, 3]
    assert list(choose_indices(10, 4, spread=True)) == [0, 2, 5, 7]
    assert list(choose_indices(3, 4, spread=True)) == list(choose_indices(3, None, spread=False)) == [0, 1, 2]
    seen: list[str] = []

    @batch_reward
    def note(media: np.ndarray, prompts: list[str]) -> np.ndarray:
        seen.extend(prompts)
        return np.zeros(len(prompts))

    spread = {"name": "s", "dataset": {"name": "own", "limit": 3, "spread": True}}
    validate(with_sets(spread), {"note": note})
    assert seen == ["point 0", "point 2", "point 4"]


def test_a_set_may_have_reward_functions_of_its_own() -> None:
    own = {"reward_fns": [{"function": "tests.support.toy_tasks:bump", "weight": 2.0}]}
    found = validate(with_sets(FIRST, {"name": "own", "dataset": {"name": "x"}, "local_reward": own}))
    assert found["val/own/reward/mean"] == pytest.approx(2 * found["val/own/reward/bump_mean"])


def test_messages_name_the_table_of_the_set() -> None:
    _, second = list_validation_sets(with_sets(FIRST, SECOND))
    assert second.locate('validation.dataset.name: found "x"') == 'validation.sets.1.dataset.name: found "x"'
    assert second.locate('rewards: found "x"; allowed: y') == 'validation.sets.1.rewards: found "x"; allowed: y'
    (only,) = list_validation_sets(toy_config({**SMALL, "validation.dataset.name": "x"}))
    assert only.locate("validation.dataset.name: missing") == "validation.dataset.name: missing"


def test_labels_are_the_names_of_sets_and_files() -> None:
    tables = [{"dataset": {"name": "ocr"}}, {"dataset": {"local_dir": "data/my own.txt"}}, {"name": "c"}, {}]
    assert [one.label for one in list_validation_sets(with_sets(*tables))] == ["ocr", "my-own", "c", "set3"]
    assert [one.label for one in list_validation_sets(toy_config({**SMALL, "validation.dataset.name": "x"}))] == [""]
    assert list_validation_sets(toy_config()) == []


@pytest.mark.parametrize(
    ("sets", "tables", "message"),
    [
        ([FIRST, FIRST], {}, r'validation.sets.0.name: found "near" for 2 sets; allowed: another name for each'),
        ([{"name": "a b"}], {}, r'validation.sets.0.name: found "a b"; allowed: letters, digits, - _ and .'),
        ([{"name": "reward"}], {}, r'validation.sets.0.name: found "reward", which is a part of the names of metrics'),
        ([FIRST | {"freq": 3}], {}, r"validation.sets.0.freq: found 3; allowed: a multiple of validation.freq = 2"),
        ([FIRST | {"size": [8, 8]}], {}, r"validation.sets.0.size: found \[8, 8\]; allowed: \[16, 16\]; the model"),
        ([FIRST], {"validation.dataset.name": "x"}, r"validation.dataset: given together with validation.sets; allo"),
        (
            [{"name": "a", "dataset": {"name": "x", "spread": True}}],
            {},
            r"validation.sets.0.dataset.spread: found true; allowed only with limit",
        ),
        (
            [FIRST | {"local_reward": {"reward_clip_min": 1.0, "reward_clip_max": 0.0}}],
            {},
            r"validation.sets.0.local_reward.reward_clip_min: found 1.0; allowed: less than",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(sets: list[TABLE], tables: TABLE, message: str) -> None:
    try:
        problems = "\n".join(cross_check(with_sets(*sets, **tables)))
    except ConfigError as error:  # the value of one key
        problems = str(error)
    assert re.search(message, problems)


def test_rewards_are_for_reinforcement_learning() -> None:
    sets = {"validation.enable": True, "validation.sets": [FIRST | {"local_reward": {"scale": 2.0}}]}
    problems = cross_check(toy_sft_config(sets))
    assert "validation.sets.0.rewards: given; allowed only in reinforcement learning, which has rewards" in problems
    assert (
        "validation.sets.0.local_reward: given; allowed only in reinforcement learning, which has rewards" in problems
    )
    split = toy_sft_config({**sets, "train.train_policy.dataset.test_size": 2})
    assert any("dataset.test_size: given together with validation.sets" in line for line in cross_check(split))


def test_a_reward_that_there_is_not_is_named_with_those_that_there_are() -> None:
    with pytest.raises(UserError, match='rewards: found "red"; allowed: bump, rightwards'):
        validate(with_sets(FIRST | {"rewards": ["red"]}))
    remote = {"reward_fns": [{"name": "pickscore"}, {"name": "ocr", "weight": 0.0}]}
    config = with_sets(
        SECOND | {"rewards": ["pickscore", "ocr"]},
        FIRST,
        **{"train.train_policy.use_remote_reward": True, "train.train_policy.remote_reward": remote},
    )
    assert list(unknown_rewards(config)) == [
        'validation.sets.0.rewards: found "ocr"; allowed: pickscore',
        'validation.sets.1.rewards: found "rightwards"; allowed: pickscore',
    ]


JOB = "train.train_policy."
GEN_EVAL = {"reward_fns": [{"name": "pickscore"}, {"name": "gen_eval"}]}
TWICE = {"reward_fns": [{"name": "gen_eval", "score_key": "strict"}, {"name": "gen_eval"}, {"name": "pickscore"}]}
NAMED = {"name": "pickscore", "split": "test"}


def objects_problems(remote: TABLE, *sets: TABLE, **changes: Any) -> list[str]:
    """What is said of gen_eval, in a run whose training prompts are of GenEval."""
    trained = {JOB + "use_remote_reward": True, JOB + "remote_reward": remote, JOB + "dataset.name": "geneval"}
    return [line for line in cross_check(with_sets(*sets, **(trained | changes))) if "gen_eval" in line]


def test_prompts_without_objects_are_not_validated_with_the_reward_that_needs_them() -> None:
    [line] = objects_problems(GEN_EVAL, **{"validation.dataset": NAMED})
    assert line.startswith('validation.dataset.name: found "pickscore"; allowed: "geneval" with the reward "gen_eval"')
    [line] = objects_problems(GEN_EVAL, {"dataset": NAMED}, {"dataset": NAMED, "name": "b", "rewards": ["pickscore"]})
    assert line.startswith('validation.sets.0.rewards: unset, so all for "pickscore"; allowed: without "gen_eval"')
    [line] = objects_problems(
        TWICE, {"dataset": {"name": "geneval"}}, {"dataset": NAMED, "rewards": ["gen_eval.strict"]}
    )
    assert line.startswith("validation.sets.1.rewards: found ['gen_eval.strict'] for \"pickscore\"; allowed: without")
    own = {"dataset": NAMED, "remote_reward": {"reward_fns": [{"name": "pickscore"}]}}
    assert objects_problems(GEN_EVAL, own, {"dataset": {"local_dir": "mine.jsonl"}}, {"name": "script"}) == []
    for without in ({"validation.enable": False}, {JOB + "bypass_reward": True}, {JOB + "use_remote_reward": False}):
        assert objects_problems(GEN_EVAL, {"dataset": NAMED}, **without) == []


def test_scores_with_a_key_need_objects_in_training_too() -> None:
    sets = [{"name": "pickscore", "rewards": ["gen_eval.strict"]}, {"name": "geneval", "rewards": ["gen_eval.strict"]}]
    [line] = objects_problems(TWICE, **{JOB + "dataset": {"sets": sets}, "validation.enable": False})
    assert line.startswith("train.train_policy.dataset.sets.0.rewards: found")


def test_sets_name_rewards_as_metrics_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENQUEUE_URL", "FETCH_URL"):
        monkeypatch.setenv(f"REMOTE_REWARD_{name}", "http://127.0.0.1:9/")
    table = {"reward_fns": [{"name": "hpsv2", "score_key": key, "weight": w} for key, w in (("a", 1.0), ("b", 0.5))]}
    remote = {JOB + "use_remote_reward": True, JOB + "remote_reward": table}
    config = with_sets(FIRST | {"rewards": ["hpsv2"]}, SECOND | {"rewards": ["hpsv2.b"]}, **remote)
    expected = 'rewards: found "hpsv2"; allowed: hpsv2.a, hpsv2.b'
    assert list(unknown_rewards(config)) == [f"validation.sets.0.{expected}"]
    with pytest.raises(UserError, match=expected):
        make_rewards(config, {}, validation=True, names=["hpsv2"])
    rewards = make_rewards(config, {"bump": bump}, validation=True, names=["hpsv2.b"])
    try:
        assert rewards.weights == {"hpsv2.b": 0.5}
    finally:
        rewards.close()
    sets = [{"name": "ocr", "rewards": [name]} for name in ("hpsv2.a", "hpsv2")]
    trained = make_rewards(config, {}, validation=False)
    try:
        problems = list(find_reward_problems([PromptSetConfig(**one) for one in sets], trained.weights))
    finally:
        trained.close()
    assert [line.partition(" (")[0] for line in problems] == [
        'train.train_policy.dataset.sets.1.rewards: found "hpsv2"; allowed: rewards of the run'
    ]


def test_a_set_with_a_function_has_no_terms_of_a_reward_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENQUEUE_URL", "FETCH_URL"):
        monkeypatch.setenv(f"REMOTE_REWARD_{name}", "http://127.0.0.1:9/")
    table = {"reward_fns": [{"name": "ocr", "score_key": "a+b"}, {"name": "ocr", "score_key": "c"}]}
    sets = [{"name": "pickscore", "rewards": ["ocr"]}, {"name": "ocr", "rewards": ["ocr.c"]}, {"name": "drawbench"}]
    tables = {JOB + "use_remote_reward": True, JOB + "remote_reward": table, JOB + "dataset": {"sets": sets}}
    config = toy_config({**SMALL, "validation.enable": False, **tables})
    rewards = make_rewards(config, {"ocr": bump}, validation=False)
    try:
        found = SetRewards.of_config(online_table(config), rewards)
    finally:
        rewards.close()
    assert list(rewards.terms) == ["ocr.a", "ocr.b"]
    assert [[name for name in rewards.names if found.counts(number, name)] for number in range(3)] == [
        ["ocr"],
        ["ocr.c", "ocr.a", "ocr.b"],
        ["ocr", "ocr.a+b", "ocr.c", "ocr.a", "ocr.b"],
    ]


def test_keys_of_a_set_that_do_nothing_are_named() -> None:
    dead = {"name": "ocr", "flip": True, "mix": "steps", "folders": [{"local_dir": "x"}]}
    config = with_sets(FIRST, {"dataset": dead | {"sets": [{"name": "ocr"}], "revision": "main"}})
    [line] = [line for line in notes(config) if "no effect" in line]
    keys = {f"validation.sets.1.dataset.{name}" for name in ("folders", "flip", "sets", "mix")}
    assert set(line.partition(": ")[2].split(", ")) == keys
    assert "validation.sets.1.dataset.sets: found 1 of them; allowed only in train.train_policy.dataset" in cross_check(
        config
    )
    assert 'validation.sets.1.dataset.revision = "main"; today only unset' in unsupported_settings(config)


def test_rewards_that_sets_name_without_any_reward_are_named() -> None:
    sets = {JOB + "dataset": {"sets": [{"name": "ocr"}, {"name": "pickscore", "rewards": ["nope"]}]}}
    config = with_sets({"name": "a"}, FIRST | {"rewards": ["nope"]}, **sets, **{JOB + "bypass_reward": True})
    [line] = [line for line in notes(config) if "bypass_reward" in line]
    assert line.endswith(": train.train_policy.dataset.sets.1.rewards, validation.sets.1.rewards")
    assert list(unknown_rewards(config)) == []
    assert not [line for line in notes(with_sets(FIRST)) if "bypass_reward" in line]


def test_chosen_rewards_of_the_service_are_all_that_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENQUEUE_URL", "FETCH_URL"):
        monkeypatch.setenv(f"REMOTE_REWARD_{name}", "http://127.0.0.1:9/")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", "t")
    remote = {"reward_fns": [{"name": "pickscore"}, {"name": "hpsv3", "weight": 0.5}]}
    config = toy_config({"train.train_policy.use_remote_reward": True, "train.train_policy.remote_reward": remote})
    rewards = make_rewards(config, {"bump": bump}, validation=True, names=["hpsv3"])
    assert rewards.weights == {"hpsv3": 0.5}
    rewards.close()


def test_the_gallery_and_the_captions_name_the_set(tmp_path: Path) -> None:
    pixels = torch.zeros(4, 4, 3, dtype=torch.uint8)
    shown = [Shown(pixels, "a cup", 0, of_set="ocr", scores={"total": 0.5}), Shown(pixels, "a cup", 0)]
    assert list(map(build_caption, shown)) == ["[ocr] a cup | avg: 0.5", "a cup"]
    save_gallery(tmp_path / "step_1", shown)
    rows = json.loads((tmp_path / "step_1" / "index.json").read_text())
    assert [row.get("set") for row in rows] == ["ocr", None]


def test_sets_at_the_sizes_of_the_buckets_are_each_what_a_run_of_that_size_makes(
    tmp_path: Path, tiny_sd3: Path
) -> None:
    prompts = prompt_file(tmp_path, ("a hat", "a shoe"), "val.txt")
    data = f'dataset = {{local_dir = "{prompts}"}}'
    sets = f'[{{{data}}}, {{name = "wide", {data}, size = [16, 32], guidance_scale = 2.0, num_steps = 2}}]'
    config, on = nft_toml(tmp_path, tiny_sd3), "--validation.enable=true"
    buckets = "--policy.diffusers.buckets={sizes = [[32, 32], [16, 32]]}"
    both = nft_trainer(config, on, buckets, f"--validation.sets={sets}").validate(0, ignore)
    pixels = [(one.of_set, one.pixels) for one in both.images if one.pixels is not None]
    assert [(label, tuple(image.shape)) for label, image in pixels] == [
        ("val", (32, 32, 3)),
        ("val", (32, 32, 3)),
        ("wide", (16, 32, 3)),
        ("wide", (16, 32, 3)),
    ]
    where, sample = f"--validation.dataset.local_dir={prompts}", "--policy.diffusers.sample"
    wide = ("--policy.diffusers.inference_size=[16, 32]", f"{sample}.guidance_scale=2.0", f"{sample}.eval_num_steps=2")
    for label, options in (("val", ()), ("wide", wide)):
        alone = nft_trainer(config, on, where, *options).validate(0, ignore)
        theirs = [one.pixels for one in alone.images if one.pixels is not None]
        for one, other in zip([image for name, image in pixels if name == label], theirs, strict=True):
            assert (one.int() - other.int()).abs().max() <= 1
        assert both.metrics[f"val/{label}/reward/mean"] == pytest.approx(alone.metrics["val/reward/mean"], rel=1e-3)
