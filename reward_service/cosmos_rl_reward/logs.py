"""One line per event on stderr, with secrets blanked out."""

import logging
import os
import re
import sys

_SECRET = re.compile(r"(rediss?://[^:/@\s]*:)[^@\s]+(?=@)|(Bearer\s+)\S+", re.I)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _SECRET.sub(lambda m: f"{m[1] or m[2]}***", super().format(record))


def set_up(role: str) -> None:
    """Log to stderr as ``time role level message``; COSMOS_RL_REWARD_LOG_LEVEL sets the level (INFO)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"%(asctime)s [{role}] %(levelname)s %(message)s"))
    level = os.environ.get("COSMOS_RL_REWARD_LOG_LEVEL", "").upper()
    known = logging.getLevelNamesMapping()
    logging.basicConfig(level=known.get(level, logging.INFO), handlers=[handler], force=True)
    for noisy in ("httpx", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # else clients write into the log
