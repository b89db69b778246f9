"""CPU time of the command until it has said what it can do, and of a run of one step, each against an import of what
every such command needs."""

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.images import write_images
from cosmos_rl.policy.model.tiny import build

HELP = "from cosmos_rl.launcher.cli import main; main(['--help'])"
IMPORTS = "import argparse, pydantic"
RUN = "from cosmos_rl.launcher.cli import main; import sys; main(sys.argv[1:])"
STOCK = "from diffusers import StableDiffusion3Pipeline"
ROUNDS, RUNS = 7, 3


def cpu_seconds(code: str, *arguments: str) -> float:
    """CPU time of a Python process that runs ``code``, and of those that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    ratios, seconds = [], []
    for _ in range(ROUNDS):
        seconds.append(cpu_seconds(HELP))
        ratios.append(seconds[-1] / cpu_seconds(IMPORTS))
    result = f"{statistics.median(ratios):.2f} ({statistics.median(seconds):.2f} s)"
    return [("cosmos-rl --help, against importing argparse and pydantic", result, "<= 3"), one_step()]


def one_step() -> tuple[str, str, str]:
    """A run of one step of the smallest model on one rank, against the import of the stock pipeline's class."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "data", 4, 32)
        tables = {
            "policy.model_name_or_path": str(build("sd3", folder / "model", "unit", seed=0)),
            "policy.is_diffusers": "true",
            "policy.diffusers.inference_size": "[32, 32]",
            "train.output_dir": str(folder / "out"),
            "train.max_num_steps": "1",
            "train.train_batch_per_replica": "4",
            "train.train_policy.dataset.local_dir": str(folder / "data"),
        }
        empty = folder / "run.toml"
        empty.touch()
        options = ["--config", str(empty), *(f"--{key}={value}" for key, value in tables.items())]
        ratios, seconds = [], []
        for _ in range(RUNS):
            seconds.append(cpu_seconds(RUN, *options))
            ratios.append(seconds[-1] / cpu_seconds(STOCK))
    result = f"{statistics.median(ratios):.2f} ({statistics.median(seconds):.2f} s)"
    return "run of one step, against importing the stock SD3 pipeline", result, "<= 1.1"
