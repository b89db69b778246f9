"""Runs of every kind of algorithm that are killed end like the undisturbed ones, bit for bit, with what they keep: a
reference that moves, the place of a window, margins, teachers. DiffusionNFT and DDRL are in `test_nft_resume.py`."""

from pathlib import Path

import pytest

from tests.rl.test_flow_grpo_pipeline import LAGGED, flow_options
from tests.rl.test_nft_resume import kept
from tests.rl.test_teachers_of_sets import export_teachers, set_options
from tests.support.kills import run_with_kills
from tests.support.nft_runs import Job, nft_toml, run_forked
from tests.support.states import assert_same_state, logged_numbers, saved_state

TOTAL = 9
MOVING = ("--train.train_policy.kl_beta=0.1", "--train.train_policy.reference_reset_interval=4")
WINDOW = '--train.train_policy.steps={choose = "window", size = 2, order = "progressive", interval = 2}'
JOBS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "flow_grpo": (True, (*flow_options(lora=True), *LAGGED, WINDOW)),
    "awm": (False, ("--train.train_policy.trainer_type=awm", *MOVING, "--train.train_policy.reference_reset_kl=1e-3")),
    "online_dpo": (
        True,
        (
            "--train.train_policy.trainer_type=online_dpo",
            "--policy.diffusers.weight_copy_decay_type=0",
            "--train.train_policy.dpo_auto_beta.target_factor=0.2",
            *MOVING,
        ),
    ),
    "distillation": (True, ()),
}
KEPT = {"flow_grpo": "reference", "awm": "reference", "online_dpo": "reference", "distillation": "teacher2"}


@pytest.mark.zoo
@pytest.mark.process
@pytest.mark.parametrize("name", JOBS)
def test_a_run_killed_at_random_moments_ends_like_the_undisturbed_one(
    tmp_path: Path, tiny_sd3: Path, name: str
) -> None:
    lora, options = JOBS[name]
    if name == "distillation":
        options = set_options(tmp_path, export_teachers(tmp_path, tiny_sd3, lora))
    options = (*options, f"--train.max_num_steps={TOTAL}", "--train.ckpt.save_freq=3", "--train.ema_enable=true")
    config = nft_toml(tmp_path, tiny_sd3, lora=lora)
    calm = Job(config, tmp_path / "calm", options)
    run_forked([calm], 1, tmp_path)
    killed = run_with_kills(
        config, tmp_path, options, total=TOTAL, kill_after=(2, 5), ranks=1, seed=len(name), delay_s=0.1
    )
    end = saved_state(calm.folder, TOTAL)
    assert KEPT[name] in {key.split(".")[0] for key in end}
    assert_same_state(saved_state(killed, TOTAL), end)
    assert kept(killed, TOTAL) == kept(calm.folder, TOTAL)
    assert logged_numbers(killed) == logged_numbers(calm.folder)
    assert [line["step"] for line in logged_numbers(killed)] == list(range(1, TOTAL + 1))
