"""Errors that a user can fix. They are shown as one message without a traceback."""

from codecs import BOM_UTF16_BE, BOM_UTF16_LE


class UserError(Exception):
    """Something outside our code is wrong: a config value, a file, a folder, a command line.

    The message says what is wrong, where (file, line or dotted key) and what to do about it.
    """

    exit_code = 2
    """Of the command that it ends."""


class TrainingStoppedError(UserError):
    """The job runs as it was asked to, but its training went wrong; starting it again would not help."""

    exit_code = 1


class OutOfMemory(Exception):
    """The memory of a device ran out; `phase` says during what. The user can do something about it."""

    def __init__(self, phase: str) -> None:
        super().__init__(f"out of memory while {phase}")
        self.phase = phase


def explain_decoding(error: UnicodeDecodeError) -> str:
    """What a file is that was read as UTF-8 and is something else, and what to do: ``<file>: …``."""
    found = f" (byte 0x{error.object[error.start]:02x} at position {error.start})"
    if error.object.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        found = " but UTF-16"
    elif error.object[error.start] == 0 or error.object.count(0) > len(error.object) // 4:  # Latin text: one half
        return "has null characters, as UTF-16 without a byte order mark; save it as UTF-8"
    return f"is not UTF-8 text{found}; save it as UTF-8"
