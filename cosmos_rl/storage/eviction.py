"""The size of a folder of cached files, which any number of processes share, and what goes when it is too large."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_KEEP_AFTER_EVICTION = 0.9


def count_bytes(folder: Path, ending: str) -> int:
    """Of all files of that ending in the folder and its folders."""
    return sum(stat.st_size for _, stat in _list_files(folder, ending))


def evict(folder: Path, ending: str, max_bytes: int) -> int:
    """Delete what was not used for longest, where there are more bytes, until there are fewer; how many are left.

    The time of a file's last change counts as that of its last use.
    """
    files = sorted(_list_files(folder, ending), key=lambda file: file[1].st_mtime)
    left = sum(stat.st_size for _, stat in files)
    if left <= max_bytes:
        return left
    for path, stat in files:
        if left <= _KEEP_AFTER_EVICTION * max_bytes:
            break
        path.unlink(missing_ok=True)
        left -= stat.st_size
    return left


def _list_files(root: Path, ending: str) -> Iterator[tuple[Path, os.stat_result]]:
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(ending):
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # another process may evict at the same time
                    yield path, path.stat()
