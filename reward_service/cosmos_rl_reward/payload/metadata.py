"""The first line of a body: metadata as JSON."""

from __future__ import annotations

import contextlib
import json
import math
import re
from typing import Any

from cosmos_rl_reward.payload.errors import Refused

MAX_LINE = 1 << 20  # bytes
MAX_REWARDS = 16
# metadata that has one entry per sample; other lists are passed on as they are
PER_ITEM = ("prompts", "video_infos", "geneval_tags", "geneval_includes")
REWARD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def parse_line(line: bytes) -> dict[str, Any]:
    """Decode and check the metadata line, without the rules that need the number of samples.

    ``prompts`` becomes a list, ``media_type`` is lower-cased, ``video_fps`` is filled from its alias ``fps``.

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


def check_counts(data: dict[str, Any], count: int) -> None:
    """Every per-sample list must have ``count`` entries.

    Raises:
        Refused: the message names the field and both numbers.
    """
    for name in PER_ITEM:
        value = data.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != count):
            have = len(value) if isinstance(value, list) else "no list"
            raise Refused(f"metadata.{name}: has {have} entries, but the payload has {count} samples")
