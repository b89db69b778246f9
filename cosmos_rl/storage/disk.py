"""What the disk under a folder can do, tried before anything depends on it, and what to say when it is full."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cosmos_rl.errors import UserError

REFUSED = frozenset(
    getattr(errno, name)
    for name in ("EPERM", "EACCES", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EINVAL", "EBADF", "ENOTTY", "ENOLCK", "EEXIST")
)
"""Error numbers with which disks refuse an operation that they do not have: exFAT, SMB, FUSE and others differ."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")
_TORN_WORDS = ("unexpected pos", "PytorchStreamWriter failed writing")
"""What torch says when a file could not be written to its end, whatever the reason was."""


OF_A_RUN = (
    " (older runs, lower train.ckpt.max_keep, higher train.ckpt.save_freq), then continue with the same command and "
    "--train.resume=true"
)


class DiskFullError(UserError):
    """Something could not be written whole; the message says where and what to do."""

    exit_code = 1


@contextlib.contextmanager
def report_full_disk(path: Path, remedy: str = OF_A_RUN) -> Iterator[None]:
    """Turns the many ways in which libraries report a full disk into one.

    Raises:
        DiskFullError: the disk, or what this user may take of it, is full.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:  # torch.distributed.checkpoint's own exception is no Exception
        reason = explain_full_disk(error)
        if reason is None:
            raise
        raise DiskFullError(
            f"{path}: {reason}; {_free(path)}. Files that were complete are kept. Free some space there{remedy}"
        ) from error


def explain_full_disk(error: BaseException) -> str | None:
    """The reason in the system's words when ``error`` comes from a full disk, else None."""
    texts = []
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno in _FULL:
            return os.strerror(one.errno)
        texts.append(str(one))
    text = "\n".join(texts)
    found = next((words for words in _FULL_WORDS if words in text), None)
    torn = any(words in text for words in _TORN_WORDS)
    return found or (f"{_FULL_WORDS[0]} (torch: {_find_line(text, _TORN_WORDS)})" if torn else None)


def find_missing_abilities(folder: Path) -> list[str]:
    """What the disk of the existing ``folder`` cannot do of that which we can do without, a line for each.

    Raises:
        UserError: it lacks what every run needs, or nothing can be written there.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".cosmos-rl-", dir=folder, ignore_cleanup_errors=True) as scratch:
            _check_rename(Path(scratch))
            return [text for attempt, text in _CONVENIENCES if not _works(attempt, Path(scratch))]
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(f"{folder}: {error.strerror}; {_free(folder)}") from None
        what = ""
        if error.filename:
            what = f"{error.filename}: "
        raise UserError(
            f"{folder}: this disk cannot hold a run: {what}{error.strerror or error}; choose another train.output_dir"
        ) from None


def _check_rename(scratch: Path) -> None:
    """A step is built aside and renamed, with everything in it."""
    (scratch / "aside" / "inside").mkdir(parents=True)
    file = scratch / "aside" / "inside" / "file"
    file.write_bytes(b"whole")
    os.rename(scratch / "aside", scratch / "final")
    if (scratch / "final" / "inside" / "file").read_bytes() != b"whole":
        raise OSError(errno.EIO, "a renamed folder has lost its content", str(scratch / "final"))


def _works(attempt: Callable[[Path], None], scratch: Path) -> bool:
    try:
        attempt(scratch)
    except OSError as error:
        if error.errno in _FULL:
            raise
        return False
    return True


def _symbolic_link(scratch: Path) -> None:
    os.symlink("final", scratch / "link")


def _hard_link(scratch: Path) -> None:
    os.link(scratch / "final" / "inside" / "file", scratch / "other_name")


def _lock(scratch: Path) -> None:
    import fcntl

    with (scratch / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _folder_sync(scratch: Path) -> None:
    opened = os.open(scratch, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


_CONVENIENCES: tuple[tuple[Callable[[Path], None], str], ...] = (
    (_symbolic_link, "no symbolic links: checkpoints, safetensors and best are left out, look into the run folder"),
    (_hard_link, "no hard links: each export of a whole pipeline takes its full size"),
    (_lock, "no locks: make sure that no two commands continue the same run"),
    (_folder_sync, "no fsync of folders: a power cut may lose the newest step"),
)
"""(attempt, what follows where it fails). What else a disk may refuse is done in another way without a word."""


def require_writable(path: Path, advice: str) -> None:
    """Look, before any work, whether the file or folder ``path`` can be made; what is there may be replaced.

    Args:
        advice: what to do if not, for the message.

    Raises:
        UserError: nothing can be written to the folder around it.
    """
    place = find_existing_folder(path.expanduser().absolute().parent)
    try:
        with tempfile.TemporaryDirectory(prefix=".cosmos-rl-", dir=place, ignore_cleanup_errors=True):
            pass
    except OSError as error:
        raise UserError(f"{place}: nothing can be written there ({error.strerror}); {advice}") from None


def find_existing_folder(path: Path) -> Path:
    """``path``, or the folder that exists and will hold it; where one may not be entered, that one."""
    folder = path.expanduser().absolute()
    while not os.path.exists(folder):  # Path.exists raises below a folder that may not be entered
        folder = folder.parent
    return folder


def find_closed_folder(path: Path) -> Path | None:
    """The folder on the way to ``path`` that this user may not enter; None: there is none."""
    try:
        path.expanduser().stat()
    except PermissionError:
        return find_existing_folder(path)
    except OSError:
        return None
    return None


def _free(path: Path) -> str:
    with contextlib.suppress(OSError):
        return f"{shutil.disk_usage(find_existing_folder(path)).free / 1e6:,.0f} MB are free on that disk"
    return "its free space is unknown"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and those that torch's checkpoint writer has collected from the ranks."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        failures = getattr(one, "failures", None)
        collected = [pair[0] for pair in failures.values()] if isinstance(failures, dict) else []
        waiting += [next_ for next_ in (one.__cause__, one.__context__, *collected) if isinstance(next_, BaseException)]


def _find_line(text: str, words: tuple[str, ...]) -> str:
    return next(line.strip() for line in text.splitlines() if any(word in line for word in words))
