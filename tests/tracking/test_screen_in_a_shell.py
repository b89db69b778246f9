"""The live display and the shell that a run was started in."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import pytest

from cosmos_rl.tracking.live import show_progress
from tests.support import patience
from tests.support.paths import ROOT

IN_A_SHELL = """
import fcntl, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # as a shell has it
ask = [sys.executable, "-c", "from cosmos_rl.tracking.screen import is_in_background as f; print(f(), flush=True)"]
rank = [sys.executable, "-c", f"import subprocess; subprocess.run({ask!r}, start_new_session=True)"]
for command in (ask, rank):
    subprocess.run(command)
    subprocess.run(command, process_group=0)
"""


def test_lines_are_drawn_for_the_size_of_the_terminal_and_not_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a shell may have exported, and which stays as it was when the window becomes smaller."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COSMOS_PROGRESS", raising=False)
    monkeypatch.setattr("cosmos_rl.tracking.screen.is_in_background", lambda: False)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    written = ""
    with open(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with show_progress(wanted=True, is_main=True) as display:
            display.show_step(3, 9, left_s=5.0, step_s=1.0, numbers={"Loss": "1.0", "Reward": "2.0", "KL": "3" * 20})
            deadline = time.monotonic() + 60
            while "Loss" not in written and time.monotonic() < deadline:
                written += os.read(ours, 2**16).decode()
    os.close(ours)
    lines = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", written).split("\r\n")
    assert any(line.startswith("Step 3/9") for line in lines)
    assert max(map(len, lines)) <= 40


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_job_in_the_background_knows_it_and_so_do_its_ranks() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", IN_A_SHELL]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        stdin=theirs,
        stdout=subprocess.PIPE,
        env=environment,
        timeout=patience.HANG_S,
        start_new_session=True,
        check=True,
    )
    os.close(theirs)
    os.close(ours)
    assert done.stdout.split() == [b"False", b"True", b"False", b"True"]
