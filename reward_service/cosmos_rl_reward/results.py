"""The result object of a job that gave no scores. Only the standard library."""

from __future__ import annotations

import json
from typing import Any

FAILED, EXPIRED, CANCELLED, SUCCEEDED = "failed", "expired", "cancelled", "succeeded"


def encode(result: dict[str, Any]) -> bytes:
    """Compact JSON; raises ValueError for numbers that JSON does not have. A lone surrogate becomes its escape."""
    text = json.dumps(result, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode(errors="backslashreplace")


def printable(text: str) -> str:
    """The same text, with a backslash escape for what UTF-8 cannot carry (lone surrogates)."""
    return text.encode(errors="backslashreplace").decode()


def without_scores(reward: str, state: str, error: str) -> bytes:
    """The documented error envelope, with the job's final state."""
    return encode(
        {
            "scores": None,
            "error": printable(error),
            "input_info": {},
            "duration": "0.00",
            "decoded_duration": "N/A",
            "type": reward,
            "state": state,
        }
    )
