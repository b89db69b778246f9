"""The processes that a reward starts, so that none of them outlives it: found by a mark in their environment and as
descendants, in whatever session they are."""

import contextlib
import ctypes
import os
import sys
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import psutil

MARK = "COSMOS_RL_REWARD_FAMILY"
_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 5  # what is killed may have started another just before
_OLD_S = 60.0


def new_mark() -> str:
    """A mark for one scorer of this process: PID namespace, PID and start of the host, and a random name."""
    return f"{_identity(os.getpid())}:{uuid.uuid4().hex}"


def _identity(pid: int) -> str:
    """Identifies a process, also against a later one with the same PID."""
    if not sys.platform.startswith("linux"):
        return f"-:{pid}:{psutil.Process(pid).create_time():.0f}"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        raise psutil.NoSuchProcess(pid) from None
    # the 22nd field, in ticks since the machine started: unlike a time of day it does not move with the clock
    return f"{namespace}:{pid}:{fields[19]}"


def _alive(identity: str) -> bool:
    try:
        return _identity(int(identity.rpartition(":")[0].rpartition(":")[2])) == identity
    except (psutil.NoSuchProcess, ValueError):
        return False


def _find_marked() -> Iterator[tuple[psutil.Process, str]]:
    """All processes of this user with a mark, and the mark."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real == os.getuid() and MARK in (variables := process.environ()):
                yield process, variables[MARK]


def list_descendants(pid: int) -> list[psutil.Process]:
    """Children of a process, their children, and so on."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def kill_marked(mark: str, known: Iterable[psutil.Process] = ()) -> None:
    """Kill all processes with the mark, and the processes ``known`` with their descendants."""
    everybody = list(known)
    for _ in range(_ROUNDS):
        everybody += [child for process in everybody for child in list_descendants(process.pid)]
        everybody += [process for process, found in _find_marked() if found == mark]
        if not _end(everybody):
            return
        everybody = []


def kill_descendants() -> None:
    """Kill all descendants of this process."""
    for _ in range(_ROUNDS):
        if not _end(list_descendants(os.getpid())):
            return


def kill_leftovers() -> list[int]:
    """Kill leftover processes of scorers whose host has exited; returns the PIDs. Those of a running host are kept,
    and so is everything of another PID namespace, whose PIDs are not valid here."""
    here = _identity(os.getpid()).rpartition(":")[0].rpartition(":")[0] + ":"
    killed = []
    for process, mark in _find_marked():
        identity = mark.rpartition(":")[0]
        if identity.startswith(here) and not _alive(identity) and _end([process]):
            killed.append(process.pid)
    return killed


def _end(processes: Iterable[psutil.Process]) -> bool:
    """SIGKILL; returns whether any was still running."""
    ended = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, timeout=1)
    return bool(ended)


def become_subreaper() -> None:
    """Make this process the parent of orphaned descendants (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(scorers: Collection[int]) -> None:
    """Collect the exit codes of orphans that have ended. Those of scorers are awaited elsewhere."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            ended = process.status() == psutil.STATUS_ZOMBIE
            if ended and process.pid not in scorers and time.time() - process.create_time() > _OLD_S:
                os.waitpid(process.pid, os.WNOHANG)
