"""A stopped and resumed run is the undisturbed run, bit for bit."""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl.checkpoint import layout
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SFTTrainer
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.states import assert_same_state, drop_steps_after, saved_state
from tests.support.trainer_runs import Stop, train, train_task

LORA_EMA = ("--policy.lora.lora_dropout=0.3", "--train.ema_enable=true", "--train.train_policy.caption_dropout=0.3")
FULL = ("--train.ema_enable=true",)
JOBS = {"lora": (True, LORA_EMA), "full": (False, FULL)}


@pytest.mark.slow
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


def test_a_stop_request_saves_off_the_cadence_and_says_how_it_ended(write_toml: Callable[..., Path]) -> None:
    stop = Stop()

    def ask_at_three(metrics: dict[str, object], step: int) -> None:
        if step == 3:
            stop.requested = "SIGTERM"

    config = write_toml()
    run = train(config, "--train.ckpt.save_freq=5", custom_logger_fns=[ask_at_three], stop=stop, expect=75)
    assert layout.list_whole_steps(run / "checkpoints") == [3]
    train(config, "--train.ckpt.save_freq=5", resume=(run, 3))
    assert layout.list_whole_steps(run / "checkpoints") == [3, 5, 6]
    undisturbed = train(config, "--train.ckpt.save_freq=5")
    assert_same_state(saved_state(run, 6), saved_state(undisturbed, 6))


@pytest.mark.slow
def test_async_saves_hold_the_weights_of_their_step(write_toml: Callable[..., Path]) -> None:
    states = []
    for mode in ("async", "sync"):
        run = train(write_toml(lora=False), f'--train.ckpt.save_mode="{mode}"', "--train.ckpt.save_freq=1")
        states.append([saved_state(run, step) for step in layout.list_whole_steps(run / "checkpoints")])
    assert len(states[0]) == len(states[1]) == 5  # max_keep
    for one, other in zip(*states, strict=True):
        assert_same_state(one, other)


def test_the_copies_of_two_exports_are_never_there_at_once(
    write_toml: Callable[..., Path],
) -> None:
    alive, most = 0, 0

    class Counted(SFTTrainer):
        def prepare_export(self) -> Callable[[Path], None]:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            write = super().prepare_export()

            def slow(folder: Path) -> None:
                nonlocal alive
                time.sleep(0.2)  # longer than a step
                write(folder)
                alive -= 1

            return slow

    train_task(
        functools.partial(build_sft, trainer=Counted),
        write_toml(),
        "--train.ckpt.save_freq=1",
        "--train.max_num_steps=3",
    )
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


def test_whole_steps_are_distinguished_from_broken_ones(write_toml: Callable[..., Path]) -> None:
    run = train(write_toml(), "--train.ckpt.save_freq=2")
    checkpoints = run / "checkpoints"
    assert layout.list_whole_steps(checkpoints) == [2, 4, 6]
    shard = next(layout.policy_dir(checkpoints, 6).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    (layout.policy_dir(checkpoints, 4) / layout.COMMIT_MARKER).unlink()
    (checkpoints / ".step_8.tmp").mkdir()
    assert layout.list_whole_steps(checkpoints) == [2]
    assert set(layout.find_broken_steps(checkpoints)) == {4, 6}
    state = json.loads((layout.policy_dir(checkpoints, 2) / layout.TRAINER_STATE).read_text())
    assert state["step"] == 2


def test_saved_state_is_not_taken_for_a_pipeline(write_toml: Callable[..., Path]) -> None:
    run = train(write_toml(), "--train.max_num_steps=1")
    config = load_config(write_toml(), [f"--policy.model_name_or_path={run}/checkpoints/step_1/policy"])
    with pytest.raises(UserError, match="exported pipelines are under safetensors/step_<N>"):
        ModelRegistry.build_diffusers_model(config)


def test_a_changed_order_of_targets_and_untouched_parameters_resume(write_toml: Callable[..., Path]) -> None:
    # the text side of the last block's attention has no path to the output, so its projections get no gradient
    targets = ["attn.to_q", "attn.add_q_proj", "attn.to_add_out"]
    config, options = write_toml(), ("--train.ckpt.save_freq=2", '--train.optm_lr={global = 1e-2, "to_q" = 1e-3}')
    first = f"--policy.lora.target_modules={targets}".replace("'", '"')
    other = f"--policy.lora.target_modules={targets[::-1]}".replace("'", '"')
    calm = train(config, *options, first)
    run = train(config, *options, first, "--train.max_num_steps=2")
    train(config, *options, other, resume=(run, 2))
    assert_same_state(saved_state(run, 6), saved_state(calm, 6))
