"""What the documents say is so: links lead somewhere, keys exist, commands parse, messages are ours, examples run."""

import argparse
import ast
import csv
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl.launcher import cli
from cosmos_rl.launcher.arguments import parse_launch, script_for, worker_command
from cosmos_rl.policy.config import Config, cross_check, load_config
from cosmos_rl.policy.config.keys import dotted_keys
from cosmos_rl.policy.config.ranks import resolve_world_size
from cosmos_rl.storage.run_folder import find_newest_run
from cosmos_rl.tracking.metrics import read_metrics
from tests.support import patience
from tests.support.documents import blocks
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples" / "customisation"
AT_THE_TOP = [
    ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "tests/README.md", "examples/ddrl.md")
]
PAGES = [*AT_THE_TOP, *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("cosmos-rl ") and "[" not in line.partition("=")[0]:  # not a synopsis
                yield shlex.split(line, comments=True)[1:]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_every_internal_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


def test_every_page_is_named_in_the_readme_and_in_the_index() -> None:
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"\]\(docs/([\w/-]+\.md)", (ROOT / "README.md").read_text())) == pages
    index = (ROOT / "docs" / "index.md").read_text()
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", index))
    listed = {f"{line}.md" for block in blocks(ROOT / "docs" / "index.md", "{toctree}") for line in block.split()}
    assert linked == pages - {"index.md"}
    assert linked <= listed


def test_the_site_shows_the_guide_in_the_order_of_the_readme() -> None:
    guide, *_ = blocks(ROOT / "docs" / "index.md", "{toctree}")
    listed = re.findall(r"^([\w/]+)$", guide, re.MULTILINE)[1:]  # without the overview
    readme = (ROOT / "README.md").read_text().partition("## Where to read")[2]
    order = [name for name in re.findall(r"\]\(docs/([\w/-]+)\.md", readme) if name in listed]
    assert listed == order


@each_page
def test_every_source_file_that_is_named_exists(page: Path) -> None:
    files = {f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("[!.]*/**/*.py")}
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", prose(page)))
    examples = {"my_reward.py", "my_rewards.py", "my_script.py"}
    assert [name for name in sorted(named - examples) if not any(path.endswith(f"/{name}") for path in files)] == []


def test_the_drawing_is_that_of_its_script() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "images" / "architecture.py"))
    assert drawn["TARGET"].read_text(encoding="utf-8") == drawn["drawing"](), "python docs/images/architecture.py"
    assert all((ROOT / "cosmos_rl" / box.room).is_dir() for box in drawn["BOXES"].values())


def test_the_folders_of_tests_are_listed() -> None:
    listed = re.findall(r"^\| `(\w+)/` \|", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.parent.name for path in (ROOT / "tests").glob("*/__init__.py"))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "configuration.md"], ids=lambda page: page.name
)
def test_every_key_that_is_named_exists(page: Path) -> None:
    tables = "policy|train|validation|logging|profiler|rollout"
    # not file names and not attributes of objects
    named = re.findall(rf"(?<![\w./\"'])(?:--|\[+)?((?:{tables})(?:\.[a-z_0-9]+)+)(?![\w/(]|\.py)", page.read_text())
    unknown = sorted(set(named) - set(dotted_keys(Config)))
    assert unknown == []


@each_page
def test_every_piece_of_toml_is_a_configuration(page: Path) -> None:
    for block in blocks(page, "toml"):
        Config.from_dict(tomllib.loads(block))


BASES: list[dict[str, Any]] = [
    {"policy": {"model_name_or_path": "model", "is_diffusers": True}},
    {
        "mode": "colocated",
        "policy": {
            "model_name_or_path": "model",
            "is_diffusers": True,
            "lora": {"lora_names": ["default", "old"]},
            "diffusers": {"sample": {"deterministic_sampling": True}},
        },
        "rollout": {"n_generation": 4},
        "train": {
            "train_batch_per_replica": 16,
            "train_policy": {"type": "grpo", "trainer_type": "diffusion_nft", "uncentralized_training": True},
        },
    },
]
"""Of fine-tuning and of reinforcement learning."""


