"""A run in a terminal has a live display and leaves a clean screen; the same in a pipe prints plain lines."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import patience
from tests.support.paths import ROOT
from tests.support.terminal import Emulator, run_in_terminal

pytestmark = [pytest.mark.zoo, pytest.mark.timeout(patience.HANG_S)]

COMMAND = (sys.executable, "-m", "cosmos_rl.launcher.cli", "--config")
LIMITS = "max_loss_ratio = 1.0000001, min_diversity_ratio = 1.0"  # one of them is crossed
ALARMS = f'reward_hacking_guard = {{ samples = 4, freq = 1, {LIMITS}, action = "warn" }}'


def surroundings(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COSMOS_PROGRESS")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **more}


class Watch:
    """What the display showed, drawing by drawing."""

    def __init__(self) -> None:
        self.drawn: list[list[str]] = []

    def __call__(self, process: subprocess.Popen[bytes], emulator: Emulator) -> None:
        below = [line.rstrip() for line in emulator.lines[emulator.row :]]  # from where the cursor rests
        if any(below):
            self.drawn.append([line for line in below if line])

    def phases(self) -> dict[str, list[list[str]]]:
        """Phase -> the drawings in which it was shown."""
        found: dict[str, list[list[str]]] = {}
        for lines in self.drawn:
            for line in lines:
                if match := re.fullmatch(r"([a-z ]+?)( \d+/\d+)?, \d+s", line):
                    found.setdefault(match[1], []).append(lines)
        return found


def run_until_drawn(config: Path, script: str, folder: Path, *options: str) -> tuple[Watch, list[str]]:
    """What the display showed on a terminal of 80 columns, and the lines that it has at the end."""
    watch, module = Watch(), f"cosmos_rl.tools.dataset.{script}"
    command = [*COMMAND, str(config), *options, str(ROOT / "tests" / "support" / "until_drawn.py"), module]
    code, written, emulator = run_in_terminal(command, surroundings(), folder, size=(60, 80), watch=watch)
    assert code == 0, written
    return watch, emulator.lines


def join_lines(rows: list[str]) -> list[str]:
    """Log lines that are wider than the terminal, each in one piece."""
    lines: list[str] = []
    for row in rows:
        if not lines or re.match(r"(\[rank\d\]:)?\[cosmos\] ", row):
            lines.append(row)
        else:
            lines[-1] += row
    return lines


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminal_shows_every_phase_time_left_numbers_and_alarms_and_is_clean_at_the_end(
    write_nft_toml: Callable[..., Path], tmp_path: Path, ranks: int
) -> None:
    """On two ranks there is one display too, and no line twice."""
    config = write_nft_toml()
    config.write_text(config.read_text().replace("reward_hacking_guard.samples = 4", ALARMS))
    validation = (
        "--validation.enable=true",
        "--validation.freq=1",
        f"--validation.dataset.local_dir={tmp_path / 'prompts.txt'}",
    )
    steps = ("--train.max_num_steps=3", "--train.ckpt.save_freq=1", "--train.ckpt.enable_checkpoint=true")
    options = (*steps, *validation, "--nproc-per-node", str(ranks))
    watch, rows = run_until_drawn(config, "diffusion_nft", tmp_path, *options)
    phases = watch.phases()
    before = {"importing", "loading", "preparing"}
    of_a_step = {"sampling", "encoding", "scoring", "training", "validating", "saving"}
    assert set(phases) == before | of_a_step
    log = join_lines([row for row in rows if row])
    progress = [found for line in log if (found := re.search(r" Step: (\d)/3, (Loss: .*?), Grad norm", line))]
    assert [int(found[1]) for found in progress] == [1, 2, 3]
    numbers = {int(found[1]): found[2].replace(": ", " ").split(", ") for found in progress}
    for name in of_a_step:
        assert {1, 2} <= shown_steps(phases[name], 3), name
        for lines in phases[name]:
            assert_step_is_shown(lines, numbers)
    # the whole text of each alarm stands above the display, which shows as much of it as fits into one line
    alarms = [line.partition(" WARNING - ")[2] for line in log if " WARNING - step " in line]
    last_words = (": the policy is leaving what the model knows", ": the policy collapses")
    assert alarms
    assert all(alarm.endswith(last_words) for alarm in alarms)
    shown = {line for lines in watch.drawn for line in lines if line.startswith("Alarm at ")}
    assert {len(line) for line in shown} == {80}
    assert {line[:-1] for line in shown} == {f"Alarm at {alarm}"[:79] for alarm in alarms}
    assert all(line.endswith("…") for line in shown)
    # nothing is left of the display, and every line of the run is there once
    assert not {row for row in rows if row} & {line for lines in watch.drawn for line in lines}
    assert [line for line in log if not re.match(r"(\[rank0\]:)?\[cosmos\] ", line)] == []  # none of another rank
    assert len(log) == len(set(log))


def shown_steps(drawings: list[list[str]], total: int) -> set[int]:
    return {int(found[1]) for lines in drawings if (found := re.match(rf"Step (\d)/{total} ", lines[0]))}


def assert_step_is_shown(lines: list[str], numbers: dict[int, list[str]]) -> None:
    """Steps that are done, the time left, and the loss and reward that the log has of the newest step."""
    found = re.match(r"Step (\d)/3 .*\b(\d+) %", lines[0])
    if found is None:  # before the first step
        assert not any(line.startswith("Loss ") for line in lines)
        return
    done = int(found[1])
    assert int(found[2]) == 100 * done // 3
    if done == 0:
        return
    assert re.search(r"  \d+\.\ds/step  ETA \d+s$", lines[0])
    (values,) = [line.split("  ") for line in lines if line.startswith("Loss ")]
    assert len(values) >= 2
    assert [value for value in values if value.startswith(("Loss ", "Reward "))] == [
        value for value in numbers[done] if value.startswith(("Loss ", "Reward ")) and "std" not in value
    ]


def test_fine_tuning_shows_that_it_reads_data(write_toml: Callable[..., Path], tmp_path: Path) -> None:
    watch, _ = run_until_drawn(write_toml(), "diffusers_dataset", tmp_path, "--train.max_num_steps=2")
    of_a_step = {"reading data", "encoding", "training", "saving"}
    assert set(watch.phases()) == {"importing", "loading", "preparing"} | of_a_step
    assert [shown_steps(watch.phases()[name], 2) for name in ("reading data", "encoding", "training")] == [{0, 1}] * 3


def test_a_pipe_gets_one_plain_line_every_log_interval(write_toml: Callable[..., Path], tmp_path: Path) -> None:
    command = [*COMMAND, str(write_toml()), "--logging.log_interval=3", "--train.max_num_steps=8"]
    done = patience.run(command, env=surroundings(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    lines = re.findall(
        r"Step: (\d+/8), Loss: \d+\.\d{5}, .*, Iteration time: \d+\.\d\ds, ETA: \d+\.\ds$", done.stdout, re.M
    )
    assert lines == ["1/8", "3/8", "6/8", "8/8"]
