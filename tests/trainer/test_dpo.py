"""Offline DPO of a pipeline: its start, resumes, ranks, caches, validation, and what check and doctor say of it."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cosmos_rl.checkpoint import layout
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.checks import check, marks
from tests.support.exports import export_policy
from tests.support.nft_runs import Job, moved_away, nft_toml, nft_trainer, run_forked
from tests.support.states import assert_same_state, drop_steps_after, saved_state, trace
from tests.support.trainer_runs import train

Toml = Callable[..., Path]


@pytest.fixture(scope="module")
def rejected(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A flat image under the name of each captioned one."""
    folder = tmp_path_factory.mktemp("rejected")
    for number, path in enumerate(sorted(image_folder.glob("*.png"))):
        Image.new("RGB", (48, 40), (20 * number, 60, 120)).save(folder / path.name)
    return folder


def dpo(rejected: Path, *more: str) -> tuple[str, ...]:
    return ("--train.train_policy.type=dpo", f"--train.train_policy.dataset.rejected_dir={rejected}", *more)


def start_adapter(folder: Path, base: Path) -> Path:
    export_policy(moved_away(nft_trainer(nft_toml(folder, base), start=False)), folder / "start")
    return folder / "start" / "lora"


@pytest.mark.zoo
@pytest.mark.parametrize("start", ["base", "adapter", "all weights"])
def test_a_run_starts_at_the_reference_learns_and_resumes_exactly(
    write_toml: Toml, tiny_sd3: Path, image_folder: Path, rejected: Path, tmp_path: Path, start: str
) -> None:
    config = write_toml(lora=start != "all weights")
    options = dpo(
        rejected,
        "--train.ckpt.save_freq=1",
        "--train.ckpt.max_keep=-1",
        "--train.ema_enable=true",
        "--train.optm_lr=1e-3",
        "--train.max_num_steps=5",
        "--validation.enable=true",
        "--validation.val_before_train=true",
        "--policy.diffusers.sample.num_steps=1",
        f"--validation.dataset.local_dir={image_folder}",
        f"--validation.dataset.rejected_dir={rejected}",
    )
    if start == "adapter":
        options += (f"--policy.lora.lora_path={start_adapter(tmp_path, tiny_sd3)}", "--policy.lora.lora_dropout=0.1")
    run = train(config, *options)
    state, lines = saved_state(run, 5), read_metrics(run / "metrics.jsonl")
    assert lines[0]["val/loss_mean"] == pytest.approx(math.log(2), abs=1e-5)
    if start != "adapter":  # its dropout acts on the trained policy alone
        assert lines[1]["train/loss_mean"] == pytest.approx(math.log(2), abs=1e-5)
        assert lines[1]["train/gradient_factor_mean"] == pytest.approx(0.5, abs=1e-5)
    assert lines[-1]["val/loss_mean"] < 0.9 * math.log(2)
    assert lines[-1]["val/accuracy_mean"] > 0.7
    assert lines[-1]["val/margin_mean"] < 0.0
    kept = {"model", "optim", "ema"} | ({"reference"} if start == "adapter" else set())
    assert {key.partition(".")[0] for key in state} == kept
    report = (run / "report.html").read_text()
    for text in ("Preferences fitted better than by the reference", "Margin of the preferences", "less that of the"):
        assert text in report
    drop_steps_after(run, 2)
    train(config, *options, resume=(run, 2))
    assert_same_state(saved_state(run, 5), state)


@pytest.mark.zoo
@pytest.mark.process
def test_two_ranks_give_the_result_of_one(write_toml: Toml, rejected: Path, tmp_path: Path) -> None:
    configs = {name: write_toml(lora=name == "lora", name=f"{name}.toml") for name in ("lora", "full")}
    options = dpo(
        rejected,
        "--train.global_batch_size=8",
        "--train.optm_lr=1e-4",
        "--train.max_num_steps=3",
        "--train.epoch=20",
        "--train.ckpt.enable_checkpoint=false",
        "--train.train_policy.dpo_beta=100.0",
        "--train.train_policy.dataset.test_size=3",
        "--validation.enable=true",
        "--policy.diffusers.sample.num_steps=1",
    )
    for ranks in (1, 2):
        jobs = [Job(config, tmp_path / name / str(ranks), options) for name, config in configs.items()]
        run_forked(jobs, ranks, tmp_path)
    for name in configs:
        one, two = (tmp_path / name / str(ranks) for ranks in (1, 2))
        # margins are differences of errors, times dpo_beta
        np.testing.assert_allclose(trace(two), trace(one), rtol=1e-5, atol=1e-5, err_msg=name)
        held_out = [read_metrics(run / "metrics.jsonl")[-1]["val/loss_mean"] for run in (one, two)]
        assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)
        assert abs(held_out[0] - math.log(2)) > 1e-5  # something was learnt


