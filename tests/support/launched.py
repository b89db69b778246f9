"""What starts the `cosmos-rl` command with workers that need no torch."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.patience import HANG_S, wait_until

Place = tuple[Path, Callable[..., None]]
"""A working folder with a configuration, and a writer of worker scripts in it: the fixture `place`."""
CONFIG = """
[policy]
model_name_or_path = "MODEL"
is_diffusers = true
"""
# A worker without torch: `body(stop)` is what the trainer would be.
WORKER = (
    f"HANG_S = {HANG_S}"
    + """
import json, os, sys, time
from pathlib import Path
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.ranks.worker_process import supervise as supervised_by_us
from cosmos_rl.storage.run_folder import RunFolder, begin_run

here = Path(__file__).parent

def supervise(body):
    def begun(stop):
        begin_run(RunFolder(Path(os.environ["COSMOS_RUN_DIR"])))
        return body(stop)
    supervised_by_us(begun)

def steps(stop):
    (here / "pid").write_text(str(os.getpid()))
    (here / "ready").touch()
    deadline = time.monotonic() + HANG_S
    while not stop.requested:
        assert time.monotonic() < deadline, "no signal came"
        time.sleep(0.02)
    (here / "saved").write_text(stop.requested)
    return stop.exit_code
"""
)


def wait_for(condition: Callable[[], object]) -> None:
    wait_until(condition, "what a worker does")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def signal_myself_when(path: Path, *names: str) -> threading.Thread:
    """Sends the signals, a moment apart, to this process (the launcher runs in it) once `path` exists."""

    def send() -> None:
        wait_for(path.exists)
        for name in names:
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.3)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def newest_run(folder: Path) -> Path:
    return sorted(path for path in (folder / "outputs").iterdir() if path.name.isdigit())[-1]
