"""Files and folders that are either absent or whole, whatever moment the process dies at."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cosmos_rl.storage.disk import REFUSED


def flush(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut, on disks that can do that."""
    with _ignore_refusal():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def move(source: Path, target: Path) -> None:
    """Rename a file or link, over an older one in one step where the disk can do that."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno not in REFUSED or not os.path.lexists(target):
            raise
        os.unlink(target)
        os.replace(source, target)


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` aside, flush it to the disk and rename it to ``path``."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        share(Path(name))
        move(Path(name), path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    flush(path.parent)


def share(file: Path) -> None:
    """Give a private file, as ``mkstemp`` and safetensors make them, the rights of any other new one."""
    umask = os.umask(0)
    os.umask(umask)
    with _ignore_refusal():
        os.chmod(file, 0o666 & ~umask)


def write_text(path: Path, text: str) -> None:
    """``write_bytes`` for UTF-8 text."""
    write_bytes(path, text.encode())


def staging_path(final: Path) -> Path:
    """The folder in which ``final`` is built: a hidden sibling, so that nobody takes it for a finished one."""
    return final.parent / f".{final.name}.tmp"


def begin(final: Path) -> Path:
    """Make an empty staging folder for ``final``; the remains of an interrupted attempt are removed."""
    stage = staging_path(final)
    if stage.exists():
        shutil.rmtree(stage)
    stage.mkdir(parents=True)
    return stage


def commit(final: Path) -> None:
    """Flush the staging folder of ``final`` and rename it into place; an older ``final`` is replaced."""
    stage = staging_path(final)
    for folder, _, names in os.walk(stage):
        for name in names:
            flush(Path(folder) / name)
        flush(Path(folder))
    old = final.parent / f".{final.name}.old"
    if old.exists():
        shutil.rmtree(old)
    if final.exists():
        os.rename(final, old)
    os.rename(stage, final)
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a folder so that an interruption leaves no half of it under its own name."""
    aside = folder.parent / f".{folder.name}.old"
    if aside.exists():
        shutil.rmtree(aside)
    if folder.exists():
        os.rename(folder, aside)
        shutil.rmtree(aside)


@contextlib.contextmanager
def staging(final: Path) -> Iterator[Path]:
    """Build a folder aside and rename it to ``final`` when the block ends without an error; else remove it."""
    stage = begin(Path(final))
    try:
        yield stage
        commit(Path(final))
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


@contextlib.contextmanager
def staging_file(final: Path) -> Iterator[Path]:
    """Write a file aside and rename it to ``final`` when the block ends without an error; else remove it."""
    final.parent.mkdir(parents=True, exist_ok=True)
    stage = staging_path(final)
    try:
        yield stage
        flush(stage)
        move(stage, final)
    finally:
        stage.unlink(missing_ok=True)
    flush(final.parent)


def replace_link(link: Path, target: Path) -> bool:
    """Point the symbolic link ``link`` at ``target`` (a relative link) in one step; False on disks without links.

    Raises:
        FileExistsError: a real file or folder stands where the link should be.
    """
    link, target = Path(link), Path(target)
    if link.exists() and not link.is_symlink():
        raise FileExistsError(f"{link} is a real file or folder, not a link of ours")
    link.parent.mkdir(parents=True, exist_ok=True)
    aside = link.parent / f".{link.name}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    try:
        os.symlink(os.path.relpath(target, link.parent), aside)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        return False
    move(aside, link)
    return True


@contextlib.contextmanager
def _ignore_refusal() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED:
            raise
