"""How recognised text becomes a score. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rapidfuzz.distance import Levenshtein

# In order of preference: the first kind of quotation mark that a prompt has decides. A single quote inside a word is an
# apostrophe, so it neither opens nor closes.
_QUOTES = (
    r'"([^"]+)"',
    r"“([^”]+)”",
    r"«([^»]+)»",
    r"„([^“”]+)[“”]",
    r"\u2018(.+?)\u2019(?!\w)",
    r"(?<!\w)'(.+?)'(?!\w)",
)


def quoted_text(prompt: str) -> str | None:
    """The text a picture should show: all quoted spans of the prompt, joined by a space; None without any.

    ``'A sign "Hello" above "World"'`` -> ``'Hello World'``.
    """
    for pattern in _QUOTES:
        spans = [span.strip() for span in re.findall(pattern, prompt) if span.strip()]
        if spans:
            return " ".join(spans)
    return None


def first_quoted(prompt: str) -> str | None:
    """What stands between the first and the second ASCII double quote; None without two."""
    parts = prompt.split('"')
    return parts[1] if len(parts) > 2 and parts[1] else None


def recognised_lines(result: Any) -> list[tuple[str, float]]:
    """Lines and confidences of whatever shape an OCR engine answers in, in reading order.

    Known: an object with ``txts`` and ``scores`` (RapidOCR 3), ``(lines, times)`` with ``[box, text, confidence]``
    (RapidOCR 1), and ``[[[box, (text, confidence)], ...]]`` (PaddleOCR 2). No text is None, [], [None] or [[]].

    Raises:
        TypeError: an answer of another shape (an unknown engine version must not look like an empty picture).
    """
    if hasattr(result, "txts"):
        return [(str(t), float(s)) for t, s in zip(result.txts or (), result.scores or (), strict=True)]
    if isinstance(result, tuple):
        result = result[0] if result else None
    lines: list[tuple[str, float]] = []
    for entry in result or []:
        if not entry:
            continue
        if _is_line(entry):
            lines.append(_line(entry))
        elif all(_is_line(line) for line in entry if line):
            lines += [_line(line) for line in entry if line]
        else:
            raise TypeError(f"OCR answer of unknown shape: {str(entry)[:80]}")
    return lines


def _is_line(entry: Any) -> bool:
    if not isinstance(entry, (list, tuple)) or len(entry) < 2:
        return False
    if isinstance(entry[1], str):
        return len(entry) >= 3 and isinstance(entry[2], (int, float, str))
    return isinstance(entry[1], (list, tuple)) and len(entry[1]) == 2 and isinstance(entry[1][0], str)


def _line(entry: Any) -> tuple[str, float]:
    text, confidence = (entry[1], entry[2]) if isinstance(entry[1], str) else entry[1]
    return text, float(confidence)


def joined(lines: Iterable[tuple[str, float]], min_confidence: float) -> str:
    """Texts with a confidence above the bound, one after the other."""
    return "".join(text for text, confidence in lines if confidence > min_confidence)


def normalised(text: str) -> str:
    """Lower case without white space."""
    return "".join(text.lower().split())


def ocr_score(target: str, text: str, *, upstream: bool = False) -> float:
    """``1 - d / L``: 1 when the target is contained in the text, 0 when nothing fits.

    d is the edit distance of both normalised strings, at most the target's length. L is the normalised target's length;
    with ``upstream`` its length including spaces, so that a miss of a text with spaces scores above 0
    ("Hello World": 1 - 10/11).
    """
    t, r = normalised(target), normalised(text)
    distance = 0 if t in r else min(Levenshtein.distance(r, t), len(t))
    return 1.0 - distance / max(1, len(target) if upstream else len(t))


def diagnostics(target: str, text: str) -> dict[str, float]:
    """Other views of the same two strings, each in [0, 1]."""
    t, r = normalised(target), normalised(text)
    have, want = Counter(r), Counter(t)
    union = (have | want).total()
    return {
        "edit_similarity": float(Levenshtein.normalized_similarity(r, t)),
        "exact_match": float(t == r),
        "substring_match": float(t in r),
        "char_iou": (have & want).total() / union if union else 0.0,
    }
