"""Stop signals as schedulers, terminals and people really send them: to all processes, twice at once, by hanging up."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cosmos_rl.data.items import Item
from cosmos_rl.data.streams import MapStream, load_batches
from cosmos_rl.launcher.ranks.signals import SAME_MOMENT_S, StopRequest, listen
from tests.support.launched import CONFIG, WORKER, wait_for
from tests.support.patience import exit_code

LAUNCH = [sys.executable, "-m", "cosmos_rl.launcher.cli", "--config", "run.toml"]
IN_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
SAVES = """
rank = os.environ["RANK"]
def body(stop):
    (here / f"ready{rank}").touch()
    deadline = time.monotonic() + HANG_S
    while not stop.requested:
        assert time.monotonic() < deadline, "no signal came"
        time.sleep(0.01)
    time.sleep(0.5)  # the step is finished and saved
    print("saved after", stop.requested, flush=True)
    (here / f"saved{rank}").write_text(stop.requested)
    return stop.exit_code
supervise(body)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    (tmp_path / "run.toml").write_text(CONFIG.replace("MODEL", str(tmp_path / "model")))
    (tmp_path / "worker.py").write_text(WORKER + SAVES)
    return tmp_path


def descendants(pid: int) -> list[int]:
    """A process and all that it and its children have started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(other for child in children for other in descendants(int(child)))]


def start(job: Path, *options: str, **where: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*LAUNCH, *options], cwd=job, start_new_session=True, **where)  # pyright: ignore


@pytest.mark.process
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75), ("SIGHUP", 75)])
def test_one_signal_to_every_process_lets_all_ranks_save(job: Path, name: str, code: int) -> None:
    launcher = start(job, "--nproc-per-node", "2", "worker.py")
    try:
        wait_for(lambda: (job / "ready0").exists() and (job / "ready1").exists())
        for pid in reversed(descendants(launcher.pid)):  # the workers first, then again by the launcher
            os.kill(pid, getattr(signal, name))
        assert exit_code(launcher) == code
    finally:
        launcher.kill()
    assert [(job / f"saved{rank}").read_text() for rank in (0, 1)] == [name, name]


@pytest.mark.process
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGUSR1", 75)])
def test_one_signal_to_every_process_while_they_import_ends_them_quietly(job: Path, name: str, code: int) -> None:
    (job / "worker.py").write_text(WORKER + "(here / 'ready').touch()\ntime.sleep(HANG_S)\n")
    launcher = start(job, "worker.py", stderr=subprocess.PIPE)
    assert launcher.stderr is not None
    try:
        wait_for((job / "ready").exists)
        for pid in reversed(descendants(launcher.pid)):
            os.kill(pid, getattr(signal, name))
        assert (exit_code(launcher), launcher.stderr.read()) == (code, b"")
    finally:
        launcher.kill()


@pytest.mark.process
def test_a_closed_terminal_saves(job: Path) -> None:
    ours, theirs = pty.openpty()
    launcher = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *LAUNCH, "worker.py"],
        cwd=job,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:

        def is_ready() -> bool:
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 4096)  # else the terminal's buffer may fill up
            return (job / "ready0").exists()

        wait_for(is_ready)
        os.close(ours)  # the kernel sends SIGHUP
        assert exit_code(launcher) == 75
    finally:
        launcher.kill()
    assert (job / "saved0").read_text() == "SIGHUP"


def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with listen(stop):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_two_interrupts_at_one_moment_are_one_request() -> None:
    stop = StopRequest()
    stop.note("SIGINT")
    stop.note("SIGINT")  # as `timeout --signal=INT` sends it
    assert (stop.requested, stop.insisted) == ("SIGINT", False)
    time.sleep(2 * SAME_MOMENT_S)
    stop.note("SIGINT")
    assert stop.insisted


class Numbers(Sequence[Item]):
    """A data set that says which process reads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Item(torch.zeros(3, 8, 8), str(os.getpid()), "")


@pytest.mark.process
def test_loader_processes_outlive_a_signal_to_all() -> None:
    batches = load_batches(Numbers(), MapStream(8, 1, 0, False, True), 0, 400, num_workers=1)
    (reader,) = {int(next(batches).items[0].prompt)}
    assert reader != os.getpid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(reader, number)
    time.sleep(0.5)
    for _ in range(20):  # more than was fetched ahead
        assert int(next(batches).items[0].prompt) == reader
