"""`cosmos-rl check` for reinforcement learning: its arithmetic, its words, and its sizes against real runs."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl.launcher.acceptance.length import run_length
from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.config.plan import plan_online
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.checks import assert_memory_and_disk, check, estimate_and_rise, modules_of_check, sizes
from tests.support.paths import ROOT

RECIPE = ROOT / "configs/stable-diffusion-3-5/stable-diffusion-3-5-medium-nft.toml"
Toml = Callable[..., Path]


@pytest.mark.parametrize(("fraction", "levels", "backward", "forward"), [(0.99, 9, 144, 432), (1.0, 10, 160, 480)])
def test_the_batch_arithmetic_of_the_recipe(
    capsys: pytest.CaptureFixture[str], fraction: float, levels: int, backward: int, forward: int
) -> None:
    code, report, _ = check(capsys, "--config", RECIPE, f"--policy.diffusers.timesteps_fraction={fraction}")
    assert code == 0
    for text in (
        "1152 samples per step = 48 x 24 (prompts x samples per prompt)",
        "144 samples and 6 prompts per rank, on 8 data parallel ranks",
        'rollout: 6 chunks of 24 samples x 10 sampling steps ("dpm2") = 60 forward passes, without guidance',
        f"{levels} of 10 noise levels are trained, int(10 x {fraction:g}): {144 * levels} pairs of sample and level",
        "16 micro-batches of 9 at each level",
        f"{backward} backward passes and {forward} forward passes (policy, old policy, reference) per rank and step",
        "1 optimiser step per step",
        "pickscore: weight 1, clipped to -5 ... 5, service",
        "every 5 steps 32 held-out samples (own samples, made at the start in 40 steps) at 4 noise levels",
    ):
        assert text in report, text
    assert "not supported yet" not in report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "old", "reference"),
    [
        (["--policy.diffusers.weight_copy_decay_type=0", "--train.train_policy.kl_beta=0.0"], 0, 0),
        (["--policy.diffusers.weight_copy_decay_type=0"], 0, 4),
        (["--policy.diffusers.weight_copy_decay_type=0", "--train.train_policy.batch_size_per_optimize=4"], 2, 4),
        (["--policy.diffusers.weight_copy_decay_type=0", "--train.train_policy.mu_iterations=2"], 4, 8),
        (["--policy.diffusers.weight_copy_decay_type=0", "--policy.lora.lora_dropout=0.1"], 4, 4),
        (["--policy.diffusers.weight_copy_decay_type=1"], 4, 4),
        (["--policy.diffusers.weight_copy_decay_type=1", "--train.train_policy.learnt_share=0.5"], 2, 2),
        (["--policy.diffusers.weight_copy_decay_type=1", "--policy.diffusers.sample.guidance_scale=2.0"], 4, 4),
    ],
)
def test_forward_and_backward_passes_are_those_of_a_run(
    write_nft_toml: Toml, options: list[str], old: int, reference: int
) -> None:
    from cosmos_rl.tools.dataset.diffusion_nft import training_prompts
    from tests.support.trainer_runs import train

    path = write_nft_toml("reward_hacking_guard.enable = false")
    plan = plan_online(load_config(path, options))
    assert (plan.old_forwards, plan.reference_forwards) == (old, reference)
    run = train(path, *options, dataset=training_prompts)
    first, second = (row["train/nfe"] for row in read_metrics(run / "metrics.jsonl"))
    passes = 2 if any("guidance" in option for option in options) else 1
    rollouts = passes * plan.rollout_forwards * plan.chunk
    # a backward pass counts as two forward passes
    assert second - first == rollouts + 4 * (plan.forwards + 2 * plan.backwards)


def test_a_share_that_is_learnt_from_is_said(write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]) -> None:
    report = check(capsys, "--config", write_nft_toml(), "--train.train_policy.learnt_share=0.5")[1]
    assert "learnt from: 4 samples per rank, those of the step with the largest advantages of either sign" in report
    assert "1 micro-batch of 4 at each level" in report or "1 micro-batches of 4 at each level" in report


def test_a_decay_type_that_begins_with_copies_says_what_it_saves(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check(capsys, "--config", write_nft_toml(), "--policy.diffusers.weight_copy_decay_type=2")[1]
    assert "4 backward passes and 12 forward passes" in report
    assert "8 forward passes during the first 75 optimiser steps" in report


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_of_the_network_is_planned_as_the_trainer_finds_it(write_nft_toml: Toml, dropout: float) -> None:
    from diffusers import SanaTransformer2DModel

    from cosmos_rl.policy.model.diffusers.flow_model import has_active_dropout

    network = SanaTransformer2DModel(
        num_attention_heads=1,
        attention_head_dim=8,
        num_layers=1,
        num_cross_attention_heads=1,
        cross_attention_dim=8,
        caption_channels=8,
        dropout=dropout,
    )
    config = load_config(write_nft_toml(), ["--policy.diffusers.weight_copy_decay_type=0"])
    plan = plan_online(config, network.config)
    assert plan.dropout == any(map(has_active_dropout, network.modules())) == (dropout > 0)
    assert plan.old_forwards == (plan.backwards if dropout else 0)
    assert plan_online(config).dropout is None


def test_what_is_not_known_of_dropout_is_said_where_it_matters(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown, nowhere = "unknown: whether the network has dropout", "--policy.model_name_or_path=no/such-model"
    for kind, matters in ((0, True), (1, False), (2, True)):
        options = ["--config", write_nft_toml(), f"--policy.diffusers.weight_copy_decay_type={kind}"]
        assert unknown not in check(capsys, *options)[1]
        assert (unknown in check(capsys, *options, nowhere)[1]) == matters
        assert unknown not in check(capsys, *options, nowhere, "--policy.lora.lora_dropout=0.1")[1]
    noisy = ["--policy.diffusers.sample.solver=flow", "--policy.diffusers.sample.deterministic_sampling=false"]
    for trainer in ("flow_grpo", "online_dpo"):  # these run no old policy when they learn
        options = ["--config", write_nft_toml(), f"--train.train_policy.trainer_type={trainer}", *noisy, nowhere]
        code, report, _ = check(capsys, *options, "--policy.diffusers.weight_copy_decay_type=0")
        assert (code, unknown in report) == (0, False)


def test_prompts_are_counted_and_few_are_taken_several_times(
    write_nft_toml: Toml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_nft_toml()
    _, report, _ = check(capsys, "--config", path, "--train.epoch=3", "--train.max_num_steps=none")
    assert f"4 prompts in {tmp_path / 'prompts.txt'} 2 steps per epoch x 3 epochs = 6 steps" in report
    few = run_length(load_config(path, ["--train.train_batch_per_replica=24"]), own_data=False)
    assert few.steps_per_epoch == 1
    named = load_config(path, ["train.train_policy.dataset.local_dir=", "train.train_policy.dataset.name=pickscore"])
    assert run_length(named, own_data=False).why == "the prompts pickscore have not been fetched yet"


def test_a_named_set_is_counted_where_it_was_fetched(
    write_nft_toml: Toml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path))
    file = tmp_path / "diffusion_nft" / "ocr" / "mine.txt"
    file.parent.mkdir(parents=True)
    file.write_text("a sign\n" * 7)
    named = load_config(
        write_nft_toml(),
        [f"train.train_policy.dataset.{key}" for key in ("local_dir=", "name=ocr", "split=mine")],
    )
    assert run_length(named, own_data=False).samples == 7


def test_rewards_and_guard_are_printed_and_no_reward_is_refused(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_nft_toml(
        'reward_hacking_guard.action = "rewind"\ndata_term = { beta = 0.1, local_dir = "pairs", batch_size = 3 }'
    )
    _, report, _ = check(capsys, "--config", path)
    for text in (
        "sharpness: weight 1, clipped to -5 ... 5, here (cosmos_rl.reward.examples:sharpness)",
        "rewind, at most 3 times, to the newest checkpoint before it",
        "and 3 real samples of pairs per optimiser step",
        "weights of the old policy's adapter",
    ):
        assert text in report, text
    code, _, errors = check(capsys, "--config", path, "--train.train_policy.local_reward.reward_fns=[]")
    assert code == 2
    assert "no reward: set train.train_policy.use_remote_reward" in errors
    none = "--train.train_policy.local_reward.reward_fns=[]"
    code, report, _ = check(capsys, "--config", path, none, "my_script.py")
    assert code == 0
    assert "functions that the script gives" in report
    assert "number of samples and steps: unknown (the script brings its own data); at most 2" in report


def test_rewards_that_all_count_nothing_are_refused(write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]) -> None:
    none = ["--config", write_nft_toml(), "--train.train_policy.local_reward.reward_fns.0.weight=0.0"]
    code, _, errors = check(capsys, *none)
    assert code == 2
    assert "train.train_policy: all its rewards have weight 0 or scale 0 (sharpness), so there is nothing to" in errors
    assert [check(capsys, *none, also)[0] for also in ("my_script.py", "--train.train_policy.bypass_reward=true")] == [
        0,
        0,
    ]


def test_folders_and_the_reward_service_belong_to_the_environment(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REMOTE_REWARD_ENQUEUE_URL", raising=False)
    path = write_nft_toml(
        'reward_hacking_guard.local_dir = "nowhere"\ndata_term = { beta = 0.1, local_dir = "neither" }'
    )
    options = ["--train.train_policy.use_remote_reward=true"]
    assert check(capsys, "--config", path, *options)[0] == 0
    code, _, errors = check(capsys, "--config", path, *options, "--env")
    assert code == 2
    for text in ("reward_hacking_guard.local_dir", "data_term.local_dir", "REMOTE_REWARD_ENQUEUE_URL"):
        assert text in errors, text


def test_a_batch_for_8_gpus_is_checked_for_the_one_rank_of_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmos_rl.launcher.machine.gpus", lambda: 0)
    few = ["--train.global_batch_size=4", "--rollout.n_generation=4", "--train.train_policy.mini_batch=4"]
    code, printed, _ = check(capsys, "--config", RECIPE, *few)
    assert code == 0  # as a launch here, which takes one rank
    assert "for 1 rank, which a launch on this machine takes without a GPU" in printed
    assert "train.global_batch_size: found 4; allowed: a multiple of" in printed
    assert check(capsys, "--nproc-per-node", 1, "--config", RECIPE, *few)[0] == 0
    code, _, printed = check(capsys, "--config", RECIPE, "--train.global_batch_size=7")
    assert (code, "for 1 rank" in printed) == (2, False)


def test_it_never_imports_torch(write_nft_toml: Toml) -> None:
    assert modules_of_check(write_nft_toml()) & {"torch", "diffusers", "httpx"} == set()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], {"old policy", "reference"}),
        (["--train.train_policy.kl_beta=0.0"], {"old policy"}),
        (["--policy.diffusers.weight_copy_decay_type=0"], {"reference"}),
        (["--policy.diffusers.weight_copy_decay_type=0", "--train.train_policy.kl_beta=0.0"], set()),
    ],
)
def test_copies_of_all_weights_are_counted_when_they_are_kept(
    write_nft_toml: Toml, options: list[str], kept: set[str]
) -> None:
    config, files = sizes(write_nft_toml(lora=False), *options)
    found = estimate.memory(config, files, on_cpu=False, saves=1)
    assert {"old policy", "reference"} & set(found.parts) == kept
    assert all(found.parts[name] == 4 * files.selection.trained for name in kept)


ADAPTERS_OF_ALL = ["--policy.lora.r=64", "--policy.lora.target_modules=all-linear"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("preset", "options"),
    [
        pytest.param((4, 8, 48), ["--policy.lora=none"], id="20M-full-old-and-reference"),
        pytest.param((3, 10, 64), ADAPTERS_OF_ALL, id="43M-lora"),
    ],
)
def test_the_estimate_of_memory_and_disk_is_within_15_percent(
    write_nft_toml: Toml, tmp_path: Path, preset: tuple[int, int, int], options: list[str]
) -> None:
    expected, on_disk, measured = estimate_and_rise(write_nft_toml(), tmp_path / "model", preset, options)
    assert_memory_and_disk(expected, on_disk, measured, tmp_path / "out", step=2)


@pytest.mark.process
def test_the_estimate_holds_where_samples_outweigh_weights(write_nft_toml: Toml, tmp_path: Path) -> None:
    options = ["--policy.diffusers.inference_size=[128, 128]", "--rollout.n_generation=48"]
    options += [
        "--train.train_batch_per_replica=96",
        "--policy.diffusers.sample.num_steps=2",
        "--train.max_num_steps=1",
    ]
    expected, _, measured = estimate_and_rise(write_nft_toml(), tmp_path / "model", (2, 2, 16), options)
    assert expected.peak == expected.phases["rollout"]
    assert abs(expected.peak - measured) <= 0.15 * measured, (expected, measured)


def test_the_bundled_script_follows_the_kind_of_job(write_nft_toml: Toml, write_toml: Toml) -> None:
    from cosmos_rl.launcher.arguments import script_for
    from cosmos_rl.policy.config.jobs import DIFFUSION_NFT, SFT

    assert script_for(None, load_config(write_nft_toml())) == DIFFUSION_NFT.script
    assert script_for(None, load_config(write_toml())) == SFT.script
    assert script_for("mine.py", load_config(write_toml())) == "mine.py"
    assert main(["check", "--config", str(write_nft_toml()), DIFFUSION_NFT.script]) == 0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("train.train_policy.dataset.name=pickscoer", 'dataset.name: found "pickscoer"; allowed: '),
        ("train.train_policy.dataset.split=trian", 'dataset.split: found "trian"; allowed: one of train, test'),
        (
            'validation={enable = true, sets = [{dataset = {name = "ocr"}}, {dataset = {name = "parti_promts"}}]}',
            "validation.sets.1.dataset.name: found",
        ),
    ],
)
def test_a_prompt_set_that_there_is_not_is_refused_without_a_look_at_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, message: str
) -> None:
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, errors = check(capsys, "--config", RECIPE, f"--{option}")
    assert code == 2
    assert message in errors


def test_wrong_names_of_rewards_come_in_one_report_with_wrong_keys(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = (
        '[[train.train_policy.dataset.sets]]\nname = "ocr"\nrewards = ["sharpnes"]\n'
        '[[train.train_policy.dataset.sets]]\nname = "pickscore"\nrewards = []\n'
        '[validation]\nenable = true\nsets = [{ dataset = { name = "ocr" }, rewards = ["red"] }]\n'
    )
    path = write_nft_toml()
    path.write_text(re.sub(r"dataset\.local_dir = .*\n", "", path.read_text()) + sets)
    options = ["--config", path, "--train.seed=-1"]
    first = 'train.train_policy.dataset.sets.0.rewards: found "sharpnes"; allowed: rewards of the run (sharpness); did'
    third = 'validation.sets.0.rewards: found "red"; allowed: sharpness'
    code, _, errors = check(capsys, *options)
    assert (code, errors.count("\n")) == (2, 5)
    for text in ("4 problems", first, "train.train_policy.dataset.sets.1.rewards: found []; allowed:", third, "seed"):
        assert text in errors, text
    code, _, errors = check(capsys, *options, "my_script.py")  # which may give any
    assert (code, errors.count("\n")) == (2, 3)
    wrong = "--train.train_policy.local_reward.reward_fns.0.function=nowhere"
    code, _, errors = check(capsys, *options, wrong)  # of which reward there should be one, nobody knows
    assert first not in errors
    assert third not in errors
