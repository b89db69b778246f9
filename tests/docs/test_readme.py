"""The commands of the README and of other pages run as written, from an empty folder."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.support import patience
from tests.support.paths import ROOT


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def in_shell(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in ``folder`` with the command as installed, wherever this Python has it."""
    alias = f'cosmos-rl() {{ "{sys.executable}" -m cosmos_rl.launcher.cli "$@"; }}\nset -e\n'
    place = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", alias + commands]
    return patience.run(command, cwd=folder, env=place)


@pytest.mark.process
def test_the_laptop_commands_of_the_readme_train_export_and_sample(tmp_path: Path) -> None:
    (commands,) = [block for block in blocks("README.md", "bash") if block.startswith("cosmos-rl tiny-model")]
    (tmp_path / "my_images").mkdir()
    for i in range(4):
        Image.new("RGB", (50, 40), (60 * i, 0, 0)).save(tmp_path / "my_images" / f"{i:04d}.jpg")
        (tmp_path / "my_images" / f"{i:04d}.json").write_text(json.dumps({"prompt": f"red {i}"}))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    result = "outputs/stable-diffusion-3-5-image-sft-lora/safetensors/step_30"
    commands += f'cosmos-rl sample {result} "red 1" --out samples --steps 2 --size 32 32\n'
    commands += "cosmos-rl export outputs/stable-diffusion-3-5-image-sft-lora/checkpoints/step_30 --out exported\n"
    done = in_shell(commands, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "samples" / "000_red-1.png").is_file()
    assert (tmp_path / "exported" / "lora" / "model.safetensors").is_file()
    assert "checkpoint saved successfully at" in done.stdout


@pytest.mark.process
def test_the_laptop_command_of_the_page_on_rl_learns_from_the_reward_of_the_readme(tmp_path: Path) -> None:
    (commands,) = [block for block in blocks("docs/rl.md", "bash") if block.startswith("cosmos-rl tiny-model")]
    (reward,) = [block for block in blocks("README.md", "python") if block.startswith("# my_reward.py")]
    (tmp_path / "my_reward.py").write_text(reward)
    (tmp_path / "my_prompts.txt").write_text("a red apple\na blue car\na dog\n")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    done = in_shell(commands, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = tmp_path.glob("outputs/*/2*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "reward/red_mean" in row] == list(range(1, 11))
    assert all(row["optim/grad_norm"] > 0 for row in rows if "optim/grad_norm" in row)


@pytest.mark.zoo
@pytest.mark.process
@pytest.mark.parametrize("page", ["optimisers", "data", "small-gpus"])
def test_the_laptop_command_of_a_page_trains_as_it_says(tmp_path: Path, page: str) -> None:
    (commands,) = [block for block in blocks(f"docs/{page}.md", "bash") if block.startswith("cosmos-rl tiny-model")]
    (tmp_path / "my_images").mkdir()
    for number, size in enumerate([(48, 48), (90, 30), (30, 90), (60, 60)]):
        Image.new("RGB", size, (60 * number, 0, 0)).save(tmp_path / "my_images" / f"{number}.png")
        (tmp_path / "my_images" / f"{number}.json").write_text(json.dumps({"prompt": f"red {number}"}))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    done = in_shell(commands, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = tmp_path.glob("outputs/*/2*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if math.isfinite(row["train/loss_mean"])] == [1, 2, 3, 4]
    if page == "optimisers":
        assert all(0 < row["optim/effective_learning_rate"] < 1 for row in rows)
    if page == "data":
        assert "4 images in buckets (height x width): 16 x 48: 1, 32 x 32: 2, 48 x 16: 1" in done.stdout
        assert "100.0% of their area is kept" in done.stdout
    if page == "small-gpus":
        assert "encoding 4 texts for the cache, before training" in done.stdout
