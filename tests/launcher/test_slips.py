"""Slips on the command line and in the configuration of a run: what was probably meant is named."""

import json
from pathlib import Path

import pytest

from cosmos_rl import __version__
from cosmos_rl.launcher.cli import SUBCOMMANDS, main

TOML = '[policy]\nmodel_name_or_path = "model"\nis_diffusers = true\n'


def fail(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(list(map(str, argv))) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["check", "--confg", "X.toml"], "--config"),
        (["--confg", "X.toml"], "--config"),
        (["check", "--config", "X.toml", "--nproc_per_node=2"], "--nproc-per-node"),
        (["sample", "model", "a cat", "--step", "3"], "--steps"),
        (["export", "run", "--out", "a", "--formt", "peft"], "--format"),
        (["watch", "run", "--prot", "1"], "--port"),
        (["prompts", "--fetsh", "ocr"], "--fetch"),
    ],
)
def test_an_unknown_flag_is_named_with_the_nearest(
    capsys: pytest.CaptureFixture[str], argv: list[str], meant: str
) -> None:
    assert fail(capsys, *argv).endswith(f"; did you mean {meant}?\n")


def test_a_flag_like_no_other_is_named_alone_and_none_is_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(capsys, "schema", "--zzz").endswith("unrecognized arguments: --zzz\n")
    assert "did you mean --markdown?" in fail(capsys, "schema", "--mark")


def test_an_unknown_subcommand_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    error = fail(capsys, "chekc", "--config", "X.toml")
    assert error == "error: chekc: no subcommand; did you mean check? Training has none: cosmos-rl --config X.toml\n"
    error = fail(capsys, "train", "--config", "X.toml")
    assert all(name in error for name in (*SUBCOMMANDS, "Training has none: cosmos-rl --config X.toml"))


def test_every_subcommand_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in SUBCOMMANDS:
        assert main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: cosmos-rl {name} ")
        assert len(shown.splitlines()) > 4


def test_an_override_without_its_dashes_or_in_a_misspelt_table_is_recognised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(TOML)
    error = fail(capsys, "check", "--config", path, "--trian.epoch=3")
    assert "trian: unknown key; did you mean train? (from --trian.epoch=3)" in error
    assert "did you mean --train.epoch=3?" in fail(capsys, "check", "--env", "--config", path, "train.epoch=3")


def test_a_checkpoint_to_start_from_that_is_not_there_is_an_error_of_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(TOML)
    error = fail(capsys, "check", "--env", "--config", path, f"--train.resume={tmp_path / 'nowhere'}")
    assert f"{tmp_path / 'nowhere'} does not exist\n  " in error


def test_unknown_keys_in_the_configuration_of_an_older_run_name_the_version_that_wrote_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(f"{TOML}[train]\nold_key = 1\n")
    for version, hint in (
        ("0.0.7", f" (written by cosmos-rl 0.0.7; this is {__version__}: take out keys that are gone)"),
        (__version__, ""),
    ):
        (tmp_path / "run.json").write_text(json.dumps({"versions": {"cosmos-rl": version}}))
        for place in (tmp_path, tmp_path / "config.toml"):
            error = fail(capsys, "check", "--config", place)
            assert error.startswith(f"error: 1 problem in {place}{hint}:\n  train.old_key: unknown key; ")
    (tmp_path / "run.json").write_text("[]")
    assert fail(capsys, "check", "--config", tmp_path).startswith(f"error: 1 problem in {tmp_path}:\n")


def test_a_report_of_a_run_whose_configuration_was_broken_names_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(f"{TOML}x = = 1\n")
    assert "config.toml: not valid TOML: Invalid value (at line 4" in fail(capsys, "report", tmp_path)
