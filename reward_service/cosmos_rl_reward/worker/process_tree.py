"""The processes that a reward starts, so that none of them outlives it: found by a mark in their environment and as
descendants, whatever session they have put themselves into."""

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
    """What tells a process from all others, also from a later one with the same PID."""
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


def _marked() -> Iterator[tuple[psutil.Process, str]]:
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
    """End everything that carries the mark, and the processes ``known`` with what they have started."""
    everybody = list(known)
    for _ in range(_ROUNDS):
        everybody += [child for process in everybody for child in list_descendants(process.pid)]
        everybody += [process for process, found in _marked() if found == mark]
        if not _end(everybody):
            return
        everybody = []


def kill_descendants() -> None:
    """End everything below this process."""
    for _ in range(_ROUNDS):
        if not _end(list_descendants(os.getpid())):
            return


def kill_leftovers() -> list[int]:
    """End what scorers have left behind whose host is gone; returns the PIDs. Those of a host that runs are left alone,
    and so is everything of another PID namespace, whose numbers mean nothing here."""
    here = _identity(os.getpid()).rpartition(":")[0].rpartition(":")[0] + ":"
    gone = []
    for process, mark in _marked():
        identity = mark.rpartition(":")[0]
        if identity.startswith(here) and not _alive(identity) and _end([process]):
            gone.append(process.pid)
    return gone


def _end(processes: Iterable[psutil.Process]) -> bool:
    """SIGKILL; returns whether any was still there."""
    ended = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, timeout=1)
    return bool(ended)


def become_subreaper() -> None:
    """Let this process become the parent of what its descendants leave behind (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(scorers: Collection[int]) -> None:
    """Take the exit codes of orphans that have ended. Scorers have somebody who waits for theirs."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            ended = process.status() == psutil.STATUS_ZOMBIE
            if ended and process.pid not in scorers and time.time() - process.create_time() > _OLD_S:
                os.waitpid(process.pid, os.WNOHANG)
