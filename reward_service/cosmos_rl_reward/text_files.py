"""Text that a user has written: UTF-8, with or without a byte order mark."""

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
        byte = error.object[error.start]
        raise UserError(
            f"{path}: is not UTF-8 text (byte 0x{byte:02x} at position {error.start}), but perhaps UTF-16; "
            "save it as UTF-8"
        ) from error
    if "\0" in text:
        raise UserError(f"{path}: has null characters, as UTF-16 without a byte order mark; save it as UTF-8")
    return text
