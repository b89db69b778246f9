"""One line per event on stderr, with secrets blanked out."""

import logging
import os
import re
import sys
from typing import TextIO

CLEAR_BELOW = "\x1b[J"
_SECRET = re.compile(r"(rediss?://[^:/@\s]*:)[^@\s]+(?=@)|(Bearer\s+)\S+", re.I)


class _Formatter(logging.Formatter):
    def __init__(self, role: str, begin: str) -> None:
        super().__init__(f"%(asctime)s [{role}] %(levelname)s %(message)s")
        self._begin = begin

    def format(self, record: logging.LogRecord) -> str:
        return self._begin + _SECRET.sub(lambda m: f"{m[1] or m[2]}***", super().format(record))


def find_terminal() -> TextIO | None:
    """Standard error where it is a terminal that can be drawn on and COSMOS_PROGRESS is not 0, else None."""
    if os.environ.get("COSMOS_PROGRESS") == "0" or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    return sys.stderr if sys.stderr.isatty() else None


def set_up(role: str, above_table: bool = False) -> None:
    """Log to stderr as ``time role level message``; COSMOS_RL_REWARD_LOG_LEVEL sets the level (INFO).

    Args:
        above_table: a process of the service may draw its table on the terminal: lines stand above it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(role, CLEAR_BELOW if above_table and find_terminal() else ""))
    level = os.environ.get("COSMOS_RL_REWARD_LOG_LEVEL", "").upper()
    known = logging.getLevelNamesMapping()
    logging.basicConfig(level=known.get(level, logging.INFO), handlers=[handler], force=True)
    for noisy in ("httpx", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if above_table:  # else the table would stand among the lines of a traceback
        sys.excepthook = lambda *error: logging.critical("ended by an error", exc_info=error)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # else clients write into the log
