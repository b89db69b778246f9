"""Metadata of prompts on their way to the reward service: what can be sent, and in which fields. No torch."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cosmos_rl.errors import UserError

MAX_LINE = 2**20
"""Bytes of JSON that the service takes in a request."""
RESERVED = frozenset(
    {
        *("prompts", "reward_fn", "media_type", "video_infos", "per_item"),  # of every request
        *("geneval_tags", "geneval_includes", "geneval_excludes", "geneval_only_strict", "ocr_use_gpu"),  # of a reward
        *("uuid", "input_info", "decode_duration", "decoded_info"),  # what the service adds
    }
)
"""Fields of a request that mean something else."""

Located = tuple[str, Mapping[str, Any]]
"""Where a prompt stands, and its metadata."""


def list_keys(metadata: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys that any of them has, sorted."""
    return sorted({key for one in metadata for key in one})


def require_sendable(prompts: Iterable[Located]) -> None:
    """
    Raises:
        UserError: metadata of a prompt cannot be sent: a key that the protocol has, a value that JSON has not, or more
            than a request may hold.
    """
    for place, metadata in prompts:
        for key, value in metadata.items():
            if problem := _find_problem(key, value):
                raise UserError(f"{place}: metadata {key!r} cannot be sent to the reward service: {problem}")
        size = len(json.dumps(dict(metadata))) if metadata else 0
        if size > MAX_LINE:
            raise UserError(f"{place}: the metadata are {describe_excess(size, metadata)}")


def _find_problem(key: object, value: object) -> str | None:
    if not isinstance(key, str):
        return "a key has to be a text"
    if key in RESERVED:
        return "its requests have a field of that name; rename the key"
    try:
        json.dumps([key, value], allow_nan=False, ensure_ascii=False).encode()
    except TypeError:
        return (
            f"found {type(value).__name__}; allowed: texts, numbers, true, false, null, and lists and objects of them"
        )
    except UnicodeEncodeError:
        return "it has half of a character"
    except (ValueError, RecursionError):
        return "it has a number that is not finite, or is nested without end"
    return None


def describe_excess(size: int, metadata: Mapping[str, Any]) -> str:
    """What to do about ``size`` bytes of JSON, which are too many."""
    longest = max(metadata, key=lambda key: len(json.dumps(metadata[key])))
    return (
        f"{size:,} bytes of JSON, and the reward service takes {MAX_LINE:,} in a request; shorten them (the longest: "
        f'"{longest}"), or give names of files that the service can read'
    )


def build_columns(metadata: Sequence[Mapping[str, Any]], keys: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a request for samples with these metadata: under each key a list with one entry per sample, null
    for one without it, and under ``per_item`` the keys.

    Args:
        keys: those to send even if no sample here has them.
    """
    names = sorted({*keys, *list_keys(metadata)})
    if not names:
        return {}
    return {**{name: [one.get(name) for one in metadata] for name in names}, "per_item": names}
