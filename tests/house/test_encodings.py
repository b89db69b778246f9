"""Text files and the output of other programs are UTF-8 whatever the locale of the machine is."""

import ast
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import patience
from tests.support.launched import CONFIG, WORKER
from tests.support.paths import ROOT

PLACES = ("cosmos_rl", "examples", "benchmarks", "reward_service/cosmos_rl_reward")
PLAIN_ARGUMENTS = {"read_text": 0, "write_text": 1}
FILES = sorted(path for place in PLACES for path in (ROOT / place).rglob("*.py"))


def calls_by_locale(source: str) -> Iterator[ast.Call]:
    """Calls that read or write text in the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        module = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        if "encoding" in named or module in ("Image", "os", "atomic", "av", "tarfile", "zipfile", "safetensors"):
            continue
        if name in ("open", "fdopen"):
            at = 0 if name == "open" and module else 1
            mode = named.get("mode", node.args[at] if len(node.args) > at else ast.Constant("r"))
            if isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" not in mode.value:
                yield node
        elif (module and len(node.args) == PLAIN_ARGUMENTS.get(name)) or any(
            is_true(named.get(name)) for name in ("text", "universal_newlines")
        ):
            yield node


def is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("path.read_text()", True),
        ("path.read_text(encoding='utf-8')", False),
        ("path.write_text(text)", True),
        ("write_text(path, text)", False),  # ours is always UTF-8
        ("open(path)", True),
        ("open(path, 'rb')", False),
        ("path.open('a')", True),
        ("path.open('ab')", False),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command, text=True, encoding='utf-8')", False),
    ],
)
def test_the_search_finds_what_depends_on_the_locale(source: str, wrong: bool) -> None:
    assert bool(list(calls_by_locale(source))) == wrong


def test_no_text_depends_on_the_locale() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for path in FILES
        for call in calls_by_locale(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["give encoding='utf-8':", *found])


@pytest.mark.process
def test_a_run_in_another_locale_keeps_what_the_configuration_says(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    toml = CONFIG.replace("MODEL", str(tmp_path / "model")) + '[logging]\nproject_name = "Müller 🐈"\n'
    (tmp_path / "run.toml").write_text(toml, encoding="utf-8")
    says = "    from cosmos_rl.utils.logging import logger\n    logger.info('Müller 🐈')\n    print('Müller 🐈')\n"
    (tmp_path / "worker.py").write_text(f"{WORKER}\ndef body(stop):\n{says}    return 0\nsupervise(body)\n", "utf-8")
    done = patience.run(
        [sys.executable, "-m", "cosmos_rl.launcher.cli", "--config", "run.toml", "worker.py"],
        cwd=tmp_path,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""},
        encoding="utf-8",
        errors="replace",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "ller" in done.stdout
    (run,) = (tmp_path / "outputs").glob("2*")
    assert tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["logging"]["project_name"] == "Müller 🐈"
