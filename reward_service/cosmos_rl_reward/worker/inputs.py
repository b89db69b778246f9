"""What a handler gets: pictures as uint8 and metadata, of one job or of several merged ones. Needs only numpy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_reward.handler import BadInput
from cosmos_rl_reward.payload.arrays import BFLOAT16, load
from cosmos_rl_reward.payload.metadata import PER_ITEM, parse_line
from cosmos_rl_reward.spool import HEADER_BYTES, Job, unpack


@dataclass(frozen=True)
class Input:
    """One job, read. ``images``: ``[B, H, W, 3]`` or ``[B, 3, T, H, W]``, uint8; ``info``: the result's input_info."""

    id: str
    images: np.ndarray
    metadata: dict[str, Any]
    info: dict[str, Any]


def read_header(path: Path) -> tuple[Job, bytes]:
    """Header and first line of a job file."""
    with open(path, "rb") as file:
        job = unpack(file.read(HEADER_BYTES))
        return job, file.read(job.line_end - HEADER_BYTES)


def read_input(id: str, path: str, decoded: str) -> Input:
    """Read a job; ``decoded`` is the file of its decoded latents or an empty string.

    Raises:
        BadInput: the values are not those of pictures.
        OSError: the file was cut off, because the job has ended meanwhile.
    """
    job, line = read_header(Path(path))
    metadata = parse_line(line)
    if decoded:
        video, note = read_header(Path(decoded))
        images, decoding = load(decoded, video.array), json.loads(note)
        info = decoding["input_info"]
    else:
        raw = load(path, job.array)
        raw = _bfloat16(raw) if job.array.dtype == BFLOAT16 else raw
        images, info, decoding = to_pixels(raw), describe(raw), {"decode_duration": "0.00", "decoded_info": {}}
    if images.ndim == 5 and "video_infos" in metadata:
        info = {**info, "video_infos": metadata["video_infos"]}
    metadata.update(
        uuid=id,
        media_type="image" if images.ndim == 4 else "video",
        input_info=info,
        decode_duration=decoding["decode_duration"],
        decoded_info=decoding["decoded_info"],
    )
    return Input(id, images, metadata, info)


def describe(array: Any) -> dict[str, Any]:
    """Shape, type and range of an array as the result object shows them."""
    low, high = float(array.min()), float(array.max())
    return {
        "shape": list(array.shape),
        "dtype": f"torch.{array.dtype}",
        "min": f"{low:.3f}",
        "max": f"{high:.3f}",
    }


def to_pixels(array: np.ndarray) -> np.ndarray:
    """uint8 pixels 0..255; other types are cut to whole numbers, as rewards always did.

    Raises:
        BadInput: values outside 0..255, not finite, or all within [0, 1] as if they were not scaled.
    """
    if array.dtype == np.uint8:
        return array
    low, high = float(array.min()), float(array.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise BadInput("payload: pixels must be finite")
    if low < 0 or high > 255:
        raise BadInput(f"payload: pixels must lie in 0..255, found {low:.3g}..{high:.3g}")
    if high <= 1 and array.dtype != np.bool_ and array.dtype.kind == "f":
        raise BadInput("payload: floating-point pixels within [0, 1]; scale them to 0..255 (best as uint8)")
    return array.astype(np.uint8)


def _bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def batches(inputs: list[Input], required: tuple[str, ...]) -> list[list[Input]]:
    """Group jobs that may be scored in one call: same picture shape, and metadata that differs per sample only."""
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
    names = {*PER_ITEM, *required}
    count = len(one.images)
    return {k for k in names if isinstance(one.metadata.get(k), list) and len(one.metadata[k]) == count}


def merge(batch: list[Input], required: tuple[str, ...]) -> tuple[np.ndarray, dict[str, Any]]:
    """One call's arguments for jobs of one group."""
    first = batch[0]
    if len(batch) == 1:
        return first.images, first.metadata
    joined = {k: [v for one in batch for v in one.metadata[k]] for k in _per_item(first, required)}
    images = np.concatenate([one.images for one in batch])
    return images, {**first.metadata, **joined, "input_info": describe(images)}
