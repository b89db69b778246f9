"""Which steps are saved, which one `best` leads to, and that neither it nor the newest is ever removed."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl.checkpoint import layout
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SFTTrainer
from cosmos_rl.policy.trainer.task import ValidationReport
from tests.support.trainer_runs import Stop, train, train_task

VALIDATION = '[validation]\nenable = true\nfreq = 1\ndataset.local_dir = "{}"'


def with_losses(*losses: float) -> Callable[..., SFTTrainer]:
    """Builds a task whose validation after step 1, 2, ... reports the given losses."""

    class Scripted(SFTTrainer):
        def validate(self, step: int, notify: Any) -> ValidationReport:
            return ValidationReport({"val/loss_mean": losses[step - 1]}, objective=losses[step - 1])

    return functools.partial(build_sft, trainer=Scripted)


def steps(run: Path, folder: str = "checkpoints") -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in (run / folder).iterdir())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_best_leads_to_the_lowest_held_out_loss_and_survives_retention(
    write_toml: Callable[..., Path], image_folder: Path, mode: str
) -> None:
    task = with_losses(5, 2, float("nan"), 2, 4, 3)
    options = ("--train.ckpt.save_freq=1", "--train.ckpt.max_keep=1", f"--train.ckpt.save_mode={mode}")
    run, _ = train_task(task, write_toml(VALIDATION.format(image_folder)), *options)
    assert os.readlink(run / "best") == "checkpoints/step_2"
    assert steps(run) == steps(run, "safetensors") == [2, 6]
    assert layout.find_checkpoint(run / "best") == layout.policy_dir(run / "checkpoints", 2)


def test_only_steps_that_are_saved_can_be_the_best(write_toml: Callable[..., Path], image_folder: Path) -> None:
    config = write_toml(VALIDATION.format(image_folder))
    options = ("--train.ckpt.save_freq=2", "--train.ckpt.max_keep=1")
    run, _ = train_task(with_losses(1, 5, 0, 4, 1, 6), config, *options)
    assert os.readlink(run / "best") == "checkpoints/step_4"
    assert steps(run) == [4, 6]


def test_a_resumed_run_knows_the_best_of_before(write_toml: Callable[..., Path], image_folder: Path) -> None:
    stop = Stop()

    def ask_at_three(metrics: dict[str, object], step: int) -> None:
        if step == 3:
            stop.requested = "SIGTERM"

    task, config = with_losses(5, 2, 3, 2.5, 4, 3), write_toml(VALIDATION.format(image_folder))
    options = ("--train.ckpt.save_freq=1", "--train.ckpt.max_keep=1")
    run, _ = train_task(task, config, *options, custom_logger_fns=[ask_at_three], stop=stop, expect=75)
    assert steps(run) == [2, 3]
    state = json.loads((layout.policy_dir(run / "checkpoints", 3) / layout.TRAINER_STATE).read_text())
    assert state["loop"]["best"] == [2, 2]
    (run / "best").unlink()  # as if the process had died before it made the link
    train_task(task, config, *options, resume=(run, 3))
    assert os.readlink(run / "best") == "checkpoints/step_2"
    assert steps(run) == [2, 6]


def test_without_checkpoints_best_leads_to_the_export(write_toml: Callable[..., Path], image_folder: Path) -> None:
    config = write_toml(VALIDATION.format(image_folder))
    run, _ = train_task(with_losses(5, 2, 3, 2, 4, 3), config, "--train.ckpt.enable_checkpoint=false")
    assert os.readlink(run / "best") == "safetensors/step_6"
    assert not (run / "checkpoints/step_6").exists()


def test_without_a_held_out_loss_there_is_no_best(write_toml: Callable[..., Path]) -> None:
    assert not (train(write_toml(), "--train.max_num_steps=1") / "best").is_symlink()


@pytest.mark.parametrize(("epochs", "saved"), [(1, [3, 6, 9, 10]), (2, [6, 10])])
def test_saves_fall_on_the_ends_of_epochs(write_toml: Callable[..., Path], epochs: int, saved: list[int]) -> None:
    options = (f"--train.ckpt.save_freq_in_epoch={epochs}", "--train.ckpt.save_freq=1", "--train.max_num_steps=10")
    run = train(write_toml(), *options)  # 12 images, 4 per step: 3 steps are an epoch
    assert steps(run) == saved


def test_the_last_line_says_which_limit_ended_the_run(
    write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--train.epoch=2", "--train.train_batch_per_replica=4")
    train(write_toml(), *options, "--train.max_num_steps=5")
    assert "Finished after 5 steps (train.max_num_steps = 5)" in capsys.readouterr().out
    train(write_toml(), *options, "--train.max_num_steps=100")
    assert "Finished after 6 steps (train.epoch = 2)" in capsys.readouterr().out
