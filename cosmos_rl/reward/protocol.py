"""The reward service's protocol (version 1): what is sent, and what comes back. Pure functions of arrays and mappings.

A request is one line of JSON and then an array as a ``.npy`` file. An answer holds a list of scores by name.
"""

import io
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import RemoteRewardConfig
from cosmos_rl.reward.metadata import build_columns

_TERMS = {("dance_grpo", "overall_reward"): "vq_reward+mq_reward+ta_reward"}
"""Scores that the service has added up."""
_USUAL_FPS = 16.0
_GEN_EVAL = "gen_eval"


@dataclass(frozen=True)
class Asked:
    """A score that is read from an answer."""

    name: str
    """In tables of rewards."""
    reward: str
    """Reward type at the service."""
    score_key: str
    """A field of the answer, or several with ``+`` between them."""
    optional: bool = False
    """Whether a service may leave it out."""


def list_requested_scores(table: RemoteRewardConfig, names: Collection[str] = ()) -> list[Asked | None]:
    """Entry by entry of ``table`` which score it reads; None for one that is not asked for.

    An entry is named as its reward, and when several read the same reward, ``reward.score_key``. ``names``: of those to
    ask for; empty: all.
    """
    entries = zip(table.shown_names, table.reward_fns, strict=True)
    return [
        None if shown is None or (names and shown not in names) else Asked(shown, entry.name, entry.read_key)
        for shown, entry in entries
    ]


def list_terms(asked: Sequence[Asked]) -> list[Asked]:
    """The terms of those scores that are sums, for metrics: a sum hides that one of them collapses."""
    known = {(one.reward, one.score_key) for one in asked}
    terms = {}
    for one in asked:
        keys = _TERMS.get((one.reward, one.score_key), one.score_key).split("+")
        for key in keys if len(keys) > 1 else ():
            terms[one.reward, key] = Asked(f"{one.reward}.{key}", one.reward, key, optional=True)
    return [term for place, term in terms.items() if place not in known]


def build_reward_fn(table: RemoteRewardConfig) -> dict[str, float]:
    """The ``reward_fn`` of a request. The service drops weights <= 0 and ignores the others: a penalty, or what is only
    measured, is sent as 1."""
    weights: dict[str, float] = {}
    for entry in table.reward_fns:
        if entry.is_asked:
            weights[entry.name] = max(weights.get(entry.name, 0.0), entry.weight if entry.weight > 0 else 1.0)
    return weights


def request_body(
    media: NDArray[Any],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    reward_fn: Mapping[str, float],
    fps: float | None = None,
    keys: Collection[str] = (),
) -> bytearray:
    """A request for ``B`` samples.

    Args:
        media: uint8 images ``[B, H, W, 3]``, uint8 videos ``[B, T, H, W, 3]``, or float latents ``[B, C, T, h, w]``
            of the Wan VAE, which travel as float16.
        prompts: ``B`` texts.
        metadata: ``B`` mappings, of which every key is sent (`build_columns`); those of gen_eval need ``tag`` and
            ``include``, which travel under the names of the protocol too.
        reward_fn: reward type -> weight.
        fps: of videos and latents; unset: 16.
        keys: of metadata that are sent whether a sample has them or not.

    Raises:
        UserError: a prompt lacks what a reward needs.
    """
    if media.ndim == 4:
        media_type = "image"
    elif media.dtype == np.uint8:
        media_type, media = "video", np.moveaxis(media, -1, 1)  # [B, 3, T, H, W]
    else:
        media_type, media = "latent", media.astype(np.float16)
    head = io.BytesIO()
    head.write(build_line(prompts, metadata, reward_fn, media_type, fps, keys) + b"\n")
    described = {"descr": np.lib.format.dtype_to_descr(media.dtype), "fortran_order": False, "shape": media.shape}
    np.lib.format.write_array_header_1_0(head, described)
    start = head.tell()
    body = bytearray(start + media.nbytes)
    body[:start] = head.getbuffer()
    # NumPy copies without the interpreter's lock, so that the trainer's thread continues meanwhile
    np.ndarray(media.shape, media.dtype, body, start)[...] = media
    return body


def build_line(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    reward_fn: Mapping[str, float],
    media_type: str,
    fps: float | None = None,
    keys: Collection[str] = (),
) -> bytes:
    """The JSON of a request, as `request_body` has it. It is no longer than the lines of its samples together.

    Raises:
        UserError: a prompt lacks what a reward needs.
    """
    line: dict[str, Any] = {"prompts": list(prompts), "reward_fn": dict(reward_fn), "media_type": media_type}
    if media_type != "image":
        line["video_infos"] = [{"video_fps": fps or _USUAL_FPS}] * len(prompts)
    if _GEN_EVAL in reward_fn:
        line |= _gen_eval_fields(prompts, metadata)
    return json.dumps({**build_columns(metadata, keys), **line}).encode()


def _gen_eval_fields(prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What an image has to show. Services that do not know ``geneval_excludes`` leave it unread."""
    for prompt, one in zip(prompts, metadata, strict=True):
        missing = [key for key, kind in (("tag", str), ("include", list)) if not isinstance(one.get(key), kind)]
        if missing or not one["include"]:
            raise UserError(
                f'gen_eval: the prompt "{prompt[:60]}" has no "{(missing or ["include"])[0]}" in its metadata; use the '
                'prompt set geneval, or a .jsonl file whose lines have "tag" and "include"'
            )
    found: dict[str, Any] = {
        "geneval_tags": [one["tag"] for one in metadata],
        "geneval_includes": [one["include"] for one in metadata],
    }
    if any(one.get("exclude") for one in metadata):
        found["geneval_excludes"] = [one.get("exclude") or [] for one in metadata]
    return found


def read_scores(answer: object, asked: Asked, count: int) -> list[float | str]:
    """The ``count`` scores in an answer, each a finite number or the reason why it is missing.

    Raises:
        UserError: the service has no such field.
    """
    if not isinstance(answer, Mapping):
        return ["the service's answer is not a result"] * count
    scores = answer.get("scores")
    if not isinstance(scores, Mapping):
        return [str(answer.get("error") or "the service gave no scores and no reason")] * count
    keys = [asked.score_key]
    if asked.score_key not in scores:
        keys = asked.score_key.split("+")
    unknown = [key for key in keys if key not in scores]
    if unknown and asked.optional:
        return [f"the service gives no {unknown[0]}"] * count
    if unknown:
        raise UserError(
            f'remote_reward.reward_fns: score_key "{asked.score_key}" of the reward {asked.reward}: the service gives '
            f"no {unknown[0]}; available: {', '.join(scores)}"
        )
    errors = answer.get("item_errors")
    parts = [_read_column(scores[key], count, errors) for key in keys]
    return [_add_up(row) for row in zip(*parts, strict=True)]


def _read_column(values: object, count: int, errors: object) -> list[float | str]:
    if not isinstance(values, list) or len(values) != count:
        have = "no list of scores"
        if isinstance(values, list):
            have = f"{len(values)} scores"
        return [f"the service gave {have} for {count} samples"] * count
    return [_read_one(value, row, errors) for row, value in enumerate(values)]


def _read_one(value: object, row: int, errors: object) -> float | str:
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    if isinstance(errors, Mapping) and errors.get(str(row)):
        return str(errors[str(row)])
    if value is None:
        value = "no score"
    return f"the service gave {value}"


def _add_up(parts: Sequence[float | str]) -> float | str:
    total = 0.0
    for part in parts:
        if isinstance(part, str):
            return part
        total += part
    return total
