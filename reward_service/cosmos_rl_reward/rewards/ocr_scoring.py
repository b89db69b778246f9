"""How recognised text becomes a score. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

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
_INCHES = re.compile(r"\d'\s?\d+(?:\.\d+)?$")  # 5'10, before the mark of the inches


def find_quoted_text(prompt: str) -> str | None:
    """The text an image should show: all quoted spans of the prompt, joined by a space; None without any.

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


def find_first_quoted(prompt: str) -> str | None:
    """What stands between the first and the second ASCII double quote; None without two."""
    parts = prompt.split('"')
    return parts[1] if len(parts) > 2 and parts[1] else None


def join_lines(lines: Iterable[tuple[str, float]], min_confidence: float) -> str:
    """Texts with a confidence above the bound, one after the other."""
    return "".join(text for text, confidence in lines if confidence > min_confidence)


def normalize_text(text: str) -> str:
    """Lower case without white space."""
    return "".join(text.lower().split())


def ocr_score(target: str, text: str, *, upstream: bool = False) -> float:
    """``1 - d / L``: 1 when the target is contained in the text, 0 when nothing fits.

    d is the edit distance of both normalised strings, at most the target's length. L is the normalised target's length;
    with ``upstream`` its length including spaces, so that a miss of a text with spaces scores above 0
    ("Hello World": 1 - 10/11).
    """
    t, r = normalize_text(target), normalize_text(text)
    distance = 0 if t in r else min(Levenshtein.distance(r, t), len(t))
    return 1.0 - distance / max(1, len(target) if upstream else len(t))


def diagnostics(target: str, text: str) -> dict[str, float]:
    """Other views of the same two strings, each in [0, 1]."""
    t, r = normalize_text(target), normalize_text(text)
    have, want = Counter(r), Counter(t)
    union = (have | want).total()
    return {
        "edit_similarity": float(Levenshtein.normalized_similarity(r, t)),
        "exact_match": float(t == r),
        "substring_match": float(t in r),
        "char_iou": (have & want).total() / union if union else 0.0,
    }
