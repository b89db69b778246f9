"""Text that a user has written: UTF-8, with or without a byte order mark."""

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path

from cosmos_rl_reward.errors import UserError


def read_text(path: Path) -> str:
    """The text of a file, its lines ended by ``\\n``.

    Raises:
        OSError: it cannot be read.
        UserError: it is in another encoding.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {_explain(path.read_bytes(), error)}; save it as UTF-8") from error
    if "\0" in text:
        raise UserError(f"{path}: has null characters, as UTF-16 without a byte order mark; save it as UTF-8")
    return text


def _explain(content: bytes, error: UnicodeDecodeError) -> str:
    """What a file is that is not UTF-8."""
    if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return "is not UTF-8 text but UTF-16"
    if content.count(0) > len(content) // 4:  # of Latin text in UTF-16: one half
        return "has null characters, as UTF-16 without a byte order mark"
    return f"is not UTF-8 text (byte 0x{error.object[error.start]:02x} at position {error.start})"
