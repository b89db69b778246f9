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


def blocks_below(page: str, heading: str, language: str = "bash") -> list[str]:
    """Those of one section."""
    text = (ROOT / page).read_text()
    section = re.split(r"^#+ ", text[text.index(f"# {heading}\n") + 2 :], flags=re.MULTILINE)[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def write_pairs(folder: Path, sizes: list[tuple[int, int]]) -> None:
    """Captioned images of (width, height) each."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        Image.new("RGB", size, (60 * number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.json").write_text(json.dumps({"prompt": f"red {number}"}))


def run_as_written(commands: str, folder: Path) -> tuple[str, list[dict[str, float]]]:
    """What the commands print, and the metrics of their run."""
    write_pairs(folder / "my_images", [(48, 48), (90, 30), (30, 90), (60, 60)])
    shutil.copytree(ROOT / "configs", folder / "configs")
    done = in_shell(commands, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = folder.glob("outputs/*/2*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert all(math.isfinite(row["train/loss_mean"]) for row in rows)
    return done.stdout, rows


@pytest.mark.zoo
@pytest.mark.process
@pytest.mark.parametrize(
    ("page", "heading"), [("optimisers", None), ("data", "Several sizes"), ("small-gpus", None)], ids=lambda part: part
)
def test_the_laptop_command_of_a_page_trains_as_it_says(tmp_path: Path, page: str, heading: str | None) -> None:
    found = blocks(f"docs/{page}.md", "bash") if heading is None else blocks_below(f"docs/{page}.md", heading)
    (commands,) = [block for block in found if block.startswith("cosmos-rl tiny-model")]
    printed, rows = run_as_written(commands, tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    if page == "optimisers":
        assert all(0 < row["optim/effective_learning_rate"] < 1 for row in rows)
    if page == "data":
        assert "4 images in buckets (height x width): 16 x 48: 1, 32 x 32: 2, 48 x 16: 1" in printed
        assert "100.0% of their area is kept" in printed
    if page == "small-gpus":
        assert "encoding 4 texts for the cache, before training" in printed


@pytest.mark.zoo
@pytest.mark.process
def test_the_laptop_command_on_several_folders_takes_as_many_of_each_as_the_page_says(tmp_path: Path) -> None:
    write_pairs(tmp_path / "regularisation", [(40, 40), (32, 50)])
    (commands,) = blocks_below("docs/data.md", "Several folders")
    (said,) = blocks_below("docs/data.md", "Several folders", "text")
    printed, rows = run_as_written(commands, tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert [line.partition(f"{tmp_path}/")[2] for line in printed.splitlines() if "of an epoch" in line] == (
        said.splitlines()
    )


@pytest.mark.zoo
@pytest.mark.process
def test_the_commands_of_the_first_page_train_sample_and_export(tmp_path: Path) -> None:
    (train,) = blocks_below("docs/start.md", "Without a GPU")
    (look,) = blocks_below("docs/start.md", "Look at the result")
    _, rows = run_as_written(train + look, tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 21))
    (sample,) = (tmp_path / "samples").glob("*.png")
    with Image.open(sample) as image:
        assert image.size == (32, 32)
    assert (tmp_path / "exported" / "lora" / "model.safetensors").is_file()
