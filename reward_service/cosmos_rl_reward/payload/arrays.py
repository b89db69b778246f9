"""Where an array lies inside a file, found out from file headers alone, and read later by a worker."""

from __future__ import annotations

import ast
import functools
import math
import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from cosmos_rl_reward.payload.errors import Refused

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 10_000  # bytes; a plain array's header has about 120
BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class ArrayRef:
    """An array inside a file.

    Attributes:
        dtype: numpy type string with byte order (``<f4``), or ``bfloat16``.
        shape: sizes of the axes.
        strides: elements (not bytes) between neighbours on each axis.
        offset: first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _numpy_type(self.dtype).itemsize

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if not self.size:
            return 0
        return (1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))) * self.itemsize

    @property
    def overlaps(self) -> bool:
        """Whether elements may share memory, as those of an expanded tensor do: it would grow when it is read."""
        reach = 1
        for stride, n in sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1):
            if stride < reach:
                return True
            reach += stride * (n - 1)
        return False


def _numpy_type(dtype: str) -> np.dtype:
    """numpy has no bfloat16: its bits."""
    if dtype == BFLOAT16:
        return np.dtype("<u2")
    return np.dtype(dtype)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-ordered array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def load(path: str, ref: ArrayRef) -> np.ndarray:
    """Read the array into memory, C-ordered, in this machine's byte order; bfloat16 arrives as uint16 bit patterns.

    The file is read and not mapped: it may be truncated when the job is finished elsewhere.

    Raises:
        OSError: the file does not exist or is too short.
    """
    kind = _numpy_type(ref.dtype)
    with open(path, "rb") as file:
        file.seek(ref.offset)
        data = np.empty(ref.span, np.uint8)
        if file.readinto(data.data) != len(data):
            raise OSError(f"{path} ends before its array")
    flat = data.view(kind)
    strides = tuple(s * kind.itemsize for s in ref.strides)
    array = np.lib.stride_tricks.as_strided(flat, ref.shape, strides)
    return np.ascontiguousarray(array, dtype=kind.newbyteorder("="))


def read_npy(file: BinaryIO, start: int, end: int) -> ArrayRef:
    """Parse the ``.npy`` header at ``start``; the array has to end exactly at ``end``.

    Raises:
        Refused: not a plain array of numbers, or the size does not match.
    """
    file.seek(start)
    head = file.read(12)
    if not head.startswith(_MAGIC) or len(head) < 12:
        raise Refused("payload: not a .npy file")
    if head[6] == 1:
        length, begin = struct.unpack("<H", head[8:10])[0], 10
    elif head[6] in (2, 3):
        length, begin = struct.unpack("<I", head[8:12])[0], 12
    else:
        raise Refused(f"payload: .npy version {head[6]} is not known")
    if length > _MAX_HEADER:
        raise Refused(f"payload: a .npy header of {length} bytes is too long (at most {_MAX_HEADER})")
    file.seek(start + begin)
    text = file.read(length)
    dtype, fortran, shape = _npy_fields(text)
    strides = row_major(shape)
    if fortran:
        strides = row_major(shape[::-1])[::-1]
    ref = ArrayRef(dtype.str, shape, strides, start + begin + length)
    have, want = end - ref.offset, ref.size * dtype.itemsize
    if have != want:
        what = "truncated" if have < want else "followed by extra bytes"
        raise Refused(f"payload: {what}: shape {list(shape)} of {dtype} needs {want} bytes, there are {have}")
    return ref


@functools.lru_cache(64)
def _npy_fields(text: bytes) -> tuple[np.dtype, bool, tuple[int, ...]]:
    try:
        fields = ast.literal_eval(text.decode("latin1").strip())
        descr, fortran, shape = fields["descr"], fields["fortran_order"], fields["shape"]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise Refused("payload: the .npy header cannot be read") from error
    if not isinstance(descr, str) or not isinstance(fortran, bool) or not isinstance(shape, tuple) or len(shape) > 8:
        raise Refused("payload: the .npy header does not describe a plain array")
    if not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise Refused(f"payload: shape {shape!r} is not possible")
    try:
        dtype = np.dtype(descr)
    except (TypeError, ValueError, SyntaxError) as error:
        raise Refused(f"payload: dtype {descr[:40]!r} is not known") from error
    if dtype.kind not in "biuf" or dtype.subdtype is not None:
        raise Refused(f"payload: dtype {descr[:40]!r} is not an array of real numbers")
    return dtype, fortran, shape
