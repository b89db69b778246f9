"""What all rewards do with their input: check the layout, read the metadata, collect scores per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cosmos_rl_reward.handler import BadInput


class SampleError(Exception):
    """One sample cannot be scored; its score is ``None`` and the message goes to ``item_errors``."""


def to_numpy(array: Any) -> np.ndarray:
    """A numpy view or copy of a numpy array or of a tensor on any device."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().numpy()
    return np.asarray(array)


def round_pixels(array: np.ndarray, low: float, high: float) -> np.ndarray:
    """Values 0..255 rounded to the nearest whole number (half to even), as uint8: the one rule for pixels here.

    Args:
        array: real numbers on the scale 0..255; a decoder's -0.4 and 255.3 round to 0 and 255.
        low, high: its smallest and largest value.

    Raises:
        ValueError: a value is not finite, or does not round to one in 0..255.
    """
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError("pixels must be finite")
    if low < -0.5 or high > 255.5:
        raise ValueError(f"pixels must lie in 0..255, found {low:.3g}..{high:.3g}")
    if array.dtype.kind != "f":
        return array.astype(np.uint8)
    return np.clip(np.rint(array), 0, 255).astype(np.uint8)


def _check_pixels(array: np.ndarray, what: str) -> np.ndarray:
    """The array, if it is uint8, as workers pass it."""
    if array.dtype != np.uint8:
        raise BadInput(f"{what}: dtype {array.dtype}; expected uint8 0..255")
    return array


def as_images(images: Any) -> np.ndarray:
    """Images as uint8 ``[B, H, W, 3]``, from ``[B, H, W, 3]`` or ``[B, 3, H, W]`` (the former when both fit).

    Raises:
        BadInput: another rank, no axis of size 3, B = 0, or not uint8.
    """
    array = to_numpy(images)
    if array.ndim != 4 or 3 not in (array.shape[-1], array.shape[1]):
        raise BadInput(f"images: shape {list(array.shape)}; expected [B, H, W, 3] or [B, 3, H, W]")
    if array.shape[-1] != 3:
        array = array.transpose(0, 2, 3, 1)
    if 0 in array.shape:
        raise BadInput(f"images: shape {list(array.shape)} holds no image")
    return np.ascontiguousarray(_check_pixels(array, "images"))


def as_videos(videos: Any) -> np.ndarray:
    """Videos as uint8 ``[B, 3, T, H, W]``.

    Raises:
        BadInput: another rank, not 3 channels on axis 1, an empty axis, or not uint8.
    """
    array = to_numpy(videos)
    if array.ndim != 5 or array.shape[1] != 3 or 0 in array.shape:
        raise BadInput(f"videos: shape {list(array.shape)}; expected [B, 3, T, H, W]")
    return _check_pixels(array, "videos")


def as_frames(media: Any) -> np.ndarray:
    """Images and videos alike as uint8 ``[B, T, H, W, 3]``; an image has T = 1."""
    array = to_numpy(media)
    if array.ndim == 5:
        return as_videos(array).transpose(0, 2, 3, 4, 1)
    return as_images(array)[:, None]


def get_per_sample(metadata: dict[str, Any], key: str, count: int) -> list[Any]:
    """A list of the metadata with one entry per sample.

    Raises:
        BadInput: it is missing or of another length.
    """
    values = metadata.get(key)
    if not isinstance(values, (list, tuple)):
        raise BadInput(f"metadata.{key}: expected a list with one entry per sample")
    if len(values) != count:
        raise BadInput(f"metadata.{key}: {len(values)} entries for {count} samples")
    return list(values)


def get_frame_rate(infos: list[Any], index: int) -> float:
    """Frames per second of a video, from the request's ``video_infos``.

    Raises:
        SampleError: they do not say.
    """
    fps = infos[index].get("video_fps")
    if fps is None:
        raise SampleError(f"metadata.video_infos[{index}].video_fps is missing")
    return float(fps)


def score_samples(keys: tuple[str, ...], count: int, score: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Score sample after sample; one that fails gets ``None`` under every key, and a message.

    Args:
        keys: keys of the result.
        count: B.
        score: index -> value of each key. ``SampleError`` says that this sample can never be scored; any other
            exception is kept for this sample too, unless every sample failed so: then it is raised, because the fault
            is in the service and another try may help.

    Returns:
        ``{"scores": {key: list}, "item_errors": {index: message}}``.
    """
    values: dict[str, list[Any]] = {key: [None] * count for key in keys}
    errors: dict[int, str] = {}
    unexpected: list[Exception] = []
    for index in range(count):
        try:
            row = score(index)
        except SampleError as error:
            errors[index] = str(error)
        except BadInput:
            raise
        except Exception as error:
            errors[index] = f"{type(error).__name__}: {error}"
            unexpected.append(error)
        else:
            for key in keys:
                values[key][index] = row[key]
    if count and len(unexpected) == count:
        raise unexpected[0]
    return {"scores": values, "item_errors": errors}
