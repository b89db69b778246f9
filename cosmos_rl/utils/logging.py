"""The one logger of the package: a line per message on standard output."""

import errno
import io
import logging
import os
import sys


def _prefix() -> str:
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return f"[rank{os.environ.get('RANK', '0')}]:" if several else ""


def print_anything() -> None:
    """Characters that standard output cannot show, as in a locale without them, are printed as their codes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


class _StandardOutput(logging.StreamHandler):
    """Writes to whatever `sys.stdout` is when the message comes, so that redirections are honoured."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> object:
        return sys.stdout

    def handleError(self, record: logging.LogRecord) -> None:
        """Whoever read the lines is gone, as a closed terminal; the run continues without saying so."""
        error = sys.exc_info()[1]
        if not (isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO)):
            super().handleError(record)


def _make_logger() -> logging.Logger:
    made = logging.getLogger("cosmos")
    usual = "INFO" if os.environ.get("RANK", "0") == "0" else "WARNING"  # what describes the run is said once
    level = os.environ.get("COSMOS_LOG_LEVEL", usual).upper()
    made.setLevel(level if level in logging.getLevelNamesMapping() else usual)
    if not made.handlers:
        handler = _StandardOutput()
        line = f"{_prefix()}[cosmos] %(asctime)s - %(name)s - %(levelname)s - %(message)s"
        handler.setFormatter(logging.Formatter(line))
        made.addHandler(handler)
        made.propagate = False
    return made


logger = _make_logger()


def warn_of_all(message: str) -> None:
    """A warning that every rank has reason to give: rank 0 gives it, once for all."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(message)
