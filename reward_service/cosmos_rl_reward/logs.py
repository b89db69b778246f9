"""One line per event on stderr, with secrets blanked out."""

import logging
import os
import queue
import re
import sys
import threading
from typing import TextIO

CLEAR_BELOW = "\x1b[J"
_MAX_LINES = 10_000
_END_S = 2.0
"""So long the end of a process waits for a terminal that takes nothing."""
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
    return sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None


class _FromThread(logging.Handler):
    """Has another handler write, from a thread: the table fills a terminal that is stopped or far away, and nobody but
    that thread is to wait for it. More than ``_MAX_LINES`` that wait are counted and left out."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler, self._left_out = handler, 0
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_LINES)
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._left_out += 1

    def _write(self) -> None:
        while True:
            record = self._records.get()
            if self._left_out:
                number, self._left_out = self._left_out, 0
                text = f"{number} lines are left out here, the terminal took nothing"
                self._handler.emit(logging.LogRecord("log", logging.WARNING, __file__, 0, text, None, None))
            self._handler.emit(record)
            self._records.task_done()

    def flush(self) -> None:
        with self._records.all_tasks_done:
            self._records.all_tasks_done.wait_for(lambda: not self._records.unfinished_tasks, _END_S)


def set_up(role: str, above_table: bool = False) -> None:
    """Log to stderr as ``time role level message``; COSMOS_RL_REWARD_LOG_LEVEL sets the level (INFO).

    Args:
        above_table: a process of the service may draw its table on the terminal: lines stand above it.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    beside_table = above_table and find_terminal() is not None
    handler.setFormatter(_Formatter(role, CLEAR_BELOW if beside_table else ""))
    if beside_table:
        handler = _FromThread(handler)
    level = os.environ.get("COSMOS_RL_REWARD_LOG_LEVEL", "").upper()
    known = logging.getLevelNamesMapping()
    logging.basicConfig(level=known.get(level, logging.INFO), handlers=[handler], force=True)
    for noisy in ("httpx", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if above_table:  # else the table would stand among the lines of a traceback
        sys.excepthook = lambda *error: logging.critical("ended by an error", exc_info=error)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # else clients write into the log
