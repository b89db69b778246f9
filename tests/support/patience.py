"""Waiting for processes. A time-out is for a hang, in which nothing moves any more, and not for a busy machine."""

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HANG_S = 1800
"""The time limit of tests that start processes or train, for what hangs in spite of the waiting below."""
SILENT_S = 120.0
"""So long may the processes that this one started do next to nothing before they count as hung."""
WORKING = 1 / 30
"""Of one core; two launchers and two workers that wait in loops take 3 CPU-seconds in 120 s."""
TICKS_PER_S = 100.0


def wait_until(condition: Callable[[], object], what: str, *, silent_s: float = SILENT_S, poll_s: float = 0.02) -> None:
    """Return when ``condition`` holds.

    Raises:
        AssertionError: the processes that were started do nothing any more.
    """
    worked, since = work_of_descendants(), time.monotonic()
    checked = since
    while not condition():
        time.sleep(poll_s)
        now = time.monotonic()
        if now - checked < 1.0:
            continue
        checked, current = now, work_of_descendants()
        if abs(current - worked) >= WORKING * silent_s:  # it falls where a process ends
            worked, since = current, now
        assert now - since < silent_s, f"{what}: nothing has moved for {silent_s:g} s"


def exit_code(process: subprocess.Popen[Any]) -> int:
    """The code with which the process ends."""
    wait_until(lambda: process.poll() is not None, f"the end of {process.args}")
    return process.wait()


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with its output as text, without a limit on the time that a busy machine takes."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with subprocess.Popen(command, **options) as process:
        parts: list[tuple[str, str]] = []

        def is_done() -> bool:
            try:
                parts.append(process.communicate(timeout=0.02))
            except subprocess.TimeoutExpired:
                return False
            return True

        try:
            wait_until(is_done, f"the end of {command}", poll_s=0.0)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, *parts[0])


def work_of_descendants() -> float:
    """CPU-seconds of all processes that this one started, and of those that they started."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        pid = int(stat.parent.name)
        parents[pid], used[pid] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS_PER_S
    own = Path("/proc/self").resolve().name
    found, wanted = 0.0, [int(own)]
    while wanted:
        parent = wanted.pop()
        children = [pid for pid, above in parents.items() if above == parent]
        found += sum(used[pid] for pid in children)
        wanted += children
    return found
