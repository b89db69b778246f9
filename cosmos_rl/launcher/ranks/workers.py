"""What all ways of running workers share: environment, stop signals, and the exit code of the job. No torch."""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cosmos_rl.launcher.ranks.signals import (
    DELIBERATE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    STOP_SIGNALS,
    StopRequest,
)
from cosmos_rl.launcher.ranks.worker_process import ready_file

MONITOR_SECONDS = 0.1
GRACE_SECONDS = 10.0
"""So long ranks may continue after another one has ended with a user's error."""


class Workers:
    """The live worker processes of this node, each in a session of its own."""

    def __init__(self, stop: StopRequest, exit_file: Path) -> None:
        self._stop = stop
        self._exit_file = exit_file
        self._live: dict[int, int] = {}
        self._signalled: set[int] = set()
        self._error_at: float | None = None

    @property
    def has_user_error(self) -> bool:
        """Whether a rank has ended with a user's error."""
        return self._error_at is not None

    def clear_exit_files(self) -> None:
        """Remove the exit files of an earlier attempt."""
        for stale in self._exit_file.parent.glob("exit.*"):
            stale.unlink()

    def record_started(self, live: Mapping[int, int]) -> None:
        """Local rank -> process of the workers that run now."""
        self._live = dict(live)
        if self._stop.requested:  # while they were being started
            self.forward()

    def forward(self) -> None:
        """Hand the stop request on to every worker, once; kill them after a second Ctrl-C."""
        for local_rank, pid in self._live.items():
            with suppress(ProcessLookupError):
                if self._stop.insisted:
                    os.killpg(pid, signal.SIGKILL)
                elif pid not in self._signalled and self._stop.requested:
                    # A worker that is still importing has nothing to save, and would die of SIGINT with a traceback.
                    ready = ready_file(Path(f"{self._exit_file}.{local_rank}")).exists()
                    self._signalled.add(pid)
                    os.kill(pid, getattr(signal, self._stop.requested if ready else "SIGTERM"))

    def end_after_user_error(self) -> None:
        """A rank with a user's error has ended; ranks that wait for it would do so until a collective times out."""
        if EXIT_USER_ERROR not in _codes(self._exit_file):
            return
        self._error_at = self._error_at or time.monotonic()
        if time.monotonic() - self._error_at > GRACE_SECONDS:
            self.kill()

    def kill(self) -> None:
        """End every worker now, and what it has started."""
        for pid in self._live.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def worker_environment(given: Mapping[str, str], exit_file: Path, *, rank: int, nproc: int) -> dict[str, str]:
    """What a worker gets in addition to the launcher's own environment and its rank."""
    environment = {
        **given,
        "COSMOS_EXIT_FILE": str(exit_file),
        "COSMOS_ROLE": "Controller" if rank == 0 else "Policy",
        "COSMOS_LAUNCHER_PID": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // nproc))
    return environment


def outcome(stop: StopRequest, exit_file: Path, process_codes: Mapping[int, int]) -> tuple[int, str]:
    """The exit code of the job, and what failed or is wrong.

    `process_codes`: rank -> exit code of each process that failed, the first failure first; negative: ended by that
    signal.
    """
    if stop.insisted:
        return EXIT_INTERRUPTED, ""
    messages = dict.fromkeys(
        path.read_text(encoding="utf-8") for path in sorted(exit_file.parent.glob("exit.*.message"))
    )
    if messages:  # a rank that has something to say takes the others down with it, by a lost connection
        code = EXIT_FAILED
        if EXIT_USER_ERROR in _codes(exit_file):
            code = EXIT_USER_ERROR
        return code, "\n".join(messages)
    if process_codes:
        by_signal = {-getattr(signal, name) for name in STOP_SIGNALS}
        asked_to = all(code in by_signal for code in process_codes.values())
        if stop.requested and asked_to:  # it had not begun to work yet, so there is nothing to save
            return stop.exit_code, ""
        # one that died takes others down, by a lost connection, perhaps before it was seen that it died
        died = [(rank, code) for rank, code in process_codes.items() if code != EXIT_FAILED]
        return EXIT_FAILED, _describe_failure(*(died or list(process_codes.items()))[0])
    if not any(exit_file.parent.glob("exit.*.ready")):
        return EXIT_FAILED, "the script ended without calling cosmos_rl.launcher.worker_entry.main"
    codes = _codes(exit_file)
    return next((code for code in DELIBERATE if code in codes), 0), ""


def _codes(exit_file: Path) -> set[int]:
    """The codes with which workers have ended on purpose."""
    texts = [path.read_text(encoding="utf-8") for path in exit_file.parent.glob("exit.*[0-9]")]
    return {int(text) for text in texts if text}  # an empty one is just being written


def _describe_failure(rank: int, code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        if name == "SIGKILL":
            name += " (out of memory?)"
        return f"the worker of rank {rank} was ended by {name}"
    return f"the worker of rank {rank} ended with exit code {code}"
