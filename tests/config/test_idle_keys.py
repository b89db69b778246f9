"""Keys of reinforcement learning that are set and do not act, or contradict each other, and what is said of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl.policy.config import ConfigError, load_config, notes
from cosmos_rl.policy.config.presets import PRESETS

JOB, GUARD = "train.train_policy", "train.train_policy.reward_hacking_guard"
BASE = """mode = "colocated"
[policy]
model_name_or_path = "some/pipeline"
is_diffusers = true
[policy.diffusers.sample]
deterministic_sampling = true
[rollout]
n_generation = 4
[train]
train_batch_per_replica = 8
[train.train_policy]
type = "grpo"
trainer_type = "diffusion_nft"
uncentralized_training = true
"""
FLOW = [
    f"{JOB}.trainer_type=flow_grpo",
    "policy.diffusers.sample.solver=flow",
    "policy.diffusers.sample.deterministic_sampling=false",
]
NOTHING_OFF = [f"{JOB}.kl_beta=0.1", f"{JOB}.data_term.beta=0.1", f"{JOB}.data_term.local_dir=images"]


def idle(tmp_path: Path, overrides: list[str]) -> list[str]:
    path = tmp_path / "config.toml"
    path.write_text(BASE, encoding="utf-8")
    return [line for line in notes(load_config(path, overrides)) if line.startswith("Keys that do not act")]


@pytest.mark.parametrize(
    ("trainer", "keys"),
    [
        ("diffusion_nft", ["steps.choose=window", "epsilon_low=0.1", "kl_mask_threshold=1e-5", "dpo_beta=3.0"]),
        ("awm", ["epsilon_high=0.1", "logprob_weight=ve", "advantage_transform=exp_reward"]),
        ("online_dpo", ["advantage_low=-2.0", "advantage_mode=binary", "advantage_temperature=10.0"]),
    ],
)
def test_keys_of_other_trainers_are_named(tmp_path: Path, trainer: str, keys: list[str]) -> None:
    overrides = [f"{JOB}.trainer_type={trainer}", *(f"{JOB}.{key}" for key in keys)]
    [line] = idle(tmp_path, overrides)
    named = line.removeprefix(f'Keys that do not act with {JOB}.trainer_type = "{trainer}": ').split(", ")
    assert sorted(named) == sorted(f"{JOB}.{key.partition('=')[0]}" for key in keys)


@pytest.mark.parametrize(
    ("overrides", "setting", "key"),
    [
        ([f"{JOB}.steps.indices=[0,1]"], f'{JOB}.steps.choose = "first"', f"{JOB}.steps.indices"),
        ([f"{JOB}.steps.within=0.5"], f'{JOB}.steps.choose = "first"', f"{JOB}.steps.within"),
        (
            [f"{JOB}.steps.choose=window", f"{JOB}.steps.interval=5"],
            f'{JOB}.steps.order = "random"',
            f"{JOB}.steps.interval",
        ),
        (
            [f"{JOB}.steps.choose=window", f"{JOB}.steps.roll_back=false"],
            f'{JOB}.steps.order = "random"',
            f"{JOB}.steps.roll_back",
        ),
        (
            [f"{JOB}.steps.choose=window", f"{JOB}.steps.order=decay", f"{JOB}.steps.decay_rate=0.2"],
            f'{JOB}.steps.order = "decay"',
            f"{JOB}.steps.decay_rate",
        ),
        (
            [
                f"{JOB}.steps={{choose='window', order='exp_decay', decay_threshold=3}}",
                f"{JOB}.steps.least_interval=2",
            ],
            f'{JOB}.steps.order = "exp_decay"',
            f"{JOB}.steps.least_interval",
        ),
        ([f"{JOB}.steps.decay_threshold=3"], f'{JOB}.steps.choose = "first"', f"{JOB}.steps.decay_threshold"),
        (
            [f"{JOB}.steps.choose=window", "policy.diffusers.timesteps_fraction=0.5"],
            f'{JOB}.steps.choose = "window"',
            "policy.diffusers.timesteps_fraction",
        ),
        (
            [f"{JOB}.kl_mask_threshold=1e-5", f"{JOB}.epsilon_low=0.2"],
            f"{JOB}.kl_mask_threshold = 1e-05",
            f"{JOB}.epsilon_low",
        ),
        (
            [f"{JOB}.on_policy=true", "policy.diffusers.weight_copy_decay_type=1"],
            f"{JOB}.on_policy = true",
            "policy.diffusers.weight_copy_decay_type",
        ),
        ([f"{JOB}.data_term.local_dir=images"], f"{JOB}.data_term.beta = 0", f"{JOB}.data_term.local_dir"),
        ([f"{JOB}.reference_reset_interval=5"], f"{JOB}.kl_beta = 0", f"{JOB}.reference_reset_interval"),
        ([f"{GUARD}.rewind_lr_factor=0.1"], f'{GUARD}.action = "stop"', f"{GUARD}.rewind_lr_factor"),
        ([f"{GUARD}.enable=false", f"{GUARD}.freq=2"], f"{GUARD}.enable = false", f"{GUARD}.freq"),
        (
            [f"{JOB}.advantage_temperature=10.0", "policy.diffusers.sample.global_std=false"],
            f"{JOB}.advantage_temperature",
            "policy.diffusers.sample.global_std",
        ),
        (["policy.diffusers.nft_beta=0.1"], f'{JOB}.trainer_type = "flow_grpo"', "policy.diffusers.nft_beta"),
    ],
)
def test_keys_that_another_key_switches_off_are_named(
    tmp_path: Path, overrides: list[str], setting: str, key: str
) -> None:
    assert idle(tmp_path, [*FLOW, *overrides]) == [f"Keys that do not act with {setting}: {key}"]


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{JOB}.data_term.batch_size=8", f"{JOB}.reference_reset_interval=5", *NOTHING_OFF],
        ["policy.diffusers.nft_beta=0.1", "policy.diffusers.weight_copy_decay_type=1"],
        [*FLOW, f"{JOB}.steps.choose=list", f"{JOB}.steps.indices=[0,-1]", f"{JOB}.epsilon_low=0.1"],
        [*FLOW, f"{JOB}.steps.choose=window", f"{JOB}.steps.order=decay", f"{JOB}.steps.least_interval=2"],
        [f"{JOB}.trainer_type=online_dpo", f"{JOB}.dpo_beta=3.0"],
        [f"{JOB}.trainer_type=online_dpo", f"{JOB}.drop_equal_groups=true", f"{JOB}.advantage_mode=binary"],
        [f"{JOB}.trainer_type=online_dpo", f"{JOB}.normalise_rewards=each", f"{JOB}.advantage_temperature=10.0"],
        [f"{GUARD}.action=rewind", f"{GUARD}.rewind_lr_factor=0.1"],
    ],
)
def test_keys_that_act_are_not_named(tmp_path: Path, overrides: list[str]) -> None:
    assert idle(tmp_path, overrides) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_sets_is_not_named(tmp_path: Path, preset: str) -> None:
    path = tmp_path / "config.toml"
    data = '[train.train_policy.data_term]\nbeta = 0.1\nlocal_dir = "images"\n'
    text = BASE.replace('trainer_type = "diffusion_nft"', f'preset = "{preset}"')
    text = text.replace("deterministic_sampling = true\n", "").replace("n_generation = 4\n", "")
    path.write_text(text.replace("= 8", "= 48") + data, encoding="utf-8")
    assert [line for line in notes(load_config(path)) if line.startswith("Keys that do not act")] == []


@pytest.mark.parametrize(
    "overrides", [[], ["policy.diffusers.sample.solver=flow"], ["policy.diffusers.sample.solver=2ab"]]
)
def test_samples_of_a_prompt_must_differ(tmp_path: Path, overrides: list[str]) -> None:
    """One start noise and none between the steps make one sample."""
    with pytest.raises(ConfigError) as raised:
        idle(tmp_path, ["policy.diffusers.sample.same_initial_noise=true", *overrides])
    [problem] = raised.value.problems
    assert problem.startswith("policy.diffusers.sample.same_initial_noise: found true")
    assert "the samples of a prompt would all be the same" in problem
    assert idle(tmp_path, [*FLOW, "policy.diffusers.sample.same_initial_noise=true"]) == []


def test_a_share_that_chooses_nothing_refuses_nothing(tmp_path: Path) -> None:
    fraction, window = "policy.diffusers.timesteps_fraction=0.01", f"{JOB}.steps.choose=window"
    assert len(idle(tmp_path, [*FLOW, fraction, window])) == 1
    with pytest.raises(ConfigError, match="leaves int"):
        idle(tmp_path, [*FLOW, fraction])


@pytest.mark.parametrize(
    ("solver", "steps", "allowed"),
    [("flow", 1, "none of"), ("flow", 3, "1 to 2 of"), ("2ab", 2, "none of"), ("2ab", 4, "1 to 2 of")],
)
def test_too_many_trained_steps_are_refused_with_those_that_have_noise(
    tmp_path: Path, solver: str, steps: int, allowed: str
) -> None:
    sample = [f"policy.diffusers.sample.solver={solver}", f"policy.diffusers.sample.num_steps={steps}"]
    chosen = [f"{JOB}.steps.choose=list", f"{JOB}.steps.indices=[-1,-1,-1]"]
    ends = "the last two have" if solver == "2ab" else "the last one has"
    with pytest.raises(ConfigError) as raised:
        idle(tmp_path, [*FLOW, *sample, *chosen])
    expected = (
        f"found 3 trained steps; allowed: {allowed} policy.diffusers.sample.num_steps = {steps}, as {ends} no noise"
    )
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("window", "problem"),
    [
        ("size=2, decay_threshold=60", f"{JOB}.steps.decay_threshold: found 60; allowed: less than "),
        ("size=39", f'{JOB}.steps.order: found "exp_decay" with a window that has one place; allowed: "pro'),
    ],
)
def test_a_window_that_never_stays_shorter_is_refused(tmp_path: Path, window: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        idle(tmp_path, [*FLOW, f"{JOB}.steps={{choose='window', order='exp_decay', {window}}}"])
    [found] = raised.value.problems
    assert found.startswith(problem)


def test_given_frames_are_from_the_least_to_the_most(toml: Callable[..., Path]) -> None:
    video = ["policy.diffusers.is_video=true"]
    with pytest.raises(ConfigError, match=r"conditional_frames: found \[3, 1\]; allowed: \[least, most\]"):
        load_config(toml(), [*video, "policy.diffusers.conditional_frames=[3,1]"])
    load_config(toml(), [*video, "policy.diffusers.conditional_frames=[1,1]"])


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ('[model]\nresolution = "480"\n[job]\nname = "x"\n', "model: unknown key, of the older form, like job; a file"),
        ("[optimizer]\nlr = 1e-4\n", "optimizer: unknown key, of the older form; a file of that form has [model]"),
    ],
)
def test_tables_of_the_older_form_beside_the_present_one_are_one_problem(
    toml: Callable[..., Path], more: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(toml(more=more))
    [found] = raised.value.problems
    assert found.startswith(problem)
    assert "and no [policy] (docs/legacy.md)" in found


def test_a_preset_of_another_trainer_is_refused_by_its_name(tmp_path: Path) -> None:
    """And not by what the preset sets."""
    with pytest.raises(ConfigError) as raised:
        idle(tmp_path, [f"{JOB}.preset=flow_grpo_fast"])
    [problem] = raised.value.problems
    assert problem.startswith(f'{JOB}.trainer_type: found "diffusion_nft"; allowed: "flow_grpo" or "ddrl" with')
