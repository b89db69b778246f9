"""What a handler gets: images as uint8 and metadata, of one job or of several merged ones. Needs only numpy.

A sample that is no image (NaN, out of range) arrives black, so that lists with one entry per sample keep their order;
whatever score it gets is replaced by None and the reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_reward.handler import BadInput
from cosmos_rl_reward.payload.arrays import BFLOAT16, load
from cosmos_rl_reward.payload.metadata import PER_ITEM, parse_line
from cosmos_rl_reward.rewards.samples import round_pixels
from cosmos_rl_reward.spool import HEADER_BYTES, Job, unpack_header

KINDS = {4: "image", 5: "video"}  # by the number of axes


@dataclass(frozen=True)
class Input:
    """One job, read.

    Attributes:
        images: ``[B, H, W, 3]`` or ``[B, 3, T, H, W]``, uint8.
        info: the result's input_info.
        bad: index and reason of the samples that are no images; they are black in ``images``.
    """

    id: str
    images: np.ndarray
    metadata: dict[str, Any]
    info: dict[str, Any]
    bad: dict[int, str] = field(default_factory=dict)


def read_header(path: Path) -> tuple[Job, bytes]:
    """Header and first line of a job file."""
    with open(path, "rb") as file:
        job = unpack_header(file.read(HEADER_BYTES))
        return job, file.read(job.line_end - HEADER_BYTES)


def read_input(id: str, path: str, decoded: str) -> Input:
    """Read a job; ``decoded`` is the file of its decoded latents or an empty string.

    Raises:
        BadInput: no sample has the values of an image.
        OSError: the file was cut off, because the job has ended meanwhile.
    """
    job, line = read_header(Path(path))
    metadata = parse_line(line)
    if decoded:
        video, note = read_header(Path(decoded))
        images, decoding = load(decoded, video.array), json.loads(note)
        info, bad = decoding["input_info"], {int(k): reason for k, reason in decoding["bad"].items()}
    else:
        raw = load(path, job.array)
        if job.array.dtype == BFLOAT16:
            raw = _bfloat16(raw)
        images, bad = to_pixels(raw)
        info, decoding = describe(raw), {"decode_duration": "0.00", "decoded_info": {}}
    if len(bad) == len(images):
        raise BadInput(f"payload: no sample can be scored; the first: {bad[0]}")
    if images.ndim == 5 and "video_infos" in metadata:
        info = {**info, "video_infos": metadata["video_infos"]}
    metadata.update(
        uuid=id,
        media_type=KINDS[images.ndim],
        input_info=info,
        decode_duration=decoding["decode_duration"],
        decoded_info=decoding["decoded_info"],
    )
    return Input(id, images, metadata, info, bad)


def describe(array: Any) -> dict[str, Any]:
    """Shape, type and range of an array as the result object shows them."""
    low, high = float(array.min()), float(array.max())
    return {
        "shape": list(array.shape),
        "dtype": f"torch.{array.dtype}",
        "min": f"{low:.3f}",
        "max": f"{high:.3f}",
    }


def to_pixels(array: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
    """uint8 pixels 0..255, and the reasons of those samples that are none; these are black.

    Raises:
        BadInput: all values lie within [0, 1] as if they were not scaled, and are not all 0.
    """
    if array.dtype == np.uint8:
        return array, {}
    pixels, bad = np.zeros(array.shape, np.uint8), {}
    highest = 0.0
    for k, sample in enumerate(array):
        low, high = float(sample.min()), float(sample.max())
        try:
            pixels[k] = round_pixels(sample, low, high)
            highest = max(highest, high)
        except ValueError as error:
            bad[k] = f"payload: {error}"
    if array.dtype.kind == "f" and 0 < highest <= 1:
        raise BadInput("payload: floating-point pixels within [0, 1]; scale them to 0..255 (best as uint8)")
    return pixels, bad


def _bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def group_inputs(inputs: list[Input], required: tuple[str, ...]) -> list[list[Input]]:
    """Group jobs that may be scored in one call: same image shape, and metadata that differs per sample only."""
    groups: dict[str, list[Input]] = {}
    for one in inputs:
        rest = {k: v for k, v in one.metadata.items() if k not in _per_item(one, required)}
        for private in ("uuid", "input_info", "decode_duration", "decoded_info", "reward_fn"):
            rest.pop(private, None)
        fields = sorted(_per_item(one, required))
        key = json.dumps([one.images.shape[1:], fields, rest], sort_keys=True, default=str)
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _per_item(one: Input, required: tuple[str, ...]) -> set[str]:
    names = {*PER_ITEM, *required, *one.metadata.get("per_item", ())}
    count = len(one.images)
    return {k for k in names if isinstance(one.metadata.get(k), list) and len(one.metadata[k]) == count}


def merge_bad_samples(batch: list[Input]) -> dict[int, str]:
    """Reasons of the samples of a merged batch that are no images, by their index in it."""
    bad, begin = {}, 0
    for one in batch:
        bad.update({begin + k: reason for k, reason in one.bad.items()})
        begin += len(one.images)
    return bad


def merge(batch: list[Input], required: tuple[str, ...]) -> tuple[np.ndarray, dict[str, Any]]:
    """One call's arguments for jobs of one group."""
    first = batch[0]
    if len(batch) == 1:
        return first.images, first.metadata
    joined = {k: [v for one in batch for v in one.metadata[k]] for k in _per_item(first, required)}
    images = np.concatenate([one.images for one in batch])
    return images, {**first.metadata, **joined, "input_info": describe(images)}
