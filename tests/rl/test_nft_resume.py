"""A DiffusionNFT run that was stopped, killed or resumed anywhere is the undisturbed run, bit for bit."""

import json
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl.checkpoint import layout
from cosmos_rl.errors import UserError
from tests.rl.test_flow_grpo_pipeline import WINDOW, ddrl_options, flow_options
from tests.support.kills import run_with_kills
from tests.support.nft_runs import Job, nft_toml, nft_train, prompt_file, run_forked
from tests.support.states import assert_same_state, drop_steps_after, logged_numbers, saved_state

GUARDED = (
    "--train.ema_enable=true",
    "--train.train_policy.reward_hacking_guard.enable=true",
    "--train.train_policy.reward_hacking_guard.freq=2",
    "--train.train_policy.reward_hacking_guard.samples=4",
    "--train.train_policy.reward_hacking_guard.action=warn",
    "--validation.enable=true",
    "--validation.freq=3",
    '--validation.local_reward.reward_fns=[{function = "cosmos_rl.reward.examples:brightness"}]',
)
SEVERAL = ("--train.train_policy.batch_size_per_optimize=8",)
JOBS = {
    "lora": (True, ("--policy.lora.lora_dropout=0.3", "--policy.diffusers.weight_copy_decay_type=2", *SEVERAL)),
    "copies": (False, ("--policy.diffusers.weight_copy_decay_type=1", "--train.ema_enable=false")),
    "hard copies, several steps": (False, ("--policy.diffusers.weight_copy_decay_type=0", *SEVERAL)),
}


def kept(run: Path, step: int) -> dict[str, Any]:
    return json.loads((layout.policy_dir(run / "checkpoints", step) / layout.TRAINER_STATE).read_text())


def options_of(folder: Path, *, sets: bool = False) -> tuple[str, ...]:
    """``sets``: two validation sets, the second only at the last step."""
    prompts = prompt_file(folder, ("a hat", "a lost hat"), "val.txt")
    few = ("--policy.diffusers.sample.num_steps=3", "--policy.diffusers.timesteps_fraction=0.7")
    data = (f"--validation.dataset.local_dir={prompts}",)
    if sets:
        both = f'{{dataset = {{local_dir = "{prompts}"}}}}, {{name = "b", freq = 6, num_steps = 2, n_generation = 2}}'
        both = both.replace("freq", f'dataset = {{local_dir = "{prompts}", limit = 1}}, freq')
        data = (f"--validation.sets=[{both}]", "--validation.freq=2")
    return (*GUARDED, *few, *data, "--train.max_num_steps=3")


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_resume_from_any_step_is_the_undisturbed_run(tmp_path: Path, tiny_sd3: Path, name: str) -> None:
    lora, given = JOBS[name]
    config = nft_toml(tmp_path, tiny_sd3, lora=lora)
    options = (*options_of(tmp_path, sets=name == "copies"), *given)
    run = nft_train(config, *options)
    state, lines, progress = saved_state(run, 3), logged_numbers(run), kept(run, 3)
    assert {key.split(".")[0] for key in state} >= {"model", "optim", "old", "guard"}
    assert [line["step"] for line in lines] == [1, 2, 3]
    if name == "copies":
        assert [("val/val/samples" in line, "val/b/samples" in line) for line in lines[1:]] == [(1, 0), (1, 1)]
    for step in (2, 1):
        drop_steps_after(run, step)
        nft_train(config, *options, resume=(run, step))
        assert_same_state(saved_state(run, 3), state)
        assert kept(run, 3) == progress
        assert logged_numbers(run) == lines


def test_another_reward_is_reported_and_other_prompts_are_refused_on_resume(
    tmp_path: Path, tiny_sd3: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmos_rl.utils.logging.logger.propagate", True)
    few = ("--policy.diffusers.sample.num_steps=2", "--train.max_num_steps=1", "--train.ckpt.save_freq=1")
    file = tmp_path / "own_reward.py"
    file.write_text("def bright(to_be_evaluated):\n    return float(to_be_evaluated.mean()) / 255\n")
    ours = f'--train.train_policy.local_reward.reward_fns=[{{function = "{file}:bright"}}]'
    config = nft_toml(tmp_path, tiny_sd3)
    run = nft_train(config, *few, ours)
    more = (*few, "--train.max_num_steps=2")
    nft_train(config, *more, ours, resume=(run, 1))
    assert "rewards are not those" not in caplog.text

    for module in [name for name in sys.modules if name.startswith("cosmos_reward_file_")]:
        del sys.modules[module]  # as in a process of its own
    linecache.clearcache()
    file.write_text("def bright(to_be_evaluated):\n    return 1 - float(to_be_evaluated.mean()) / 255\n")
    drop_steps_after(run, 1)
    nft_train(config, *more, ours, resume=(run, 1))
    assert "not those of the run that is resumed (bright: other function or weight" in caplog.text

    others = prompt_file(tmp_path, ("a boat", "a lost boat", "a tree", "a lost tree"), "others.txt")
    drop_steps_after(run, 1)
    with pytest.raises(UserError, match="was saved with prompts = '.* this run has '"):
        nft_train(config, *more, ours, f"--train.train_policy.dataset.local_dir={others}", resume=(run, 1))


@pytest.mark.process
@pytest.mark.parametrize(
    "name", ["lora", *(pytest.param(name, marks=pytest.mark.zoo) for name in ("hard copies, several steps", "ddrl"))]
)
def test_a_run_killed_at_random_moments_ends_like_the_undisturbed_one(
    tmp_path: Path, tiny_sd3: Path, image_folder: Path, name: str
) -> None:
    ranks = 2 if name == "hard copies, several steps" else 1
    if name == "ddrl":
        lora, given = False, (*flow_options(lora=False), *WINDOW, *ddrl_options(image_folder))
    else:
        lora, given = JOBS[name]
    given = tuple(option.replace("optimize=8", f"optimize={8 // ranks}") for option in given)
    total = 6
    options = (*options_of(tmp_path), *given, f"--train.max_num_steps={total}", "--train.ckpt.save_freq=3")
    config = nft_toml(tmp_path, tiny_sd3, lora=lora)
    calm = Job(config, tmp_path / "calm", options)
    run_forked([calm], ranks, tmp_path)
    # off the cadence, and one before the first save
    killed = run_with_kills(config, tmp_path, options, total=total, kill_after=(2, 4), ranks=ranks, seed=len(name))

    assert_same_state(saved_state(killed, total), saved_state(calm.folder, total))
    assert kept(killed, total) == kept(calm.folder, total)
    assert logged_numbers(killed) == logged_numbers(calm.folder)
    assert [line["step"] for line in logged_numbers(killed)] == list(range(1, total + 1))


def test_a_run_of_another_version_is_not_resumed(tmp_path: Path, tiny_sd3: Path) -> None:
    config = nft_toml(tmp_path, tiny_sd3)
    run = nft_train(config, "--train.max_num_steps=1")
    path = run / "checkpoints/step_1/policy/trainer_state.json"
    state = json.loads(path.read_text())
    del state["task"]["guard"]
    path.write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"was saved by another version of cosmos-rl \(it has no 'guard'\)"):
        nft_train(config, resume=(run, 1))
