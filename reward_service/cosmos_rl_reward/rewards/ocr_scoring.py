"""How recognised text becomes a score. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rapidfuzz.distance import Levenshtein

# Opening and closing marks in order of preference: the first kind that a prompt has decides.
_QUOTES = (
    ('"', '"'),
    ("“", "”"),
    ("«", "»"),
    ("„", "“”"),
    ("「", "」"),
    ("『", "』"),
    ("\u2018", "\u2019"),
    ("'", "'"),
)
_KNOWN = "known are those of RapidOCR 1 and 3, and of PaddleOCR 2 and 3 (rec_texts, rec_scores)"
_INCHES = re.compile(r"\d'\s?\d+(?:\.\d+)?$")  # 5'10, before the mark of the inches


def quoted_text(prompt: str) -> str | None:
    """The text a picture should show: all quoted spans of the prompt, joined by a space; None without any.

    ``'A sign "Hello" above "World"'`` -> ``'Hello World'``. What is quoted within a span belongs to it. Marks of feet
    and inches (5'10") and apostrophes inside a word are not quotation marks.
    """
    spans: dict[int, list[str]] = {}
    at = 0
    while at < len(prompt):
        kind = _opens(prompt, at)
        end = None if kind is None else _closing(prompt, at, kind)
        if kind is None or end is None:
            at += 1
            continue
        if text := prompt[at + 1 : end].strip():
            spans.setdefault(kind, []).append(text)
        at = end + 1
    return " ".join(spans[min(spans)]) if spans else None


def _opens(prompt: str, at: int) -> int | None:
    """The kind of quotation that begins at a place; None when none does."""
    mark, before, after = prompt[at], prompt[at - 1 : at], prompt[at + 1 : at + 2]
    kind = next((k for k, (opening, _) in enumerate(_QUOTES) if opening == mark), None)
    if mark in "'\u2018" and _is_word(before):  # an apostrophe, or feet
        return None
    if mark == '"' and before.isdigit() and not _is_word(after):  # inches
        return None
    return kind


def _closing(prompt: str, at: int, kind: int) -> int | None:
    """Where the quotation that begins at ``at`` ends; None when it does not."""
    opening, closing = _QUOTES[kind]
    if opening == '"':
        return _closing_double(prompt, at)
    depth, first = 0, None
    for i in range(at, len(prompt)):
        mark, single = prompt[i], closing in "'\u2019"
        before, after = _is_word(prompt[i - 1 : i]), _is_word(prompt[i + 1 : i + 2])
        if mark == opening and (i == at or not single or (after and not before)):
            depth += 1
        elif mark in closing and not (single and after):
            depth -= 1
            first = i if first is None else first
            if depth == 0:
                return i
    return first  # an opening mark inside has no partner, as in 'Rock 'n Roll'


def _closing_double(prompt: str, at: int) -> int | None:
    end = prompt.find('"', at + 1)
    while end >= 0:
        # 6'2" inside a quotation: then one mark too many is left for what follows
        if not (_INCHES.search(prompt, at + 1, end) and prompt.count('"', end + 1) % 2):
            return end
        end = prompt.find('"', end + 1)
    return None


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def first_quoted(prompt: str) -> str | None:
    """What stands between the first and the second ASCII double quote; None without two."""
    parts = prompt.split('"')
    return parts[1] if len(parts) > 2 and parts[1] else None


def recognised_lines(result: Any) -> list[tuple[str, float]]:
    """Lines and confidences of whatever shape an OCR engine answers in, in reading order.

    Known: an object with ``txts`` and ``scores`` (RapidOCR 3), ``(lines, times)`` with ``[box, text, confidence]``
    (RapidOCR 1), ``[[[box, (text, confidence)], ...]]`` (PaddleOCR 2), and a list of dictionaries with ``rec_texts``
    and ``rec_scores`` (PaddleOCR 3). No text is None, [], [None] or [[]].

    Raises:
        TypeError: an answer of another shape (an unknown engine version must not look like an empty picture).
    """
    if hasattr(result, "txts"):
        return [(str(t), float(s)) for t, s in zip(result.txts or (), result.scores or (), strict=True)]
    if isinstance(result, tuple):
        result = result[0] if result else None
    if isinstance(result, Mapping):
        result = [result]
    lines: list[tuple[str, float]] = []
    for entry in result or []:
        if isinstance(entry, Mapping):
            lines += _paddle_3(entry)
        elif not entry:
            continue
        elif _is_line(entry):
            lines.append(_line(entry))
        elif all(_is_line(line) for line in entry if line):
            lines += [_line(line) for line in entry if line]
        else:
            raise TypeError(f"OCR answer of unknown shape: {str(entry)[:80]}; {_KNOWN}")
    return lines


def _paddle_3(page: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Lines of one page; its ``json`` has them one level down, as ``res``."""
    inner = page.get("res", page)
    if not isinstance(inner, Mapping) or not {"rec_texts", "rec_scores"} <= inner.keys():
        raise TypeError(f"OCR answer of unknown shape: a dictionary with {sorted(map(str, page))}; {_KNOWN}")
    return [(str(t), float(s)) for t, s in zip(inner["rec_texts"], inner["rec_scores"], strict=True)]


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
