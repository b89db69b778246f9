"""A stopped and resumed run is the undisturbed run, bit for bit."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from cosmos_rl.checkpoint import layout
from cosmos_rl.errors import UserError
from cosmos_rl.policy.trainer.diffusers_trainer import sft_trainer
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.trainer_runs import Stop, train

LORA_EMA = ("--policy.lora.lora_dropout=0.3", "--train.ema_enable=true", "--train.train_policy.caption_dropout=0.3")
FULL = ("--train.ema_enable=true",)
JOBS = {"lora": (True, LORA_EMA), "full": (False, FULL)}


def saved_state(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    policy = layout.policy_dir(run / "checkpoints", step)
    stored = FileSystemReader(policy).read_metadata().state_dict_metadata
    state = {key: torch.zeros(tuple(meta.size), dtype=meta.properties.dtype) for key, meta in stored.items()}
    dcp.load(state, checkpoint_id=policy, no_dist=True)
    return state


def assert_same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert different == []


def drop_steps_after(run: Path, step: int) -> None:
    """Make the run folder look as if the process had died right after the save of ``step``."""
    for folder in (run / "checkpoints", run / "safetensors"):
        for n in layout.committed_steps(folder):
            if n > step:
                shutil.rmtree(layout.step_dir(folder, n))


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("step", [1, 4, 5])
def test_resume_equals_the_undisturbed_run(write_toml: Callable[..., Path], job: str, step: int) -> None:
    lora, options = JOBS[job]
    config = write_toml(lora=lora)
    run = train(config, "--train.ckpt.save_freq=1", "--train.ckpt.max_keep=-1", *options)
    before, lines = saved_state(run, 6), read_metrics(run / "metrics.jsonl")
    assert {key.split(".")[0] for key in before} == {"model", "optim", "ema"}
    drop_steps_after(run, step)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')  # a line cut off by the kill

    train(config, "--train.ckpt.save_freq=1", "--train.ckpt.max_keep=-1", *options, resume=(run, step))
    assert_same_state(saved_state(run, 6), before)
    resumed = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    assert [line["train/loss_mean"] for line in resumed] == [line["train/loss_mean"] for line in lines]


def test_micro_batches_and_checkpointing_do_not_change_the_result(write_toml: Callable[..., Path]) -> None:
    def losses(*options: str) -> list[float]:
        run = train(write_toml(), "--train.max_num_steps=4", *options)
        return [line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl")]

    reference = losses("--train.train_policy.mini_batch=4")
    for options in (
        ("--train.train_policy.mini_batch=1",),
        ("--train.train_policy.mini_batch=2", "--policy.model_gradient_checkpointing=false"),
    ):
        assert losses(*options) == pytest.approx(reference, rel=1e-5)  # float32 summation order


def test_a_stop_request_saves_off_the_cadence_and_says_how_it_ended(write_toml: Callable[..., Path]) -> None:
    stop = Stop()

    def ask_at_three(metrics: dict[str, object], step: int) -> None:
        if step == 3:
            stop.requested = "SIGTERM"

    config = write_toml()
    run = train(config, "--train.ckpt.save_freq=5", custom_logger_fns=[ask_at_three], stop=stop, expect=75)
    assert layout.whole_steps(run / "checkpoints") == [3]
    train(config, "--train.ckpt.save_freq=5", resume=(run, 3))
    assert layout.whole_steps(run / "checkpoints") == [3, 5, 6]
    undisturbed = train(config, "--train.ckpt.save_freq=5")
    assert_same_state(saved_state(run, 6), saved_state(undisturbed, 6))


def test_async_saves_hold_the_weights_of_their_step(write_toml: Callable[..., Path]) -> None:
    states = []
    for mode in ("async", "sync"):
        run = train(write_toml(lora=False), f'--train.ckpt.save_mode="{mode}"', "--train.ckpt.save_freq=1")
        states.append([saved_state(run, step) for step in layout.whole_steps(run / "checkpoints")])
    assert len(states[0]) == len(states[1]) == 5  # max_keep
    for one, other in zip(*states, strict=True):
        assert_same_state(one, other)


def test_the_copies_of_two_exports_are_never_there_at_once(
    write_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, most = 0, 0
    prepare = sft_trainer.prepare_export

    def counted(model: Any, **given: Any) -> Callable[[Path], None]:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        write = prepare(model, **given)

        def slow(folder: Path) -> None:
            nonlocal alive
            time.sleep(0.2)  # longer than a step
            write(folder)
            alive -= 1

        return slow

    monkeypatch.setattr(sft_trainer, "prepare_export", counted)
    train(write_toml(), "--train.ckpt.save_freq=1", "--train.max_num_steps=3")
    assert (most, alive) == (1, 0)


def test_only_the_newest_steps_are_kept(write_toml: Callable[..., Path]) -> None:
    run = train(write_toml(), "--train.ckpt.save_freq=1", "--train.ckpt.max_keep=2")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_5", "step_6"]
    assert sorted(p.name for p in (run / "safetensors").iterdir()) == ["step_5", "step_6"]


def test_a_changed_seed_or_batch_is_refused_on_resume(write_toml: Callable[..., Path]) -> None:
    config = write_toml()
    run = train(config, "--train.ckpt.save_freq=3")
    with pytest.raises(UserError, match="seed = 42, this run has 7"):
        train(config, "--train.seed=7", resume=(run, 3))
    with pytest.raises(UserError, match="global_batch_size = 4, this run has 6"):
        train(config, "--train.train_batch_per_replica=6", resume=(run, 3))


def test_a_checkpoint_of_other_weights_is_refused(write_toml: Callable[..., Path]) -> None:
    run = train(write_toml(), "--train.ckpt.save_freq=3")
    with pytest.raises(UserError, match="does not belong to this configuration"):
        train(write_toml(lora=False), resume=(run, 3))
    with pytest.raises(UserError, match=r"policy\.lora\.r = 4, this run has 2"):
        train(write_toml(), "--policy.lora.r=2", resume=(run, 3))


def test_whole_steps_are_told_from_broken_ones(write_toml: Callable[..., Path]) -> None:
    run = train(write_toml(), "--train.ckpt.save_freq=2")
    checkpoints = run / "checkpoints"
    assert layout.whole_steps(checkpoints) == [2, 4, 6]
    shard = next(layout.policy_dir(checkpoints, 6).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    (layout.policy_dir(checkpoints, 4) / layout.COMMIT_MARKER).unlink()
    (checkpoints / ".step_8.tmp").mkdir()
    assert layout.whole_steps(checkpoints) == [2]
    assert set(layout.broken_steps(checkpoints)) == {4, 6}
    state = json.loads((layout.policy_dir(checkpoints, 2) / layout.TRAINER_STATE).read_text())
    assert state["step"] == 2
