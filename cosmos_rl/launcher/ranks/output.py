"""`--log-dir`: the output of all processes goes to one file."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.errors import UserError
from cosmos_rl.storage.atomic import replace_link
from cosmos_rl.storage.run_folder import claim_folder_by_time

_TAIL_BYTES = 4000


@dataclass(frozen=True)
class LogFile:
    """The file that holds the output."""

    path: Path

    def tail(self) -> str:
        """The last lines, enough for a traceback."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").rstrip()


@contextlib.contextmanager
def redirect_output(log_dir: str | None, node: int = 0) -> Iterator[LogFile | None]:
    """Within the block everything this process and its children print goes to `log_dir/logs_<time>/policy_<node>.log`.

    Done at the level of file descriptors, so that children inherit it and their lines never overwrite each other.
    Without `log_dir` nothing changes.
    """
    if log_dir is None:
        yield None
        return
    log = LogFile(_new_folder(Path(log_dir).expanduser().absolute()) / f"policy_{node}.log")
    print(f"output goes to {log.path}", flush=True)
    target = os.open(log.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    saved = [(number, os.dup(number)) for number in (1, 2)]
    try:
        _flush()
        for number, _ in saved:
            os.dup2(target, number)
        yield log
    finally:
        _flush()
        for number, copy in saved:
            os.dup2(copy, number)
            os.close(copy)
        os.close(target)


def _new_folder(log_dir: Path) -> Path:
    try:
        folder = claim_folder_by_time(log_dir, "logs_%Y%m%d-%H%M%S")
        replace_link(log_dir / "logs_latest", folder)
    except OSError as error:
        raise UserError(f"--log-dir {log_dir}: {error.strerror or error}") from None
    return folder


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
