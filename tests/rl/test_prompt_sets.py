"""Reinforcement learning on several prompt sets."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl.checkpoint import layout
from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.length import run_length
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import ConfigError, load_config
from cosmos_rl.policy.trainer.loop import TrainLoop
from cosmos_rl.policy.trainer.rl.build import _list_texts
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.policy.trainer.same_run import compare
from cosmos_rl.storage import run_folder
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.nft_runs import SETS, Job, nft_toml, nft_trainer, record_of, run_forked, set_options
from tests.support.states import assert_same_state, drop_steps_after, saved_state
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import Never, bump, metrics_of, rightwards, toy_config, toy_trainer

# ---- the stream of a task --------------------------------------------------------------------------------------------


def test_a_step_has_the_shares_of_its_stage_and_samples_know_their_set(tmp_path: Path, tiny_sd3: Path) -> None:
    options = set_options(tmp_path, {"weight": 3.0}, {"first_step": 2})
    task = nft_trainer(nft_toml(tmp_path, tiny_sd3), *options, start=False)
    steps = [task._samples(step) for step in range(6)]
    assert task.total_steps == 6
    assert [Counter(sample.prompt_set for sample in step) for step in steps] == [{0: 16}] * 2 + [{0: 12, 1: 4}] * 4
    for sample in (sample for step in steps for sample in step):
        assert sample.prompt[0] == "ab"[sample.prompt_set]
    texts = [step[4 * k].prompt for step in steps for k in range(4)]
    assert Counter(text for text in texts if text[0] == "a") == {f"a {i}": 4 for i in range(5)}


def test_other_sets_are_refused_on_resume_and_more_steps_are_not(tmp_path: Path, tiny_sd3: Path) -> None:
    config, two = nft_toml(tmp_path, tiny_sd3), ({"weight": 3.0}, {"first_step": 2})
    saved = nft_trainer(config, *set_options(tmp_path, *two), start=False).fingerprint()
    compare(tmp_path, saved, nft_trainer(config, *set_options(tmp_path, *two, steps=9), start=False).fingerprint())
    for other in (({"weight": 3.0000001}, two[1]), (two[0], {"first_step": 3}), (two[0], {**two[1], "label": "x"})):
        now = nft_trainer(config, *set_options(tmp_path, *other), start=False).fingerprint()
        with pytest.raises(UserError, match=r"was saved with prompt sets .* 'first: 5 prompts \(\w{12}\), weight 3"):
            compare(tmp_path, saved, now)
    one = nft_trainer(config, start=False).fingerprint()
    with pytest.raises(UserError, match="was saved with prompt sets"):
        compare(tmp_path, saved, one)


def test_rows_with_sizes_are_refused_with_several_sets(tmp_path: Path, tiny_sd3: Path, capsys: Any) -> None:
    options = (*set_options(tmp_path), "--policy.diffusers.buckets={sizes = [[32, 32], [16, 32]]}")
    config = nft_toml(tmp_path, tiny_sd3)
    drawn = nft_trainer(config, *options, start=False)
    assert {drawn._samples(step)[0].size for step in range(6)} == {(32, 32), (16, 32)}
    sized = tmp_path / "sized.jsonl"
    sized.write_text('{"prompt": "c", "size": [16, 32]}')
    options = tuple(option.replace("second.txt", "sized.jsonl") for option in options)
    message = "rows name sizes of their samples (policy.diffusers.buckets), which several sets cannot do yet"
    with pytest.raises(UserError) as error:
        nft_trainer(config, *options)
    assert message in str(error.value)
    assert main(["check", "--env", "--config", str(config), *options]) == 2
    assert f"{SETS}.1: {message}" in capsys.readouterr().err


def test_the_guard_knows_all_sets_and_its_texts_are_encoded_before_the_run(tmp_path: Path, tiny_sd3: Path) -> None:
    guard = "--train.train_policy.reward_hacking_guard."
    options = (*set_options(tmp_path, {}, {"first_step": 5}, steps=1), f"{guard}enable=true", f"{guard}samples=4")
    config, cache = nft_toml(tmp_path, tiny_sd3), f"--train.train_policy.cache.dir={tmp_path / 'cache'}"
    task = nft_trainer(config, *options, cache, "--train.train_policy.cache.text=true", start=False)
    measured = {sample.prompt for sample in (*task.guard.probe._own_samples, *task.guard.probe._samples)}
    assert {text for text in measured if text[0] == "b"} == {"b 0", "b 1"}  # the run itself never draws them
    listed = _list_texts(task._config, task._prompts, (), None)
    assert measured <= {text for pairs in listed.values() for text, _ in pairs}


# ---- what the launcher says ------------------------------------------------------------------------------------------


def test_check_prints_sets_stages_and_shares(tmp_path: Path, tiny_sd3: Path, capsys: Any) -> None:
    config = nft_toml(tmp_path, tiny_sd3)
    options = set_options(tmp_path, {"weight": 3.0}, {"first_step": 2, "label": "counting"})
    assert main(["check", "--env", "--config", str(config), *options]) == 0
    report = " ".join(capsys.readouterr().out.split())
    for text in (
        "8 prompts in 2 sets 6 steps (train.max_num_steps; the run is one epoch)",
        f"{SETS}.0: {tmp_path / 'first.txt'}, 5 prompts, sha256:",
        f"{SETS}.1: {tmp_path / 'second.txt'}, 3 prompts, sha256:",
        "steps 0 to 1: first all of the prompts (4 a step)",
        "steps 2 to 5: first 3/4 of the prompts (3 a step), counting 1/4 of the prompts (1 a step)",
    ):
        assert text in report, text
    assert main(["check", "--config", str(config), *options, "--train.train_policy.dataset.mix=steps"]) == 0
    assert "first 3/4 of the steps, counting 1/4 of the steps" in " ".join(capsys.readouterr().out.split())
    assert main(["check", "--config", str(config), *options, "--train.max_num_steps=2"]) == 0
    report = " ".join(capsys.readouterr().out.split())
    assert "never drawn, as the run ends before their first_step: counting" in report
    length = run_length(load_config(config, list(options)), own_data=False)
    assert (length.samples, length.steps, length.saves) == (8, 6, 6)


@pytest.mark.parametrize(
    ("rows", "steps", "message"),
    [
        (({}, {}), None, "train.max_num_steps: missing; with train.train_policy.dataset.sets it is the length of"),
        (({"last_step": 2}, {"first_step": 4}), 6, f"{SETS}: none is drawn in step 2 of train.max_num_steps = 6"),
        (({"first_step": 1}, {"first_step": 4}), 6, f"{SETS}: none is drawn in step 0"),
        (({}, {"first_step": 4, "last_step": 4}), 6, f"{SETS}.1.last_step: found 4; allowed: more than first_step = 4"),
        (({"label": "x"}, {"label": "x"}), 6, f'{SETS}.1.label: found "x", as sets.0 has; allowed: a name of its own'),
        (({}, {"name": "ocr"}), 6, f"{SETS}.1: found both of name and local_dir; allowed: one of them"),
        (({}, {"local_dir": ""}), 6, f"{SETS}.1: found neither of name and local_dir"),
        (({}, {"label": "a/b"}), 6, f'{SETS}: found the label "a/b"; allowed: one without "/"'),
        (({}, {"weight": 0.0}), 6, f"{SETS}.1.weight: found 0.0; allowed: a number > 0"),
        (({}, {"wieght": 1.0}), 6, f"{SETS}.1.wieght: unknown key; did you mean {SETS}.weight?"),
    ],
)
def test_sets_that_make_no_sense_are_refused(
    tmp_path: Path, tiny_sd3: Path, rows: Any, steps: int | None, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(nft_toml(tmp_path, tiny_sd3), list(set_options(tmp_path, *rows, steps=steps)))
    assert message in str(error.value)


def test_sets_next_to_one_set_in_another_job_or_with_epochs_are_refused(tmp_path: Path, tiny_sd3: Path) -> None:
    config, (_, *options) = nft_toml(tmp_path, tiny_sd3), set_options(tmp_path)
    for extra, message in (
        ("", "dataset.sets: given together with local_dir; allowed: one of them"),
        ('validation.dataset.sets=[{name = "ocr"}]', "validation.dataset.sets: found 1 of them; allowed only in"),
        ("train.train_policy.dataset.split=test", "dataset.sets: given together with split; allowed: one of them"),
        ("train.ckpt.save_freq_in_epoch=1", "train.ckpt.save_freq_in_epoch: found 1; allowed: unset with"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(config, [*options, f"--{extra}"] if extra else options)
        assert message in str(error.value)
    with pytest.raises(ConfigError, match='dataset.mix: found "steps"; allowed with .*dataset.sets only'):
        load_config(config, ["--train.train_policy.dataset.mix=steps"])
    path = tmp_path / "sft.toml"
    path.write_text('policy.model_name_or_path = "x"\ntrain.train_policy.dataset.sets = [{ name = "ocr" }]\n')
    with pytest.raises(ConfigError, match="dataset.sets: found 1 of them; allowed only in reinforcement learning"):
        load_config(path, [])


def test_a_file_that_is_wrong_is_named_by_its_set(tmp_path: Path, tiny_sd3: Path, capsys: Any) -> None:
    config, options = nft_toml(tmp_path, tiny_sd3), set_options(tmp_path)
    (tmp_path / "second.txt").write_text("\n")
    assert main(["check", "--env", "--config", str(config), *options]) == 2
    message = f"{SETS}.1: {tmp_path / 'second.txt'}: holds no list of prompts: it is empty"
    assert message in capsys.readouterr().err
    with pytest.raises(UserError) as error:
        nft_trainer(config, *options)
    assert message in str(error.value)
    gone = tuple(option.replace("second.txt", "gone.txt") for option in options)
    assert main(["check", "--env", "--config", str(config), *gone]) == 2
    assert f'{SETS}.1.local_dir = "{tmp_path / "gone.txt"}"' in capsys.readouterr().err


# ---- runs ------------------------------------------------------------------------------------------------------------

LEFT, RIGHT = PromptRecord("a point"), PromptRecord("another point", prompt_set=1)


def toy_task(steps: int, *, seed: int = 0, **changes: Any) -> OnlineTask:
    tables = {
        "train.train_batch_per_replica": 24,
        "train.max_num_steps": steps,
        "train.ckpt.save_freq": 2,
        "train.ckpt.save_mode": "sync",
        "train.ckpt.max_keep": -1,
        "rollout.n_generation": 4,
        "policy.diffusers.timesteps_fraction": 0.4,
        "train.train_policy.mini_batch": 8,
        SETS: [
            {"name": "ocr", "weight": 2.0, "last_step": 5, "rewards": ["b"]},
            {"name": "geneval", "first_step": 1, "rewards": ["r"]},
        ],
        **changes,
    }
    return toy_trainer(
        toy_config(tables), PlaneModel(seed=seed), [LEFT, RIGHT] * 3, reward_fns={"b": bump, "r": rightwards}
    )


def test_a_run_that_ended_within_a_stage_continues_bit_for_bit(tmp_path: Path) -> None:
    task = toy_task(8)
    folder = run_folder.create_run(tmp_path)
    TrainLoop(task._config, folder, task._context, task, (), {}, Never()).run(None)
    lines, state = metrics_of(tmp_path), saved_state(folder.root, 8)
    drop_steps_after(folder.root, 4)
    resumed = toy_task(8, seed=9)  # other weights, which must not count
    place = layout.policy_dir(folder.checkpoints, 4)
    TrainLoop(resumed._config, folder, resumed._context, resumed, (), {}, Never()).run(place)
    assert_same_state(saved_state(folder.root, 8), state)
    timed = ("time/", "memory/")
    for before, after in zip(lines, metrics_of(tmp_path), strict=True):
        assert {k: v for k, v in after.items() if not k.startswith(timed)} == {
            k: v for k, v in before.items() if not k.startswith(timed)
        }


@pytest.mark.zoo
def test_two_ranks_draw_and_score_what_one_does(tmp_path: Path, tiny_sd3: Path) -> None:
    config = nft_toml(tmp_path, tiny_sd3, lora=False)
    functions = ", ".join(f'{{function = "tests.support.nft_rewards:smooth", name = "{name}"}}' for name in ("x", "y"))
    rows = ({"weight": 2.0, "rewards": ["x"]}, {"first_step": 1, "rewards": ["y"]})
    options = (*set_options(tmp_path, *rows, steps=3), f"--train.train_policy.local_reward.reward_fns=[{functions}]")
    options += ("--train.train_policy.mini_batch=2", "--train.optm_lr=1e-4", "--train.ckpt.enable_checkpoint=false")
    for ranks in (1, 2):
        run_forked([Job(config, tmp_path / f"{ranks}", options)], ranks, tmp_path)
    prompts = [record_of(tmp_path / "1")] + [record_of(tmp_path / "2", rank) for rank in (0, 1)]
    assert prompts[0][1].prompts == prompts[1][1].prompts == prompts[2][1].prompts
    one, two = (list(read_metrics(tmp_path / ranks / "metrics.jsonl")) for ranks in ("1", "2"))
    assert ["reward/second/mean" in line for line in one] == [False, True, True]
    for name in ("reward/mean", "reward/first/mean", "reward/x_mean"):
        np.testing.assert_allclose([line[name] for line in two], [line[name] for line in one], rtol=1e-5)
