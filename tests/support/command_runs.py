"""Runs of the documented command that a test kills."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.patience import exit_code, wait_until


class Run:
    """The documented command in a process group of its own."""

    def __init__(self, config: Path, log: Path, *options: str) -> None:
        code = "import sys; from cosmos_rl.launcher.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "--config", str(config), *options]
        self._log = log.open("ab")
        self.process = subprocess.Popen(command, start_new_session=True, stdout=self._log, stderr=subprocess.STDOUT)

    def kill_group_when(self, condition: Callable[[], bool], wait_s: float = 0.0) -> None:
        """SIGKILL to launcher and workers alike, ``wait_s`` after ``condition`` holds for the first time."""

        def has_come() -> bool:
            assert self.process.poll() is None, "the run ended before the moment of the kill"
            return condition()

        wait_until(has_come, "the moment of the kill", poll_s=0.0005)
        time.sleep(wait_s)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def finish(self) -> int:
        code = exit_code(self.process)
        self._log.close()
        return code


def newest_run(output: Path) -> Path | None:
    runs = sorted(p for p in output.glob("2*") if p.is_dir()) if output.exists() else []
    return runs[-1] if runs else None


def steps_done(output: Path) -> int:
    run = newest_run(output)
    lines = (run / "metrics.jsonl").read_text().splitlines() if run and (run / "metrics.jsonl").exists() else []
    return len(lines)
