"""Commands with an older configuration: flags in any place, older names of scripts, and what is printed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl.launcher.arguments import parse_launch, script_for, worker_command
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.flags import OLDER_FLAGS
from cosmos_rl.launcher.launch import accept_command
from cosmos_rl.policy.config import load as loading
from cosmos_rl.policy.config import load_config, world_size
from tests.config.test_older_config import CONFIGS, DDRL_2B, DDRL_14B, GRPO, OLDER
from tests.support.checks import check
from tests.support.paths import ROOT

RECIPE = str(CONFIGS / "cosmos-predict2-5" / GRPO)
RL_SCRIPT = "cosmos_rl.tools.dataset.diffusion_nft"


@pytest.mark.parametrize("flag", OLDER_FLAGS)
@pytest.mark.parametrize(
    "form",
    [
        "{flag} --config x.toml script.py --own",
        "--config x.toml {flag} script.py --own",
        "--config x.toml script.py {flag} --own",
        "--config x.toml script.py --own {flag}",
        "--config x.toml --train.seed=1 {flag} script.py --own",
    ],
)
def test_the_flag_may_stand_anywhere(flag: str, form: str) -> None:
    launch = parse_launch(form.format(flag=flag).split(), "0", "")
    assert (launch.older, launch.config, launch.script, launch.script_args) == (True, "x.toml", "script.py", ("--own",))


def test_after_two_dashes_it_is_the_scripts() -> None:
    launch = parse_launch(["--config", "x.toml", "script.py", "--", "--wfm-mode"], "0", "")
    assert (launch.older, launch.script_args) == (False, ("--", "--wfm-mode"))


@pytest.mark.parametrize(
    "script",
    [
        "./cosmos_rl/tools/dataset/wfm_rl.py",
        "cosmos_rl/tools/dataset/wfm_rl.py",
        str(ROOT / "cosmos_rl/tools/dataset/wfm_rl.py"),
        "cosmos_rl.tools.dataset.wfm_rl",
        "./cosmos_rl/tools/dataset/diffusion_grpo.py",
        "cosmos_rl.tools.dataset.diffusion_grpo",
    ],
)
@pytest.mark.parametrize("at_the_root", [True, False])
def test_older_scripts_are_the_one_of_the_job(
    script: str, at_the_root: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT if at_the_root else tmp_path)
    assert script_for(script, load_config(RECIPE)) == RL_SCRIPT
    assert worker_command(script_for(script, load_config(RECIPE))) == ["-m", RL_SCRIPT]


def test_a_changed_copy_of_an_older_script_is_run_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy = Path("cosmos_rl/tools/dataset/wfm_rl.py")
    copy.parent.mkdir(parents=True)
    copy.write_text("print('mine')")
    assert script_for(f"./{copy}", load_config(RECIPE)) == f"./{copy}"


@pytest.mark.parametrize("script", ["wfm_rl", "diffusion_grpo"])
def test_older_modules_can_be_imported(script: str) -> None:
    from importlib import import_module

    assert import_module(f"cosmos_rl.tools.dataset.{script}").training_prompts


@pytest.mark.parametrize("recipe", OLDER)
def test_a_recipe_can_be_checked(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_already_described", set())
    code, report, errors = check(capsys, "--config", CONFIGS / "cosmos-predict2-5" / recipe, "--wfm-mode")
    assert (code, errors) == (0, "")
    assert "of the older form, translated: model.fsdp_shard_size -> policy.parallelism.dp_shard_size" in report
    assert report.count("job.name -> logging.experiment_name") == 1
    assert "no problems found" in report
    assert ("(policy.parallelism.cp_size): 128 x 2 = 256 ranks" in report) == (recipe == DDRL_2B)
    assert ("(policy.parallelism.cp_size): 128 x 8 = 1024 ranks" in report) == (recipe == DDRL_14B)


def test_the_flag_has_no_effect_on_a_present_file(
    write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, errors = check(capsys, "--config", write_toml(), "--wfm-mode")
    assert (code, errors) == (0, "")
    assert "is of the present form: --wfm-mode and -dfg and --diffusion-mode have no effect" in report


def test_unknown_keys_end_a_launch_unless_it_is_lenient(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "older.toml"
    path.write_text(Path(RECIPE).read_text().replace("[trainer]", "[trainer]\nlogging_itr = 5"))
    assert main(["--config", str(path)]) == 2
    assert "trainer.logging_itr: unknown key; did you mean trainer.logging_iter?" in capsys.readouterr().err
    code, report, _ = check(capsys, "--config", path, "--lenient")
    assert code == 0
    assert "no counterpart: trainer.logging_itr: unknown" in report


def test_overrides_are_of_the_present_form(tmp_path: Path, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a\nb")
    argv = ["--config", str(CONFIGS / "wfm" / "cosmos_predict2-5_2b_480_grpo_mock_data.toml")]
    argv += [f"--policy.model_name_or_path={tiny_sd3}", "--train.train_policy.use_remote_reward=false"]
    argv += ["--policy.diffusers.is_video=false", "--policy.diffusers.conditional_frames=none"]
    argv += ["--policy.diffusers.inference_size=[32, 32]", "--train.train_policy.bypass_reward=true"]
    argv += ['--logging.logger=["console"]', "--rollout.n_generation=4", "--diffusion-mode"]
    config, command = accept_command(parse_launch([*argv, "./cosmos_rl/tools/dataset/diffusion_grpo.py"], "0", ""))
    assert command == ["-m", RL_SCRIPT]
    assert (config.rollout.n_generation, world_size(config.policy.parallelism)) == (4, 1)
    assert config.train.output_dir == os.path.abspath("outputs/cosmos_predict2_5/grpo/2b_480_grpo_mock_data")


# ---- cosmos-rl translate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", OLDER)
def test_a_translated_file_is_the_same_configuration(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = CONFIGS / "cosmos-predict2-5" / recipe, tmp_path / "new.toml"
    assert main(["translate", str(path)]) == 0
    printed = capsys.readouterr()
    assert "model.fsdp_shard_size -> policy.parallelism.dp_shard_size" in printed.err
    assert main(["translate", str(path), "--out", str(out)]) == 0
    assert out.read_text() == printed.out
    assert load_config(out) == load_config(path)


def test_what_translate_refuses(
    tmp_path: Path, write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new.toml"
    out.write_text("mine")
    assert main(["translate", RECIPE, "--out", str(out)]) == 2
    assert main(["translate", str(write_toml())]) == 2
    errors = capsys.readouterr().err
    assert "exists already: name a new file with --out" in errors
    assert "is not of the older form, which has [model] and no [policy]" in errors
    assert out.read_text() == "mine"