@pytest.mark.zoo
def test_caches_prompts_and_a_table_are_read(
    write_toml: Toml, image_folder: Path, rejected: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"number {i}", "chosen": str(image_folder / f"{i:03d}.png"), "rejected": str(rejected / "000.png")}
        for i in range(1, 9)
    ]
    table = tmp_path / "preferences.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a number\n")
    options = (
        "--train.train_policy.type=dpo",
        f"--train.train_policy.dataset.local_dir={table}",
        "--validation.enable=true",
        f"--validation.dataset.local_dir={prompts}",
        "--train.max_num_steps=5",
        "--train.optm_lr=1e-3",
    )
    cache = ("--train.train_policy.enable_dataset_cache=true", f"--train.train_policy.cache.dir={tmp_path / 'cache'}")
    runs = [train(write_toml(), *options, *more) for more in ((), cache, cache)]
    losses = [[line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl")] for run in runs]
    assert losses[1] == losses[2]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert list((runs[0] / "media/validation").rglob("*.png"))
    assert layout.list_whole_steps(runs[0] / "checkpoints") == [5]
    held_out = ("--train.train_policy.dataset.test_size=3", "--validation.dataset.local_dir=")
    run = train(write_toml(), *options, *held_out, "--train.max_num_steps=1")
    assert read_metrics(run / "metrics.jsonl")[-1]["val/gradient_factor_mean"] < 0.5


@pytest.mark.zoo
def test_the_doctor_tries_a_preference(write_toml: Toml, rejected: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for lora in (True, False):
        code, found, out = marks(capsys, "--config", write_toml(lora=lora), *dpo(rejected))
        assert (code, found["forward"], found["backward"], found["export"]) == (0, "ok", "ok", "ok"), out
        assert "loss 0.6931 on 2 preferences; at the reference it is ln 2 = 0.6931" in out


def test_check_counts_preferences_and_two_rows_for_each(
    write_toml: Toml, rejected: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, _ = check(capsys, "--config", write_toml(), *dpo(rejected))
    assert code == 0
    for text in (
        "4 preferences per step = 1 x 4",
        "each of 2 samples, run by the reference too",
        "a rank takes its 4 in 2 micro-batches of 2",
        "12 preferences in",
    ):
        assert text in report, text
    _, whole, _ = check(capsys, "--config", write_toml(lora=False), *dpo(rejected))
    _, fine, _ = check(capsys, "--config", write_toml(lora=False))
    assert [bool(re.search(r"reference [\d.]+ \w?B", text)) for text in (whole, fine, report)] == [True, False, False]


def test_check_names_what_is_missing(
    write_toml: Toml, rejected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = check(capsys, "--config", write_toml(), "--env", "--train.train_policy.type=dpo")
    assert (code, "has no rejected_dir" in errors) == (2, True)
    (tmp_path / "worse").mkdir()
    code, _, errors = check(capsys, "--config", write_toml(), "--env", *dpo(tmp_path / "worse"))
    assert (code, "has no file with the name of a chosen one" in errors) == (2, True)
    code, _, errors = check(capsys, "--config", write_toml(), *dpo(rejected), "--train.train_policy.kl_beta=1.0")
    assert code == 2
    assert 'belongs to type = "grpo"' in errors
    code, report, _ = check(capsys, "--config", write_toml(), f"--train.train_policy.dataset.rejected_dir={rejected}")
    assert code == 0
    assert "Keys of other jobs that this one does not read: train.train_policy.dataset.rejected_dir" in report
