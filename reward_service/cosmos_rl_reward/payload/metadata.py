"""The first line of a body: metadata as JSON."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from cosmos_rl_reward.payload.errors import Refused

MAX_LINE = 1 << 20  # bytes
MAX_REWARDS = 16
# metadata that has one entry per sample, besides what a request names in its own "per_item"
PER_ITEM = ("prompts", "video_infos", "geneval_tags", "geneval_includes", "geneval_excludes")
REWARD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def parse_line(line: bytes) -> dict[str, Any]:
    """Decode and check the metadata line, without the rules that need the number of samples.

    ``prompts`` becomes a list, ``media_type`` is lower-cased, ``video_fps`` is filled from its alias ``fps``, and
    ``per_item`` is sorted.

    Raises:
        Refused: the message names the field.
    """
    try:
        data = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise Refused("metadata: the first line is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        text = str(error) if isinstance(error, json.JSONDecodeError) else "invalid JSON"
        raise Refused(f"metadata: the first line is not one JSON object: {text}") from error
    if not isinstance(data, dict):
        raise Refused("metadata: the first line must be a JSON object")
    _check_values(data)
    _check_rewards(data)
    _check_per_item(data)
    prompts = data.get("prompts")
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise Refused("metadata.prompts: needed, a list with one text per sample")
    media = data.get("media_type")
    if media is not None and not isinstance(media, str):
        raise Refused("metadata.media_type: must be 'image', 'video' or 'latent'")
    infos = data.get("video_infos")
    if infos is not None:
        if not isinstance(infos, list) or not all(isinstance(i, dict) for i in infos):
            raise Refused("metadata.video_infos: must be a list of objects, one per sample")
        data["video_infos"] = [{"video_fps": i["fps"], **i} if "fps" in i else i for i in infos]
        _check_rates(data["video_infos"])
    return {**data, "prompts": prompts, **({"media_type": media.lower()} if media else {})}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_values(data: dict[str, Any]) -> None:
    """Refuse what could not be sent on: numbers beyond those of JSON (``1e999``) and halves of surrogate pairs."""
    others = {name: value for name, value in data.items() if name != "reward_fn"}  # its weights are checked one by one
    with contextlib.suppress(ValueError, RecursionError):
        json.dumps(others, allow_nan=False, ensure_ascii=False).encode()
        return
    for name, value in others.items():
        try:
            json.dumps([name, value], allow_nan=False, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Refused(f"metadata.{_shown(name)}: holds half of a surrogate pair, which is no text") from error
        except (ValueError, RecursionError) as error:
            raise Refused(f"metadata.{_shown(name)}: holds a number that is not finite") from error


def _shown(name: str) -> str:
    return ascii(name)[1:-1][:70]


def _check_rates(infos: list[dict[str, Any]]) -> None:
    for number, info in enumerate(infos):
        for name in ("video_fps", "fps"):
            if name in info and not (_finite(info[name]) and info[name] > 0):
                raise Refused(f"metadata.video_infos[{number}].{name}: must be a number above 0")


def _finite(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _check_rewards(data: dict[str, Any]) -> None:
    rewards = data.get("reward_fn")
    if not isinstance(rewards, dict) or not rewards:
        raise Refused("metadata.reward_fn: needed, an object of reward name and weight")
    if len(rewards) > MAX_REWARDS:
        raise Refused(f"metadata.reward_fn: at most {MAX_REWARDS} rewards per job")
    for name, weight in rewards.items():
        if not REWARD_NAME.fullmatch(name):
            raise Refused(f"metadata.reward_fn: {name[:70]!a} is not a reward name")
        if not _finite(weight):
            raise Refused(f"metadata.reward_fn.{name}: the weight must be a finite number")


def _check_per_item(data: dict[str, Any]) -> None:
    """The names under ``per_item``, sorted, must be those of fields."""
    if "per_item" not in data:
        return
    names = data["per_item"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Refused("metadata.per_item: must be a list of names of fields")
    for name in names:
        if name not in data or name == "per_item":
            raise Refused(f"metadata.per_item: names {_shown(name)}, which is no field of the request")
    data["per_item"] = sorted(set(names))


def find_per_item(metadata: Mapping[str, Any], count: int) -> set[str]:
    """Names of the lists that have one entry for each of ``count`` samples.

    A request that has ``per_item`` says which of its own lists do, so that a value of the whole job may have that
    length by chance. In one without it, as older clients send it, the length decides.
    """
    found = {name for name, value in metadata.items() if isinstance(value, list) and len(value) == count}
    if "per_item" in metadata:
        found &= {*PER_ITEM, *metadata["per_item"]}
    return found


def check_counts(data: dict[str, Any], count: int) -> None:
    """Every per-sample list must have ``count`` entries.

    Raises:
        Refused: the message names the field and both numbers.
    """
    own = data.get("per_item", ())
    for name in (*PER_ITEM, *own):
        value = data.get(name)
        if (value is not None or name in own) and (not isinstance(value, list) or len(value) != count):
            have = len(value) if isinstance(value, list) else "no list"
            raise Refused(f"metadata.{name}: has {have} entries, but the payload has {count} samples")
