"""Calls of `cosmos-rl check` and `cosmos-rl doctor`, and runs that show what their estimates are worth."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cosmos_rl.launcher.acceptance.accept import ModelFiles, read_model
from cosmos_rl.launcher.acceptance.length import run_length
from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import Config, load_config
from tests.support.paths import ROOT


def check(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit code, report and errors of one call."""
    code = main(["check", *map(str, argv)])
    printed = capsys.readouterr()
    return code, " ".join(printed.out.split()), printed.err


def sizes(path: Path, *overrides: str) -> tuple[Config, ModelFiles]:
    """What the estimates of a configuration start from."""
    config = load_config(path, overrides)
    return config, read_model(config)


def folder_size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def modules_of_check(path: Path) -> set[str]:
    """What a process has imported that checks a configuration and its environment."""
    code = (
        "import sys; from cosmos_rl.launcher.cli import main;"
        f"assert main(['check', '--env', '--config', {str(path)!r}]) == 0;"
        "print('modules', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.splitlines()[-1].split()[1:])


def marks(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, str], str]:
    """Exit code, subject -> mark, and all that was printed."""
    code = main(["doctor", *map(str, argv)])
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line[:5].strip() in ("ok", "warn", "FAIL", "-")]
    return code, {line[6:28].strip(): line[:5].strip() for line in lines}, out


def estimate_and_rise(
    path: Path, model: Path, preset: tuple[int, int, int], options: Sequence[str]
) -> tuple[estimate.Memory, estimate.Disk, int]:
    """What is estimated for a pipeline of that size, and how far memory rises in a run of its own."""
    import torch

    from cosmos_rl.policy.model.tiny.sd3 import Preset, sd3_pipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sd3_pipeline(Preset(*preset)).save_pretrained(model)
    overrides = [f"--policy.model_name_or_path={model}", "--train.device=cpu", *options]
    config, files = sizes(path, *overrides)
    plan = run_length(config, own_data=False)
    expected = estimate.memory(config, files, on_cpu=True, saves=plan.saves)
    command = [sys.executable, "-m", "tests.support.memory_job", str(path), *overrides]
    # without it glibc keeps freed blocks of some sizes, how many differs from run to run
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return expected, estimate.disk(config, files), int(done.stdout.split("rise ")[1])


def assert_memory_and_disk(
    expected: estimate.Memory, on_disk: estimate.Disk, measured: int, output: Path, *, step: int
) -> None:
    """The estimates are within 15 % of the memory that was ``measured`` and of what ``step`` takes on the disk."""
    assert abs(expected.peak - measured) <= 0.15 * measured, (expected, measured)
    assert folder_size(output / f"checkpoints/step_{step}") == pytest.approx(on_disk.checkpoint, rel=0.15)
    exported = folder_size(output / f"safetensors/step_{step}")
    assert exported == pytest.approx(on_disk.export + on_disk.shared_export, rel=0.15)
