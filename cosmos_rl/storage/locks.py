"""One process at a time: locks that end with the process that holds them."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from cosmos_rl.errors import UserError


@contextlib.contextmanager
def hold_lock(file: Path, wait_s: float, stuck: str) -> Iterator[None]:
    """Hold the lock ``file``, which is made, inside the block.

    Args:
        wait_s: how long to wait for another process.
        stuck: the message when that was too short.

    Raises:
        UserError: another process held it all the time.
        OSError: the file cannot be made.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        until = time.monotonic() + wait_s
        while not _try_lock(lock):
            if time.monotonic() > until:
                raise UserError(stuck)
            time.sleep(0.1)
        yield
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks; what is made is whole anyway, as it is renamed into place
    return True
