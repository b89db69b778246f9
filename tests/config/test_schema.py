"""The description of all keys: JSON schema, documentation page and TOML of defaults, and that none of them is stale."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import Config, is_older, read_toml
from cosmos_rl.policy.config.base import Support
from cosmos_rl.policy.config.document import sections
from cosmos_rl.policy.config.keys import dotted_keys, list_keys, list_tables
from tests.support import patience
from tests.support.paths import ROOT

SHIPPED = {
    "configs/schemas/cosmos_rl_config.json": [],
    "docs/configuration.md": ["--markdown"],
    "configs/cosmos_rl_config.toml": ["--toml"],
}
TAPLO = shutil.which("taplo") or str(Path(sys.executable).with_name("taplo"))  # installed with the extra "dev"


def rows_of(page: str) -> list[tuple[str, str]]:
    """(key, status) of all rows of its tables of keys."""
    return re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]+) \|$", page, flags=re.MULTILINE)


def taplo(*paths: Path) -> subprocess.CompletedProcess[str]:
    return patience.run([TAPLO, "lint", *map(str, paths)])


@pytest.mark.parametrize("path", SHIPPED)
def test_the_shipped_descriptions_are_those_of_the_code(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", *SHIPPED[path]]) == 0
    printed = capsys.readouterr().out
    stale = f"{path} is stale: cosmos-rl schema {' '.join(SHIPPED[path])} > {path}"
    assert printed == (ROOT / path).read_text(), stale


def test_the_schema_is_printed_without_torch() -> None:
    code = "import sys; from cosmos_rl.launcher.cli import main; sys.exit(main(['schema']) or 'torch' in sys.modules)"
    assert patience.run([sys.executable, "-c", code]).returncode == 0


def test_the_page_names_every_key_once_with_its_status() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    effective, _, appendix = page.partition("\n## Appendix")
    assert {status for _, status in rows_of(effective)} == {
        kind.value for kind in (Support.WORKS, Support.DPO, Support.RL, Support.VIDEO)
    }
    assert len(rows_of(appendix)) == len(dict(rows_of(appendix)))
    described = dict(rows_of(appendix))
    for part in re.split(r"^## ", effective, flags=re.MULTILINE)[1:]:
        heading = part.partition("\n")[0].strip("`")
        table = re.split(r"\]| with", heading.strip("["))[0]
        for key, status in rows_of(part):
            described.setdefault(f"{table}.{key}" if heading != "Top level" else key, status)
    for key in list_keys(Config()):
        if not list_tables(key.field.annotation):  # a table that is absent by default
            assert described[key.path] == key.kind.value
    assert described["train.train_policy.kl_beta"] == Support.RL.value
    assert described["policy.lora.r"] == Support.WORKS.value


def test_the_template_is_the_defaults() -> None:
    text = (ROOT / "configs/cosmos_rl_config.toml").read_text()
    assert Config.from_dict(tomllib.loads(text)) == Config()


def test_the_template_names_every_key_that_means_something() -> None:
    text = (ROOT / "configs/cosmos_rl_config.toml").read_text()
    named = set(re.findall(r"^(?:# )?(\w+) = ", text, flags=re.MULTILINE))
    meant = {entry.name for section in sections() for entry in section.entries if entry.kind is not Support.NO_EFFECT}
    assert named == meant


def test_every_key_is_in_a_section() -> None:
    leaves = {entry.name for section in sections() for entry in section.entries}
    tables = {section.heading.strip("[]").partition("]")[0] for section in sections()}
    assert [key for key in dotted_keys(Config) if key not in tables and key.rpartition(".")[2] not in leaves] == []


def test_the_schema_says_what_has_no_effect_and_what_comes_later() -> None:
    schema = json.loads((ROOT / "configs/schemas/cosmos_rl_config.json").read_text())
    assert schema["properties"]["redis"]["description"].endswith("(no effect)")
    sizes = schema["$defs"]["ParallelismConfig"]["properties"]
    assert sizes["tp_size"]["description"].endswith("(not yet)")
    assert sizes["dp_shard_size"]["description"].endswith("samples.")


def test_every_shipped_toml_fits_the_schema_it_names() -> None:
    recipes = [path for folder in ("configs", "examples") for path in sorted((ROOT / folder).rglob("*.toml"))]
    recipes = [path for path in recipes if path.name != "rewards.toml"]  # of the reward service
    recipes = [path for path in recipes if not is_older(read_toml(path))]
    assert len(recipes) >= 11
    for recipe in recipes:
        directive = recipe.read_text().splitlines()[0]
        assert directive.startswith("#:schema ./" if recipe.parent.name == "configs" else "#:schema ../"), recipe
        named = recipe.parent / directive.removeprefix("#:schema ")
        assert named.resolve() == ROOT / "configs/schemas/cosmos_rl_config.json"
    done = taplo(*recipes)
    assert done.returncode == 0, done.stderr


def with_schema(folder: Path, line: str) -> Path:
    """A configuration of one line that names the schema."""
    path = folder / "run.toml"
    path.write_text(f"#:schema {ROOT}/configs/schemas/cosmos_rl_config.json\n{line}\n")
    return path


@pytest.mark.parametrize(
    "line",
    [
        "train.optm_lrr = 1e-4",
        "train.optm_betas = [1.5, 0.9]",
        "train.epoch = 0",
        "train.epoch = true",
        "train.optm_lr = [1e-4, 1e-5]",
        "train.ckpt.save_mode = 'later'",
        "train.train_policy = { type = 'sft', kl_beta = 0.1 }",
        "policy.diffusers.inference_size = [64]",
    ],
)
def test_an_editor_sees_a_slip(tmp_path: Path, line: str) -> None:
    assert taplo(with_schema(tmp_path, line)).returncode != 0


@pytest.mark.parametrize(
    "line",
    [
        "train.optm_lr = [1e-4]",
        "train.optm_lr = { global = 1e-4, '^x' = 1e-5 }",
        "train.resume = 'path'",
        "train.train_policy = { mini_batch = 2 }",
        "train.train_policy = { kl_beta = 0.1 }",
        "custom.any.thing = [1, { a = 2 }]",
    ],
)
def test_an_editor_accepts_what_the_program_accepts(tmp_path: Path, line: str) -> None:
    done = taplo(with_schema(tmp_path, line))
    assert done.returncode == 0, done.stderr
    Config.from_dict(tomllib.loads(line))
