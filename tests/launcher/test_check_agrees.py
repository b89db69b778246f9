"""`cosmos-rl check` and a launch say the same: what one accepts reaches its first step, what one refuses, both do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.arguments import parse_launch
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.launch import accept_command
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.policy.config.base import Support
from cosmos_rl.policy.config.keys import Key, list_keys
from tests.support.paths import ROOT
from tests.support.trainer_runs import train

Toml = Callable[..., Path]
CONFIGS = ROOT / "configs"
HUGE = 2**63
POOL = {
    "policy.diffusers.inference_size": ["[16, 16]", "[40, 24]", "[24, 24]", "[36, 32]", "[33, 32]", "[1000, 32]"],
    "policy.lora.target_modules": ['["attn.to_q"]', '["attn"]', '["norm1"]', '["to_qq"]', '"all-linear"', "[]"],
    "policy.lora.lora_names": ['["default"]', '["default", "old"]', '["attn"]', '["a", "a"]', "[]"],
    "policy.lora.init_lora_weights": ["true", "false", '"gaussian"', '"pissa"', '"eva"', '"other"'],
    "policy.lora.r_pattern": ["{to_q = 2}", "{}", "{to_q = 0}"],
    "policy.freeze_pattern": ['["blocks"]', '["("]'],
    "train.train_policy.dataset.local_dir": ["", "s3://bucket/data", "nowhere"],
    "train.output_dir": ["", " ", "s3://bucket/runs"],
    "train.train_policy.dataloader_seed": ["0", "7", f"{HUGE - 1}", f"{HUGE}", f"{10 * HUGE}"],
    "train.seed": ["0", f"{HUGE - 1}", f"{10 * HUGE}"],
    "policy.parallelism.cp_size": ["1", "2"],
    "policy.parallelism.tp_size": ["1", "2", "3"],
    "train.train_batch_per_replica": ["1", "2", "5", "12", "13"],
}
LEFT_ALONE = ("custom", "logging.", "profiler.", "train.epoch", "train.max_num", "train.resume", "train.timestamp")
"""Places outside, and what would only make the run longer."""
ELSEWHERE = ("dataloader_num_workers", "upload_hf", "hf_repo_name", "model_name_or_path", "device", "dp_shard_size")


def literals(key: Key) -> list[str]:
    """TOML values, right and wrong ones, that say something about a key by its type."""
    if key.path in POOL:
        return POOL[key.path]
    if get_origin(key.field.annotation) is Literal:
        return [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in get_args(key.field.annotation)]
    if isinstance(key.value, bool):
        return ["true", "false", '"yes"']
    if isinstance(key.value, int):
        return ["0", "1", "2", "3", "-1", "1.5"]
    if isinstance(key.value, float):
        return ["0.0", "0.5", "1.0", "-1.0", "nan", "2"]
    return []


def tried_keys(config: Config) -> list[tuple[str, str]]:
    return [
        (key.path, literal)
        for key in list_keys(config)
        if key.kind in (Support.WORKS, Support.PLANNED) and not key.path.startswith(LEFT_ALONE)
        if key.path.rpartition(".")[2] not in ELSEWHERE
        for literal in literals(key)
    ]


def problems(text: str) -> set[str]:
    """The lines of a message that name an error."""
    lines = [line.strip().removeprefix("error: ") for line in text.splitlines()]
    return {line for line in lines if line and not line.endswith((":", "launch would be refused:"))}


def compared(config: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    """Assert that check and launch agree; whether both accept."""
    code = main(["check", "--env", "--config", str(config), *options])
    printed = capsys.readouterr()
    assert code in (0, 2), printed
    refused = ""
    try:
        accept_command(parse_launch(["--config", str(config), *options], "0", ""))
    except UserError as error:
        refused = str(error)
    unbuilt = {line.strip() for line in printed.out.splitlines() if line.strip().startswith("not supported yet: ")}
    if code == 2:  # a launch names first what is not built, then what is wrong
        assert problems(refused) <= problems(printed.err) | unbuilt, (printed.err, refused)
        assert refused, printed.err
        return False
    assert problems(refused) == unbuilt
    return not unbuilt


@pytest.mark.slow
def test_what_check_accepts_reaches_its_first_step(write_toml: Toml, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_toml("dataset.test_size = 2\n[validation]\nenable = true\n")
    found = tried_keys(load_config(path))
    assert len({key for key, _ in found}) > 40
    reached = 0

    checks: Any = list(HealthCheck)

    @settings(max_examples=30, derandomize=True, deadline=None, database=None, suppress_health_check=checks)
    @given(st.lists(st.sampled_from(found), min_size=1, max_size=3, unique_by=lambda pair: pair[0]))
    def agree(chosen: list[tuple[str, str]]) -> None:
        nonlocal reached
        options = [f"--{key}={literal}" for key, literal in chosen]
        if compared(path, options, capsys):
            train(path, *options, "--train.max_num_steps=1")
            reached += 1

    agree()
    assert reached >= 5


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--train.output_dir=", 'train.output_dir: found ""; allowed: a folder'),
        ("--train.output_dir=s3://bucket/runs", "addresses are not supported yet, give a local path"),
        ("--train.train_policy.dataset.local_dir=gs://bucket/data", "addresses are not supported yet"),
        ("--policy.lora.lora_path=https://host/adapter", "addresses are not supported yet"),
        ("--train.train_policy.cache.dir=s3://bucket/cache", "addresses are not supported yet"),
        ("--train.resume=s3://bucket/run", "addresses are not supported yet"),
        ("--train.train_policy.dataset.local_dir=", "train.train_policy.dataset.local_dir: missing"),
        (f"--train.train_policy.dataloader_seed={HUGE}", "allowed: whole numbers below 2^63"),
        ("--policy.diffusers.inference_size=[1000, 32]", "has positions for at most"),
        ('--policy.lora.target_modules=["attn"]', "'attn' matches no layer of the transformer"),
        ('--policy.lora.target_modules=["attn.to_qq"]', "did you mean 'attn.to_q'?"),
        ("--policy.diffusers.trained_denoiser=transformer_2", 'has transformer; set it to "all" or one of them'),
        ("--train.train_batch_per_replica=14", "make no whole step"),
    ],
)
def test_both_refuse_with_the_same_text(
    write_toml: Toml, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    path = write_toml()
    assert main(["check", "--config", str(path), option]) == 2
    assert message in capsys.readouterr().err
    assert not compared(path, [option], capsys)
    with pytest.raises(UserError) as caught:
        accept_command(parse_launch(["--config", str(path), option], "0", ""))
    assert message in str(caught.value)


def test_both_refuse_a_size_that_does_not_fit_the_model(
    write_toml: Toml, tiny_sd3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coarse = shutil.copytree(tiny_sd3, tmp_path / "coarse")
    file = coarse / "transformer" / "config.json"
    stride = 2 ** (len(json.loads((coarse / "vae" / "config.json").read_text())["block_out_channels"]) - 1)
    file.write_text(json.dumps({**json.loads(file.read_text()), "patch_size": 16 // stride}))
    path = write_toml()
    options = [f"--policy.model_name_or_path={coarse}", "--policy.diffusers.inference_size=[40, 32]"]
    assert main(["check", "--config", str(path), *options]) == 2
    message = f"policy.diffusers.inference_size = [40, 32]: {coarse} needs multiples of 16 (VAE times patch size)"
    assert message in capsys.readouterr().err
    assert not compared(path, options, capsys)


@pytest.mark.parametrize("name", ["tp_size", "pp_size", "ep_size"])
@pytest.mark.parametrize("ranks", [[], ["--nproc-per-node", "2"], ["--nproc-per-node", "3"]])
def test_ranks_of_a_kind_that_is_not_built_are_named_so_by_both(
    write_toml: Toml, capsys: pytest.CaptureFixture[str], name: str, ranks: list[str]
) -> None:
    path, option = write_toml(), f"--policy.parallelism.{name}=2"
    line = f"not supported yet: policy.parallelism.{name} = 2; today only 1"
    assert main(["check", *ranks, "--config", str(path), option]) == 0
    assert line in capsys.readouterr().out
    with pytest.raises(UserError) as caught:
        accept_command(parse_launch([*ranks, "--config", str(path), option], "0", ""))
    assert str(caught.value) == line


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("[sc]*/*.toml")), ids=lambda path: path.stem)
def test_every_recipe_can_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(recipe)]) == 0
    assert "not supported yet" not in capsys.readouterr().out


def test_a_fetched_pipeline_that_predicts_noise_says_so(
    write_toml: Toml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other" / "scheduler").mkdir(parents=True)
    (tmp_path / "other" / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    scheduler = '{"_class_name": "EulerDiscreteScheduler", "prediction_type": "epsilon"}'
    (tmp_path / "other" / "scheduler" / "scheduler_config.json").write_text(scheduler)
    assert main(["check", "--config", str(write_toml()), f"--policy.model_name_or_path={tmp_path / 'other'}"]) == 0
    assert "(StableDiffusionXLPipeline, epsilon); today only flow matching" in capsys.readouterr().out


def test_a_fetched_pipeline_of_another_family_says_so_unless_a_script_may_bring_its_class(
    write_toml: Toml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text('{"_class_name": "UnheardOfPipeline"}')
    option = f"--policy.model_name_or_path={tmp_path / 'other'}"
    path = write_toml()
    assert main(["check", "--config", str(path), option]) == 0
    message = "(UnheardOfPipeline); today only StableDiffusion3Pipeline and pipelines of diffusers"
    assert message in capsys.readouterr().out
    with pytest.raises(UserError) as caught:
        accept_command(parse_launch(["--config", str(path), option], "0", ""))
    assert message in str(caught.value)
    (tmp_path / "own.py").write_text("")
    assert main(["check", "--config", str(path), option, str(tmp_path / "own.py")]) == 0
    assert "not supported yet" not in capsys.readouterr().out
