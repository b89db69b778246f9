"""Members of tar files by path: ``folder/000.tar/0001.jpg`` is opened where ``folder/000.tar`` is a file.

The headers of a tar are read once; where its members are is kept in a file of the cache folder. No torch.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import shlex
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cosmos_rl.data.texts import printable
from cosmos_rl.errors import UserError
from cosmos_rl.storage.atomic import write_text
from cosmos_rl.storage.cache_folder import tars_folder
from cosmos_rl.storage.eviction import evict
from cosmos_rl.utils.logging import logger

SUFFIX = ".tar"
COMPRESSED = {
    ".tar.gz": "gunzip",
    ".tgz": "gunzip",
    ".tar.bz2": "bunzip2",
    ".tar.xz": "unxz",
    ".tar.zst": "unzstd --rm",
}
"""Endings of tars that cannot be read from the middle, and what unpacks them to ``.tar``."""
_MAGIC = {b"\x1f\x8b": ".tar.gz", b"BZh": ".tar.bz2", b"\xfd7zXZ": ".tar.xz", b"\x28\xb5\x2f\xfd": ".tar.zst"}
"""How their content begins."""
_INDEX = ".json"
"""Ending of the files of indices."""
_WORTH_KEEPING = 500
"""Members from which an index is kept: fewer headers are read faster than a file is written."""
_MOST_KEPT = 2**30
"""Bytes of all indices: about 20 million members."""
_BLOCK = 512
"""Bytes of a header, and of the end mark of a tar."""


class TarChanged(UserError):
    """A tar is not the one whose members were listed: no sample of it is to be trusted, and the run ends."""


Stamp = tuple[int, int]
"""Size and time of the last change, in ns."""


@dataclass(frozen=True)
class TarIndex:
    """Where the members of a tar are."""

    stamp: Stamp
    """Of the tar when it was looked at."""
    members: Mapping[str, tuple[int, int]]
    """By normalised name: the first byte and the number of bytes of each regular file."""
    repeated: tuple[str, ...]
    """Names that are there more than once."""


_KNOWN: dict[str, TarIndex] = {}
"""Of this process, by the absolute path of the tar; forked loader processes inherit it."""
_warned: set[Path] = set()
_warning = threading.Lock()


def index_tar(path: Path) -> TarIndex:
    """Where the members are, as the tar is now.

    Raises:
        UserError: it is not a whole tar, is compressed, or has links.
    """
    place = os.path.abspath(path)
    try:
        stamp = _stamp(path.stat())
        known = _KNOWN.get(place)
        if known is None or known.stamp != stamp:
            known = _KNOWN[place] = _read_kept(path, stamp) or _scan_and_keep(path, stamp)
    except OSError as error:
        raise UserError(f"{_show(path)}: cannot be read ({error.strerror or error})") from error
    return known


def split_member(path: str) -> tuple[str, str] | None:
    """(the tar, the name in it) of the path of a member; None: no part of the path is a tar."""
    end = 0
    while (end := path.find(f"{SUFFIX}/", end)) >= 0:
        end += len(SUFFIX)
        if os.path.abspath(path[:end]) in _KNOWN or os.path.isfile(path[:end]):
            return path[:end], path[end + 1 :]
    return None


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[str | BinaryIO]:
    """What decoders take: the path of an ordinary file, or a file object of a member.

    Raises:
        TarChanged: the tar has changed since its members were listed.
    """
    place = split_member(str(path))
    if place is None:
        yield str(path)
        return
    with open_member(*place) as file:
        yield file


def open_member(tar: str, member: str) -> BinaryIO:
    """A member as a file, each with a descriptor of its own: threads and forked processes share no position.

    Raises:
        TarChanged: the tar has changed since its members were listed.
        FileNotFoundError: there is no such member.
    """
    index = _KNOWN.get(os.path.abspath(tar)) or index_tar(Path(tar))
    if member not in index.members:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{tar}/{member}")
    try:
        fd = os.open(tar, os.O_RDONLY)
    except OSError as error:
        raise TarChanged(f"{_show(tar)}: cannot be read any more ({error.strerror})") from error
    if _stamp(os.fstat(fd)) != index.stamp:
        os.close(fd)
        raise TarChanged(f"{_show(tar)}: has changed since its members were listed; start again with the new file")
    return io.BufferedReader(_Member(fd, f"{tar}/{member}", *index.members[member]))


def has_file(path: Path) -> bool:
    """Whether there is such a file or member."""
    place = split_member(str(path))
    if place is None:
        return path.is_file()
    return place[1] in index_tar(Path(place[0])).members


def describe_version(path: Path) -> str | None:
    """Path, size and time of the last change, of a member those of its tar; None: it cannot be looked at."""
    file, *member = split_member(str(path)) or (str(path),)
    try:
        size, changed = _stamp(os.stat(file))
    except OSError:
        return None
    return "/".join([str(Path(file).resolve()), *member, str(size), str(changed)])


class _Member(io.RawIOBase):
    """Some bytes of a file."""

    def __init__(self, fd: int, name: str, start: int, size: int) -> None:
        self.name = name
        self._fd, self._start, self._size, self._position = fd, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(self._size - self._position, 0))
        data = os.pread(self._fd, count, self._start + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = origin + offset
        return self._position

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


# ---- reading headers ---------------------------------------------------------------------------------------------


def _scan_and_keep(path: Path, stamp: Stamp) -> TarIndex:
    members, repeated = _scan(path)
    index = TarIndex(stamp, members, tuple(repeated))
    if len(members) >= _WORTH_KEEPING:
        text = json.dumps({"path": str(path.resolve()), "stamp": stamp, "members": members, "repeated": index.repeated})
        try:
            write_text(_place_of_index(path), text)
        except OSError as error:
            _warn_of_folder(error)
    return index


def evict_indices() -> None:
    """Delete the indices that were not used for longest, where there are too many."""
    try:
        evict(tars_folder(), _INDEX, _MOST_KEPT)
    except OSError as error:
        _warn_of_folder(error)


def _warn_of_folder(error: OSError) -> None:
    """Once: what is known of tars is in memory, and only the next start takes longer."""
    folder = tars_folder()
    with _warning:  # tars are looked at by several threads
        known = folder in _warned
        _warned.add(folder)
    if not known:
        logger.warning(
            f"{folder}: cannot be written ({error.strerror or error}), so that the headers of tars are read at each "
            "start; set COSMOS_CACHE_DIR to a folder that can"
        )


def _scan(path: Path) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """(first byte and number of bytes by name, names that come again)."""
    with path.open("rb") as file:
        _refuse_compressed(path, file.read(8))
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                files = list(_list_files(tar))
                end = tar.offset
        except Exception as error:  # whatever a reader makes of a broken file is the fault of that file
            why = str(error) or type(error).__name__
            raise UserError(f"{_show(path)}: cannot be read as a tar ({why}); make or copy it again") from error
        _require_end(path, file, end)
    counts = Counter(name for name, _ in files)
    return dict(files), [name for name, count in counts.items() if count > 1]


def _list_files(tar: tarfile.TarFile) -> Iterator[tuple[str, tuple[int, int]]]:
    while (info := tar.next()) is not None:
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]  # it would keep a kilobyte of each
        if _is_file(info):
            # tar writes ./0001.jpg for tar -cf x.tar .
            yield os.path.normpath(info.name).lstrip("/"), (info.offset_data, info.size)


def _is_file(info: tarfile.TarInfo) -> bool:
    name = printable(info.name)
    if info.issym() or info.islnk():
        raise ValueError(f"{name} is a link; tar --dereference --hard-dereference packs files")
    if info.issparse():
        raise ValueError(f"{name} is stored with holes; pack it without --sparse")
    return info.isreg()


def _refuse_compressed(path: Path, start: bytes) -> None:
    for magic, ending in _MAGIC.items():
        if start.startswith(magic):
            old, new = shlex.quote(str(path)), shlex.quote(str(path.with_suffix(ending)))
            raise UserError(
                f"{_show(path)}: is compressed, and samples are read from any place of a tar; unpack it: "
                f"mv {old} {new} && {COMPRESSED[ending]} {new}"
            )


def _require_end(path: Path, file: BinaryIO, end: int) -> None:
    """The reader of the standard library takes a header that it does not know, and the end of the file, for the end."""
    file.seek(end)
    rest = file.read(_BLOCK)
    if len(rest) < _BLOCK:
        raise UserError(
            f"{_show(path)}: ends at byte {end} without the end mark of a tar: it was cut off, or is still being "
            "written; make or copy it again"
        )
    while rest:
        if rest.strip(b"\0"):
            raise UserError(
                f"{_show(path)}: has no member at byte {end}, and more data behind it: it is damaged, or several tars "
                "were joined by cat; keep them as several files"
            )
        rest = file.read(2**20)


def _read_kept(path: Path, stamp: Stamp) -> TarIndex | None:
    """What an earlier process has found; None: nothing, or of another version of the file."""
    place = _place_of_index(path)
    try:
        kept = json.loads(place.read_bytes())
        if (kept["path"], tuple(kept["stamp"])) != (str(path.resolve()), stamp):
            return None
        members = {name: (start, size) for name, (start, size) in kept["members"].items()}
        index = TarIndex(stamp, members, tuple(kept["repeated"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the headers are read again and the file is replaced
    with contextlib.suppress(OSError):  # another process has evicted it, or the folder can only be read
        os.utime(place)  # the time of the last use decides what is evicted
    return index


def _place_of_index(path: Path) -> Path:
    return tars_folder() / f"{hashlib.blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()}{_INDEX}"


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_size, stat.st_mtime_ns


def _show(path: str | Path) -> str:
    return printable(os.path.abspath(path))
