"""A service on a terminal shows a table below its log and leaves a clean screen; in a file there are plain lines."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyte
import pytest

from tests.service import MOODY, TESTS, Service, image

pytestmark = pytest.mark.process

COLUMNS = 300  # no line of the log is broken
REWARDS = [MOODY, {**MOODY, "reward_type": "unready", "options": {"start": "not ready"}, "required": False}]
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[(service|front|workers)\] [A-Z]+ ")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COSMOS_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "500")  # as a shell may export it: the terminal knows better


def read_screen(service: Service) -> list[str]:
    """What a terminal shows of all that was written, without the empty lines at its end."""
    screen = pyte.Screen(COLUMNS, 200)
    pyte.ByteStream(screen).feed(service.log.read_bytes())
    return "\n".join(line.rstrip() for line in screen.display).rstrip().split("\n")


def read_rows(service: Service) -> dict[str, list[str]]:
    """Cells of the table by reward."""
    lines = read_screen(service)
    heads = [number for number, line in enumerate(lines) if line.startswith("reward ")]
    assert len(heads) <= 1, lines  # never two tables
    rows = [re.split(r" {2,}", line) for line in lines[heads[0] + 1 :]] if heads else []
    return {row[0]: row[1:] for row in rows}


def score_all_kinds(service: Service) -> None:
    """Ten samples with a score, one without, one failed job."""
    for job in [service.submit(image(count=5)) for _ in range(2)]:
        assert service.result(job)["state"] == "succeeded"
    assert service.result(service.submit(image(), prompts=["nan"]))["item_errors"]
    assert service.result(service.submit(image(), prompts=["bad"]))["state"] == "failed"


@pytest.mark.parametrize("end", ["interrupt", "crash of the front"])
def test_a_terminal_shows_a_table_below_the_log_and_is_clean_at_the_end(tmp_path: Path, end: str) -> None:
    with Service(tmp_path, {"reward_args": REWARDS}).start(terminal=(40, COLUMNS)) as service:

        def see(what: str, name: str, *cells: str) -> list[str]:
            """The row of a reward as soon as it begins so."""

            def find() -> list[str] | None:
                row = read_rows(service).get(name, [])
                return row if row[: len(cells)] == list(cells) else None

            return service.until(find, 20, what)

        see("the reward is shown as ready", "moody", "ready", "0", "0")
        reason = see("the other one as failed", "unready", "failed")[-1]
        assert reason.startswith("weights missing: put them into /nowhere")
        score_all_kinds(service)
        waiting = service.submit(image(), prompts=["sleep 4"])
        see("the job that waits is shown", "moody", "ready", "1")
        assert service.result(waiting)["state"] == "succeeded"
        _, _, scored, rate, unscored, failed = see("all scores are counted", "moody", "ready", "0", "11")
        assert (scored, unscored, failed) == ("11", "1", "1")
        assert re.fullmatch(r"\d+\.\d", rate)
        if end == "crash of the front":
            service.kill("front")
            see("the front that is started again draws", "moody", "ready", "0", "0")
        assert service.stop(signal.SIGINT) == 0
        service.copying.join(20)
    lines = read_screen(service)
    assert lines[-1].endswith(" INFO stopped")
    assert [line for line in lines if not LOG_LINE.match(line)] == []
    assert find_lines(service) == []  # the table has it
    assert len([line for line in lines if line.endswith("moody: ready")]) == 1
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("terminal", [None, (40, COLUMNS)])
def test_a_file_has_plain_lines_only_when_something_happened(
    tmp_path: Path, terminal: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a terminal on which the table is turned off."""
    if terminal is not None:
        monkeypatch.setenv("COSMOS_PROGRESS", "0")
    with Service(tmp_path, {"reward_args": [MOODY], "log_interval_s": 1}).start(terminal=terminal) as service:
        score_all_kinds(service)
        service.until(lambda: sum_up(service) == (10, 1, 1), 20, "the log has the numbers")
        lines = len(find_lines(service))
        service.submit(image(), prompts=["sleep 3"])
        service.until(lambda: ", 1 job unfinished" in "".join(find_lines(service)[lines:]), 20, "the job waits")
        service.until(lambda: sum_up(service) == (11, 1, 1), 20, "its score is counted")
        lines = len(find_lines(service))
        time.sleep(2.5)  # two intervals in which nothing happens, but that a busy host may be late to say that it lives
        assert [line for line in find_lines(service)[lines:] if "absent" not in line] == []
        assert service.result(service.submit(image()))["state"] == "succeeded"
        assert service.stop() == 0
        if terminal is not None:
            service.copying.join(20)
    text = service.log.read_text()
    assert "\x1b" not in text
    assert sum_up(service) == (12, 1, 1)  # with the rest of the last interval
    assert len(re.findall(r"moody: ready", text)) == 1


def test_a_traceback_stands_above_the_table_and_hides_passwords() -> None:
    code = "from cosmos_rl_reward import logs; logs.set_up('front', above_table=True); open('redis://u:secret@h')"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    process = subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environment, timeout=60)
    os.close(theirs)
    written = os.read(ours, 2**16).decode()
    os.close(ours)
    assert process.returncode == 1
    assert re.match(r"\x1b\[J\S+ \S+ \[front\] CRITICAL ended by an error\r\nTraceback", written)
    assert "redis://u:***@h" in written
    assert "secret" not in written


IN_A_SHELL = """
import fcntl, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # as a shell has it
ask = [sys.executable, "-c", "from cosmos_rl_reward.live_table import is_in_background as f; print(f(), flush=True)"]
front = [sys.executable, "-c", f"import subprocess; subprocess.run({ask!r}, start_new_session=True)"]
for command in (ask, front):
    subprocess.run(command)
    subprocess.run(command, process_group=0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_job_in_the_background_knows_it_and_so_does_its_front() -> None:
    """Else `cosmos-rl-reward … &` would draw over what is typed."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, "-c", IN_A_SHELL]
    done = subprocess.run(
        command, stdin=theirs, stdout=subprocess.PIPE, env=environment, timeout=60, start_new_session=True, check=True
    )
    os.close(theirs)
    os.close(ours)
    assert done.stdout.split() == [b"False", b"True", b"False", b"True"]


def find_lines(service: Service) -> list[str]:
    return re.findall(r" \[\w+\] INFO (last \d+ s: .*)", service.log.read_text())


def sum_up(service: Service) -> tuple[int, int, int]:
    """Samples, those without a score and failed jobs of all lines together."""
    text = "\n".join(find_lines(service))
    patterns = (r"moody (\d+) sample", r"(\d+) without a score", r"(\d+) jobs? failed")
    samples, without, failed = (sum(map(int, re.findall(pattern, text))) for pattern in patterns)
    return samples, without, failed
