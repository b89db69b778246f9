"""Tensors on disk by key, bounded in size: what frozen encoders give is computed once and shared by runs and ranks.

One safetensors file per entry, written aside and renamed, so that any number of processes may use a folder. An entry
that cannot be read is dropped and computed again.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.storage.atomic import move
from cosmos_rl.storage.disk import explain_full_disk
from cosmos_rl.storage.eviction import count_bytes, evict

_IN_MEMORY_BYTES = 512 * 2**20
_ENDING = ".safetensors"
_SAMPLED_BYTES = 2**20


def digest_files(folder: Path) -> str:
    """Digest of a model folder's files: names, sizes, and the first and last megabyte of each.

    Reading ten gigabytes at every start would cost more than it protects from; a safetensors header holds every shape.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}:{size};".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()


class TensorCache:
    """Named tensors by key."""

    def __init__(self, folder: Path, kind: str, about: str, max_bytes: int, advice: str = "") -> None:
        """``about`` is everything other than the key that decides what the tensors are (weights, dtype, sizes, mode).

        ``max_bytes`` bounds the whole ``folder``, which other kinds and runs share. ``advice``: what to do where the
        folder cannot be made; empty: to name another.
        """
        self._root = folder
        self._space = folder / kind / hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
        try:
            self._space.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if explain_full_disk(error) is not None:
                raise
            raise UserError(
                f"{folder}: the cache cannot be made there ({error.strerror}); "
                f"{advice or 'name another folder in train.train_policy.cache.dir'}"
            ) from error
        self._max_bytes = max_bytes
        self._memory: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._memory_bytes = 0
        self._bytes: int | None = None  # of the folder; counted when something is added for the first time
        self.misses = 0
        """Look-ups that found nothing so far."""

    def get(self, key: str, *, remember: bool = True) -> dict[str, Tensor] | None:
        """The tensors under ``key`` on the CPU, None when they are not there.

        ``remember``: keep them in memory, while there is room.
        """
        name = _file_name(key)
        if name in self._memory:
            self._memory.move_to_end(name)
            return self._memory[name]
        path = self._space / name
        try:
            tensors = load_file(path)
            os.utime(path)  # the time of the last use decides what is evicted
        except (FileNotFoundError, SafetensorError, OSError):
            path.unlink(missing_ok=True)
            self.misses += 1
            return None
        if remember:
            self._remember(name, tensors)
        return tensors

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        """Those of ``keys`` under which nothing is kept, each once; reads no tensors."""
        return [key for key in dict.fromkeys(keys) if not (self._space / _file_name(key)).is_file()]

    def size_of(self, key: str) -> int:
        """Bytes on the disk of what is kept under ``key``; 0: nothing is."""
        return _size(self._space / _file_name(key))

    @property
    def free_bytes(self) -> int:
        """What can be added before anything is evicted."""
        return max(self._max_bytes - count_bytes(self._root, _ENDING), 0)

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keep ``tensors`` under ``key``; what ``get`` will return."""
        name = _file_name(key)
        kept = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
        if self._bytes is None:
            self._bytes = count_bytes(self._root, _ENDING)
        path, data = self._space / name, save(kept)
        self._bytes += len(data) - _size(path)
        aside = path.with_name(f".{name}.{os.getpid()}")
        aside.write_bytes(data)
        move(aside, path)
        self._remember(name, kept)
        if self._bytes > self._max_bytes:
            self._bytes = evict(self._root, _ENDING, self._max_bytes)
        return kept

    def _remember(self, name: str, tensors: dict[str, Tensor]) -> None:
        self._memory_bytes += _count_bytes(tensors) - _count_bytes(self._memory.pop(name, {}))
        self._memory[name] = tensors
        while self._memory_bytes > _IN_MEMORY_BYTES:
            _, oldest = self._memory.popitem(last=False)
            self._memory_bytes -= _count_bytes(oldest)


def _file_name(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + _ENDING


def _size(path: Path) -> int:
    """Bytes of a file; 0 when it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors.values())
