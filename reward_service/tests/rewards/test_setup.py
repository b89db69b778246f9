"""What is installed for each reward."""

import asyncio
import importlib
import sys

import pytest

from cosmos_rl_reward import prepare
from cosmos_rl_reward.config import RewardArgs
from cosmos_rl_reward.handler import RewardRegistry
from cosmos_rl_reward.rewards import MODULES


@pytest.mark.parametrize("name", sorted(MODULES))
def test_an_environment_for_it_has_what_it_imports(name):
    importlib.import_module(f"cosmos_rl_reward.rewards.{MODULES[name]}")
    wanted = {r.split(">")[0].split("<")[0] for r in prepare.list_requirements(name)}
    assert {"numpy", "pillow"} <= wanted
    if RewardRegistry.get_reward_class(name).array_type == "torch":
        assert {"torch", "transformers"} <= wanted
    assert ("onnxruntime" in wanted) == (name == "ocr")
    assert ("httpx" in wanted) == (name in ("unified_reward", "cosmos_reason1"))


@pytest.mark.parametrize("locked", [False, True])
def test_the_text_of_hpsv3_comes_without_its_pins(monkeypatch, tmp_path, locked):
    commands = []

    async def run(command, what):
        commands.append(command)
        return ""

    monkeypatch.setattr(prepare, "_run", run)
    if locked:
        (tmp_path / "hpsv3.txt").write_text("torch==2.11\nhpsv3==1.0.0\n")
    args = RewardArgs(reward_type="hpsv3", venv_python=sys.executable)
    asyncio.run(prepare._install(args, prepare._Tools(False, None, tmp_path if locked else None, say=print)))
    if locked:
        assert [command[-3:] for command in commands] == [["--no-deps", "-r", str(tmp_path / "hpsv3.txt")]]
        return
    first, second = commands
    assert any(part.startswith("transformers") for part in first)
    assert "--no-deps" not in first
    assert second[-2:] == ["--no-deps", "hpsv3==1.0.0"]
