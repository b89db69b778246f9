"""Files written by ``torch.save`` of one tensor, read without torch and without running a pickle.

The pickle inside is interpreted here, and only the few instructions that describe one tensor are known. So nothing is
imported, called or built, whatever the file says. ``torch.load`` would need torch in the front and in the environment
of every reward, and the shape is needed on arrival: number of samples, pixels, decoded bytes, what can be merged.

Nothing is read before its size is known: entries must be stored as they are, and those that are read are small. Nothing
that the pickle describes is compared, hashed or shown unless it is a text or a number, since a few bytes can describe
values of any depth and size.
"""

from __future__ import annotations

import pickletools
import zipfile
from typing import Any, BinaryIO, cast

from cosmos_rl_reward.payload.arrays import BFLOAT16, ArrayRef
from cosmos_rl_reward.payload.errors import Refused

_STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": BFLOAT16,
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "|i1",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
}
_MAX_PICKLE = 1 << 12  # bytes; one tensor needs about 400
_MAX_READ = 22 + (1 << 16)  # bytes at a time: what zipfile searches for the end of a directory, and longest directory
_MAX_ORDER = 16  # bytes of the entry that names the byte order
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_ORDERED_DICT = ("collections", "OrderedDict")


class _Window:
    """A seekable view of a part of a file, so that zip offsets count from the payload's first byte.

    It refuses to read much at a time, as a directory of very many entries would need.
    """

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self._start, self._size, self._at = file, start, end - start, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        # no further than the end: offsets come from the file and may be larger than any file
        self._at = min(max(0, {0: 0, 1: self._at, 2: self._size}[whence] + offset), self._size)
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        if count < 0 or count > left:
            count = left
        if count > _MAX_READ:
            raise Refused("payload: the torch file holds more than one tensor")
        self._file.seek(self._start + self._at)
        data = self._file.read(count)
        self._at += len(data)
        return data


def read_torch(file: BinaryIO, start: int, end: int) -> ArrayRef:
    """Find the tensor in a ``torch.save`` file between ``start`` and ``end``.

    Raises:
        Refused: anything but one dense tensor of numbers in the zip format.
    """
    window = _Window(file, start, end)
    if window.read(4) != b"PK\x03\x04":
        raise Refused("payload: neither a .npy nor a torch.save file")
    try:
        with zipfile.ZipFile(window) as archive:  # type: ignore[arg-type]
            entries = {info.filename: info for info in archive.infolist()}
            if any(info.compress_type or info.file_size != info.compress_size for info in entries.values()):
                raise Refused("payload: the torch file is compressed; send what torch.save writes")
            pickles = [name for name in entries if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise Refused("payload: not a torch file (no data.pkl)")
            if entries[pickles[0]].file_size > _MAX_PICKLE:
                raise Refused("payload: the torch file holds more than one tensor")
            prefix = pickles[0][: -len("data.pkl")]
            dtype, key, numel, offset, shape, strides = _tensor(archive.read(pickles[0]))
            order = f"{prefix}byteorder"
            if order in entries and (entries[order].file_size > _MAX_ORDER or archive.read(order) != b"little"):
                raise Refused("payload: torch files of big-endian machines are not read")
            record = entries.get(f"{prefix}data/{key}")
            if record is None:
                raise Refused("payload: the torch file has no data for its tensor")
            with archive.open(record):
                begin = window.tell()  # opening an entry reads its local header, so here its data begin
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise Refused("payload: the torch file is damaged") from error
    ref = ArrayRef(dtype, shape, strides, 0)
    if ref.overlaps:
        raise Refused("payload: elements of the tensor share memory (an expanded one?); send tensor.contiguous()")
    if (offset * ref.itemsize) + ref.span > record.file_size or numel * ref.itemsize > record.file_size:
        raise Refused("payload: the tensor is larger than its data in the torch file")
    if begin + record.file_size > end - start:
        raise Refused("payload: truncated torch file")
    return ArrayRef(dtype, shape, strides, start + begin + offset * ref.itemsize)


def _tensor(data: bytes) -> tuple[str, str, int, int, tuple[int, ...], tuple[int, ...]]:
    """dtype, storage key, storage elements, offset, shape and strides (elements) of the pickled tensor."""
    value = _interpret(data)
    arguments = value[1] if isinstance(value, tuple) and len(value) == 2 and _texts(value[0]) == _REBUILD else None
    if not isinstance(arguments, tuple) or len(arguments) < 4:
        raise Refused("payload: the torch file does not hold one tensor")
    storage, offset, shape, strides = arguments[:4]
    if not (isinstance(storage, dict) and isinstance(storage.get("pid"), tuple) and len(storage["pid"]) == 5):
        raise Refused("payload: the tensor of the torch file has no storage")
    _, kind, key, _, numel = storage["pid"]
    module, name = _texts(kind)
    dtype = _STORAGES.get(name)
    if dtype is None or module != "torch":
        raise Refused("payload: the torch file holds a tensor of a type that is not read")
    sizes = (offset, numel, *_ints(shape), *_ints(strides))
    if len(shape) != len(strides) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**40 for n in sizes):
        raise Refused("payload: the tensor of the torch file has an impossible shape")
    if not isinstance(key, str):
        raise Refused("payload: the tensor of the torch file has no storage")
    return dtype, key, numel, offset, shape, strides


def _texts(value: Any) -> tuple[str, str]:
    """The module and the name of a global; empty for anything else."""
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, str) for part in value):
        return value
    return "", ""


def _ints(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise Refused("payload: the tensor of the torch file has an impossible shape")
    return value


def _interpret(data: bytes) -> Any:
    """Run the instructions on inert values: a global is a (module, name) pair, a call a (callee, arguments)."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    mark = object()
    try:
        for opcode, value, _ in pickletools.genops(data):
            name, argument = opcode.name, cast(Any, value)
            if name in ("PROTO", "FRAME"):
                continue
            if name == "STOP":
                return stack.pop()
            if name in ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
                stack.append(argument)
            elif name == "GLOBAL":
                stack.append(tuple(argument.split(" ", 1)))
            elif name == "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append((module, attribute))
            elif name in ("NEWTRUE", "NEWFALSE", "NONE"):
                stack.append({"NEWTRUE": True, "NEWFALSE": False, "NONE": None}[name])
            elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "MARK":
                stack.append(mark)
            elif name == "EMPTY_TUPLE":
                stack.append(())
            elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                count = int(name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            elif name == "TUPLE":
                begin = len(stack) - 1 - stack[::-1].index(mark)
                stack[begin:] = [tuple(stack[begin + 1 :])]
            elif name == "BINPERSID":
                stack.append({"pid": stack.pop()})
            elif name == "REDUCE":
                arguments, callee = stack.pop(), stack.pop()
                if (called := _texts(callee)) not in (_REBUILD, _ORDERED_DICT):
                    raise Refused(f"payload: the torch file wants to call {called!r:.80}; only a plain tensor is read")
                stack.append((callee, arguments))
            else:
                raise Refused(f"payload: the torch file is more than one plain tensor ({name})")
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused("payload: the torch file is damaged") from error
    raise Refused("payload: the torch file is damaged")