def add(table: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {name for name in more if isinstance(more[name], dict) and isinstance(table.get(name), dict)}
    return {**table, **more, **{name: add(table[name], more[name]) for name in both}}


@each_page
def test_every_piece_of_toml_breaks_no_rule_where_it_is_put(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the rest of a configuration; one that has a mode is whole."""
    for block in blocks(page, "toml"):
        tables = tomllib.loads(block)
        if "mode" in tables:
            (tmp_path / "whole.toml").write_text(block)
            assert cli.main(["check", "--config", str(tmp_path / "whole.toml")]) == 0, capsys.readouterr().err
            continue
        kind = tables.get("train", {}).get("train_policy", {}).get("type", "")
        bases = [base for base in BASES if kind in ("", "grpo") or "mode" not in base]
        assert [] in [cross_check(Config.from_dict(add(base, tables))) for base in bases], block


class Parsed(Exception):
    """The command line was understood."""


@each_page
def test_every_command_line_parses(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    understood = argparse.ArgumentParser.parse_args

    def parse_only(self, args=None, namespace=None):
        understood(self, args, namespace)
        raise Parsed

    for argv in commands(page):
        if argv[0] in cli.SUBCOMMANDS:
            with monkeypatch.context() as patch, pytest.raises(Parsed):
                patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
                cli._load_subcommand(argv[0])(argv[1:])
            continue
        asked = parse_launch(argv, "0", "")
        if (ROOT / asked.config).is_file():
            fitted = partial(resolve_world_size, nproc=asked.nproc_per_node, gpus=0)
            config = load_config(ROOT / asked.config, asked.overrides, fit=fitted)
            worker_command(script_for(asked.script, config))


def test_the_page_on_the_start_has_every_subcommand() -> None:
    table = (ROOT / "docs/start.md").read_text().partition("| Subcommand |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(cli.SUBCOMMANDS)


def test_every_quoted_message_is_in_the_code() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "cosmos_rl").rglob("*.py")]
    texts = [
        n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    items = re.split(r"\n(?=- |\n)", (ROOT / "docs" / "troubleshooting.md").read_text())
    entries = [item.partition(" — ")[0] for item in items if item.startswith("- `") and " — " in item]
    quoted = [" ".join(text.split()) for entry in entries for text in re.findall(r"`([^`]+)`", entry)]
    assert len(quoted) > 25
    parts = [part.strip() for text in quoted for part in text.split("…") if part.strip()]
    missing = [part for part in parts if not any(part in " ".join(text.split()) for text in texts)]
    assert missing == []


def test_the_examples_of_the_customisation_page_are_the_files() -> None:
    files = {path.read_text() for path in EXAMPLES.glob("*.py")}
    shown = blocks(ROOT / "docs" / "customisation.md", "python")
    assert len(shown) == len(files)
    assert set(shown) == files


def test_the_class_of_the_new_model_page_is_the_one_that_is_tested() -> None:
    (shown,) = blocks(ROOT / "docs" / "new-model.md", "python")
    tested = ast.parse((ROOT / "tests" / "support" / "my_sana_model.py").read_text())
    assert ast.dump(ast.parse(shown)) == ast.dump(ast.Module(tested.body[1:], []))  # its docstring is not shown


def test_every_hook_is_in_the_table() -> None:
    from cosmos_rl.policy.trainer.loop import HOOKS

    named = re.findall(r"^\| `(\w+_hook)` \|", (ROOT / "docs" / "customisation.md").read_text(), re.MULTILINE)
    assert tuple(named) == HOOKS


# ---- the examples run ----------------------------------------------------------------------------------------------


@pytest.fixture
def run_example(
    tmp_path: Path, write_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, float]]]:
    """Runs a file of the examples for two steps as `python FILE --config X.toml ...` does; the metrics of the run."""
    for name in ("COSMOS_RUN_DIR", "COSMOS_EXIT_FILE", "COSMOS_LAUNCHER_PID", "COSMOS_ROLE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COSMOS_ROLE", "Controller")  # set by the entry; put back afterwards

    def run(name: str, *arguments: str) -> list[dict[str, float]]:
        config = str(write_toml())
        monkeypatch.setattr(sys, "argv", [name, "--config", config, "--train.max_num_steps=2", *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        run_folder = find_newest_run(tmp_path / "out")
        assert run_folder is not None
        return read_metrics(run_folder.metrics)

    return run


def test_own_data_trains_and_its_missing_key_is_one_message(
    run_example: Callable[..., list[dict[str, float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["step"] for row in run_example("own_dataset.py", "--custom.prompt=a photo of my cat")] == [1, 2]
    with pytest.raises(SystemExit) as end:
        run_example("own_dataset.py")
    assert end.value.code == 2
    assert "error: custom.prompt: missing" in capsys.readouterr().err


def test_own_prompts_give_validation_images(run_example: Callable[..., list[dict[str, float]]], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    run_example(
        "own_validation.py", "--validation.enable=true", f"--validation.dataset.local_dir={tmp_path}/prompts.txt"
    )
    images = (tmp_path / "out").glob("*/media/validation/step_2/*.png")
    assert sorted(path.name for path in images) == ["000_a-cat.png", "001_a-dog.png"]


def test_an_own_logger_gets_every_step(run_example: Callable[..., list[dict[str, float]]], tmp_path: Path) -> None:
    rows = run_example("own_logger.py", f"--custom.csv={tmp_path}/loss.csv")
    with (tmp_path / "loss.csv").open() as file:
        logged = [(int(step), float(loss)) for step, loss, _ in csv.reader(file)]
    assert logged == [(row["step"], row["train/loss_mean"]) for row in rows]


def test_own_hooks_see_validation_save_and_load(
    run_example: Callable[..., list[dict[str, float]]], image_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    held_out = ("--validation.enable=true", f"--validation.dataset.local_dir={image_folder}")
    rows = run_example("own_hooks.py", *held_out)
    printed = capfd.readouterr().out
    assert f"epoch 0: held-out loss {rows[-1]['val/loss_mean']}" in printed
    assert re.search(r"^step 2 of 2 goes to \S+/checkpoints/step_2/policy$", printed, re.MULTILINE)
    run_example("own_hooks.py", *held_out, "--train.resume=true", "--train.max_num_steps=3")
    assert re.search(r"^step 2 comes from \S+/checkpoints/step_2/policy$", capfd.readouterr().out, re.MULTILINE)


def test_an_own_option_changes_the_data(run_example: Callable[..., list[dict[str, float]]]) -> None:
    plain, mirrored = run_example("own_options.py"), run_example("own_options.py", "--mirror")
    assert plain[0]["train/loss_mean"] != mirrored[0]["train/loss_mean"]


@pytest.mark.process
def test_the_command_gives_a_script_its_own_options_and_keeps_the_overrides(
    write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    script = str(EXAMPLES / "own_options.py")
    argv = ["--config", str(write_toml()), "--train.max_num_steps=2", script, "--mirror", "--train.seed=7"]
    command = [sys.executable, "-m", "cosmos_rl.launcher.cli", *argv]
    done = patience.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = find_newest_run(tmp_path / "out")
    assert run is not None
    assert load_config(run.root).train.seed == 7
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2]
