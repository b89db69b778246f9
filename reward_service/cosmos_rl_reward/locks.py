"""Lock files: a process owns what it has locked until it ends, however it ends."""

import fcntl
from pathlib import Path
from typing import IO


def try_lock(path: Path) -> IO[str] | None:
    """Own a lock file as long as the returned file is open; None when another process has it."""
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as it is owned
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
