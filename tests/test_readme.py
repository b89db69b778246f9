"""The README's commands run as written, from an empty folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]


@pytest.mark.process
def test_the_laptop_commands_of_the_readme_train_export_and_sample(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (commands,) = [block for block in blocks if block.startswith("cosmos-rl tiny-model")]
    (tmp_path / "my_pictures").mkdir()
    for i in range(4):
        Image.new("RGB", (50, 40), (60 * i, 0, 0)).save(tmp_path / "my_pictures" / f"{i:04d}.jpg")
        (tmp_path / "my_pictures" / f"{i:04d}.json").write_text(json.dumps({"prompt": f"red {i}"}))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    # the command as installed, wherever this Python has it
    alias = f'cosmos-rl() {{ "{sys.executable}" -m cosmos_rl.launcher.cli "$@"; }}\nset -e\n'
    result = "outputs/stable-diffusion-3-5-image-sft-lora/safetensors/step_4"
    commands += f'cosmos-rl sample {result} "red 1" --out samples --steps 2 --size 32 32\n'
    commands += "cosmos-rl export outputs/stable-diffusion-3-5-image-sft-lora/checkpoints/step_4 --out exported\n"
    done = subprocess.run(
        ["bash", "-c", alias + commands],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "samples" / "000_red-1.png").is_file()
    assert (tmp_path / "exported" / "lora" / "model.safetensors").is_file()
    assert "checkpoint saved successfully at" in done.stdout
