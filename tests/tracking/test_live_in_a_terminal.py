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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminal_shows_phases_time_left_numbers_and_alarms_and_is_clean_at_the_end(
    write_nft_toml: Callable[..., Path], tmp_path: Path, ranks: int
) -> None:
    """On two ranks there is one display too, and no line twice."""
    config = write_nft_toml()
    text = config.read_text().replace("cosmos_rl.reward.examples:sharpness", "tests.support.nft_rewards:takes_a_moment")
    config.write_text(text.replace("reward_hacking_guard.samples = 4", ALARMS))
    drawn: set[str] = set()

    def watch(process: subprocess.Popen[bytes], emulator: Emulator) -> None:
        drawn.update(emulator.lines[emulator.row :])  # from where the cursor rests

    command = [*COMMAND, str(config), "--train.max_num_steps=3", "--nproc-per-node", str(ranks)]
    code, written, emulator = run_in_terminal(command, surroundings(), tmp_path, size=(40, 120), watch=watch)
    assert code == 0, written
    phases = {line.partition(",")[0].rstrip("0123456789/ ") for line in drawn if re.search(r", \d+s$", line)}
    assert {"importing", "scoring"} <= phases
    steps = [line for line in drawn if line.startswith("Step ")]
    assert {line.split()[1] for line in steps} >= {"0/3", "1/3", "2/3"}
    assert any(re.search(r"━.* 33 %  \d+\.\ds/step  ETA \d+s$", line) for line in steps)
    assert any(re.match(r"Loss \d+\.\d{5}  Reward -?\d\.\d{4}", line) for line in drawn)
    alarms = [line for line in emulator.lines if " WARNING " in line]
    shown = {line for line in drawn if line.startswith("Alarm at step ")}
    assert alarms
    assert shown
    assert all(any(line.removeprefix("Alarm at ").rstrip("…") in alarm for alarm in alarms) for line in shown)
    # nothing is left of the display, and every line of the run is there once
    assert not [line for line in emulator.lines if line in drawn and line]
    log = [line for line in emulator.lines if line]
    assert [line for line in log if not re.match(r"(\[rank0\]:)?\[cosmos\] ", line)] == []  # none of another rank
    assert [int(found[1]) for line in log if (found := re.search(r" Step: (\d)/3, Loss: ", line))] == [1, 2, 3]
    assert len(log) == len(set(log))


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
