"""The process group is killed again and again, also inside a save; the end is the undisturbed run's, bit for bit."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl.checkpoint import layout
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.command_runs import Run, newest_run, steps_done
from tests.support.pairs import marked_folder
from tests.support.states import assert_same_state, saved_state

TOTAL, SAVE_FREQ = 24, 5


def inside_a_save(output: Path) -> bool:
    run = newest_run(output)
    return run is not None and any((run / "checkpoints").glob(".step_*.tmp/policy"))


@pytest.mark.process
@pytest.mark.parametrize(
    ("lora", "kills"),
    [
        pytest.param(False, (8, None), id="full, twice"),
        pytest.param(False, (3, 8, None, 17, 21), id="full", marks=pytest.mark.zoo),
        pytest.param(True, (3, 8, None, 17, 21), id="lora and ema", marks=pytest.mark.zoo),
    ],
)
def test_a_run_killed_again_and_again_ends_like_the_undisturbed_one(
    write_toml: Callable[..., Path], tmp_path: Path, lora: bool, kills: tuple[int | None, ...]
) -> None:
    """Killed at steps off the save cadence, or (None) while one is written."""
    options = [f"--train.max_num_steps={TOTAL}", f"--train.ckpt.save_freq={SAVE_FREQ}", "--train.resume=true"]
    options += ["--train.train_batch_per_replica=6", f"--train.ema_enable={str(lora).lower()}"]
    config = write_toml(lora=lora)
    undisturbed = Run(config, tmp_path / "log", f"--train.output_dir={tmp_path / 'calm'}", *options)
    assert undisturbed.finish() == 0, (tmp_path / "log").read_text()[-3000:]
    # a user's first screen holds our lines and no library's
    assert [line for line in (tmp_path / "log").read_text().splitlines() if not line.startswith("[cosmos] ")] == []

    chance = random.Random(0 if lora else 1)
    output = tmp_path / "killed"
    for step in kills:
        run = Run(config, tmp_path / "log", f"--train.output_dir={output}", *options)
        if step is None:
            run.kill_group_when(lambda: inside_a_save(output))
        else:
            run.kill_group_when(lambda step=step: steps_done(output) >= step, wait_s=chance.uniform(0.0, 0.08))
    last = Run(config, tmp_path / "log", f"--train.output_dir={output}", *options)
    assert last.finish() == 0, (tmp_path / "log").read_text()[-3000:]
    assert_same_end(output, tmp_path / "calm", TOTAL)


@pytest.mark.zoo
@pytest.mark.process
def test_a_run_on_buckets_killed_in_an_epoch_ends_like_the_undisturbed_one(
    write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    """An epoch has 5 steps: two on tall, two on wide and one on square pictures. Killed in the second epoch."""
    total, tall, wide, square = 14, (96, 32), (32, 96), (32, 32)
    folder = marked_folder(tmp_path / "marked", [tall, wide, square, tall, wide, wide, tall, square, wide, tall])
    options = [f'--train.train_policy.dataset.local_dir="{folder}"', "--train.train_batch_per_replica=2"]
    options += ["--policy.diffusers.buckets={sizes = [[32, 32], [96, 32], [32, 96]]}", "--train.resume=true"]
    options += [f"--train.max_num_steps={total}", "--train.ckpt.save_freq=3", "--train.ckpt.export_safetensors=false"]
    config, log, output = write_toml(), tmp_path / "log", tmp_path / "killed"
    assert Run(config, log, f"--train.output_dir={tmp_path / 'calm'}", *options).finish() == 0, log.read_text()[-3000:]
    run = Run(config, log, f"--train.output_dir={output}", *options)
    run.kill_group_when(lambda: steps_done(output) >= 7)
    killed = newest_run(output)
    assert killed is not None
    assert layout.list_whole_steps(killed / "checkpoints")[-1] % 5 != 0  # inside an epoch
    assert Run(config, log, f"--train.output_dir={output}", *options).finish() == 0, log.read_text()[-3000:]
    assert_same_end(output, tmp_path / "calm", total)


def assert_same_end(killed: Path, undisturbed: Path, total: int) -> None:
    """Both outputs have one run of ``total`` steps with the same bits and the same losses, and nothing half-written."""
    calm, survivor = newest_run(undisturbed), newest_run(killed)
    assert calm is not None
    assert survivor is not None
    assert len(list(killed.glob("2*"))) == 1
    assert_same_state(saved_state(survivor, total), saved_state(calm, total))
    lines = read_metrics(survivor / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, total + 1))
    expected = [line["train/loss_mean"] for line in read_metrics(calm / "metrics.jsonl")]
    assert [line["train/loss_mean"] for line in lines] == expected
    assert layout.find_broken_steps(survivor / "checkpoints") == {}
    assert not list((survivor / "checkpoints").glob(".*"))
    assert (killed / "checkpoints").resolve() == survivor / "checkpoints"
