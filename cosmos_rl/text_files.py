"""Text that a user has written: UTF-8, with or without a byte order mark."""

from codecs import BOM_UTF8
from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a file, its lines ended by ``\\n``.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: as `decode_text`.
    """
    return decode_text(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")


def decode_text(content: bytes) -> str:
    """``content`` without its byte order mark.

    Raises:
        UnicodeDecodeError: it is no UTF-8, or has null bytes: those are valid UTF-8, but what has them is UTF-16 or no
            text. `explain_decoding` says which.
    """
    text = content.removeprefix(BOM_UTF8).decode()
    if "\0" in text:
        at = content.index(b"\0")
        raise UnicodeDecodeError("utf-8", content, at, at + 1, "null character")
    return text
