"""Checks of what a handler returned: lengths are right, numbers finite, missing scores stay missing."""

from __future__ import annotations

import math
from typing import Any

from cosmos_rl_reward.handler import BaseRewardHandler


class BadOutput(Exception):
    """The handler returned something that is not a result. Trying again would not help."""


def check(returned: Any, count: int) -> tuple[dict[str, Any], dict[int, str]]:
    """Plain lists of the scores, and the errors per sample.

    A number that is not finite becomes None with an error.

    Raises:
        BadOutput: wrong type or length. The message says which key.
    """
    if not isinstance(returned, dict):
        raise BadOutput(f"calculate_reward returned {type(returned).__name__}, not a dictionary")
    if returned.get("scores") is None:
        raise BadOutput(str(returned.get("error") or "calculate_reward returned no scores"))
    if not isinstance(returned["scores"], dict) or not returned["scores"]:
        raise BadOutput("calculate_reward returned no table of scores")
    given = returned.get("item_errors") or {}
    if not isinstance(given, dict):
        given = dict(enumerate(given))
    errors = {int(i): str(e) for i, e in given.items() if e}
    if any(not 0 <= i < count for i in errors):
        raise BadOutput(f"item_errors names a sample outside 0..{count - 1}")
    scores = {str(key): _column(str(key), value, count, errors) for key, value in returned["scores"].items()}
    return scores, errors


def _column(key: str, value: Any, count: int, errors: dict[int, str]) -> Any:
    if isinstance(value, dict):
        return {str(k): _column(f"{key}.{k}", v, count, errors) for k, v in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise BadOutput(f"scores.{key} is {type(value).__name__}, not a list with one entry per sample")
    if len(value) != count:
        raise BadOutput(f"scores.{key} has {len(value)} entries for {count} samples")
    return [_entry(key, i, v, errors) for i, v in enumerate(value)]


def _entry(key: str, index: int, value: Any, errors: dict[int, str]) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if value is None:
        errors.setdefault(index, f"{key}: no score")
    elif isinstance(value, float) and not math.isfinite(value):
        errors.setdefault(index, f"{key}: the score is {value}")
        return None
    elif not isinstance(value, (bool, int, float, str)):
        raise BadOutput(f"scores.{key}[{index}] is {type(value).__name__}, not a number")
    return value


def mask_scores(scores: Any, bad: dict[int, str]) -> Any:
    """A column, or a table of columns, with None for the samples ``bad``."""
    if isinstance(scores, dict):
        return {key: mask_scores(value, bad) for key, value in scores.items()}
    return [None if k in bad else value for k, value in enumerate(scores)]


def slice_scores(value: Any, begin: int, end: int) -> Any:
    """Rows ``begin:end`` of a column or of a table of columns."""
    if isinstance(value, dict):
        return {k: slice_scores(v, begin, end) for k, v in value.items()}
    return value[begin:end]


def mean_scores(scores: dict[str, Any]) -> dict[str, float]:
    """The mean of each column of numbers, over the samples that have one; at most 8 columns."""
    found = {}
    for key, column in scores.items():
        if not isinstance(column, list):
            continue
        if numbers := [v for v in column if isinstance(v, (bool, int, float))]:
            found[key] = float(sum(numbers) / len(numbers))
    return dict(list(found.items())[:8])


def self_test(handler: BaseRewardHandler, score: Any) -> str:
    """Score the handler's probes with ``score(images, metadata)``; returns a warning, or an empty string.

    Raises:
        BadOutput: a probe has no finite score.
    """
    found = []
    for number, (images, metadata) in enumerate(handler.probes()):
        scores, errors = check(score(images, metadata), len(images))
        if errors:
            raise BadOutput(f"self-test: probe {number} has no score: {errors[min(errors)]}")
        found.append(scores)
    if len(found) > 1 and all(scores == found[0] for scores in found):
        return f"self-test: both probes got the same scores ({found[0]}); is the model loaded?"
    return ""
