"""Which frames of a video a model sees, and at which size. Frame rules are pure functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosmos_rl_reward.rewards.samples import SampleError

FACTOR = 28  # Qwen2-VL: patches of 14 pixels, merged 2 x 2


def sample_evenly(frames: int, video_fps: float, fps: float, *, number: int | None = None) -> np.ndarray:
    """Indices of ``fps`` frames a second (or of ``number`` frames), evenly over the whole video.

    An even number of frames between 4 and 768, at most as many as there are.

    Raises:
        SampleError: fewer than 2 frames.
    """
    if frames < 2:
        raise SampleError(f"{frames} frame; a video needs at least 2")
    most = min(768, frames) // 2 * 2
    wanted = frames / video_fps * fps if number is None else number
    count = round(min(max(wanted, 4), most) / 2) * 2
    return np.rint(np.linspace(0, frames - 1, count)).astype(int)


def sample_every_nth(frames: int, video_fps: float, most: int = 160) -> tuple[np.ndarray, float]:
    """Indices of every n-th frame, n as small as at most ``most`` frames allow, an even number of them.

    Returns:
        The indices; how many of these frames make a second.

    Raises:
        SampleError: fewer than 2 frames.
    """
    step = max(1, (frames - 1) // most + 1)
    indices = np.arange(0, frames, step)
    indices = indices[: len(indices) // 2 * 2]
    if not len(indices):
        raise SampleError(f"{frames} frame; a video needs at least 2")
    return indices, video_fps / step


def resize_frames(frames: np.ndarray, min_pixels: int, max_pixels: int) -> Any:
    """Frames at the size Qwen2-VL takes: sides are multiples of 28, the aspect ratio stays, pixels within bounds.

    Args:
        frames: uint8 ``[T, 3, H, W]``.
        min_pixels: least pixels of a frame.
        max_pixels: most pixels of a frame.

    Returns:
        float32 tensor ``[T, 3, h, w]``, whole numbers 0..255 (bicubic with anti-aliasing).
    """
    import torch
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    try:
        size = smart_resize(*frames.shape[-2:], factor=FACTOR, min_pixels=min_pixels, max_pixels=max_pixels)
    except ValueError as error:
        raise SampleError(f"{frames.shape[-2]} x {frames.shape[-1]} pixels: {error}") from error
    tensor = torch.from_numpy(np.ascontiguousarray(frames)).float()
    return torch.nn.functional.interpolate(tensor, size, mode="bicubic", antialias=True).round().clamp(0, 255)
