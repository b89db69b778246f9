"""What the payload is: a batch of images, of videos or of latents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from cosmos_rl_reward.payload.arrays import BFLOAT16, ArrayRef, read_npy
from cosmos_rl_reward.payload.errors import Refused
from cosmos_rl_reward.payload.torch_file import read_torch

LATENT_SCALE = {16: 8, 48: 16}  # channels of Wan 2.1 and Wan 2.2: pixels per latent in height and width


@dataclass(frozen=True)
class Media:
    """A checked payload.

    Attributes:
        kind: ``image``, ``video`` or ``latent``.
        array: ``[B, H, W, 3]``, ``[B, 3, T, H, W]`` or ``[B, C, T, H, W]`` (bfloat16 latents as such).
    """

    kind: str
    array: ArrayRef

    @property
    def count(self) -> int:
        """Samples in the batch."""
        return self.array.shape[0]

    @property
    def pixels(self) -> int:
        """Pixels per sample after decoding; used for limits."""
        if self.kind == "image":
            return self.array.shape[1] * self.array.shape[2]
        _, channels, frames, height, width = self.array.shape
        if self.kind == "video":
            return frames * height * width
        return (4 * frames - 3) * height * width * LATENT_SCALE[channels] ** 2

    @property
    def decoded_bytes(self) -> int:
        """The whole batch as uint8 pixels, latents after decoding."""
        return 3 * self.count * self.pixels


def read_payload(file: BinaryIO, start: int, end: int, media_type: str | None) -> Media:
    """Find and check the array between ``start`` and ``end`` of a body; no sample is read.

    Args:
        media_type: as the client said. Absent means latents, as old clients rely on.

    Raises:
        Refused: the message says what was expected.
    """
    if media_type not in (None, "image", "video", "latent"):
        raise Refused(f"metadata.media_type: {media_type[:40]!r} is not one of 'image', 'video', 'latent'")
    if start >= end:
        raise Refused("payload: empty")
    file.seek(start)
    if file.read(6) == b"\x93NUMPY":
        array = read_npy(file, start, end)
    else:
        array = read_torch(file, start, end)
    if array.shape and array.shape[0] == 0:
        raise Refused("payload: the batch is empty (B = 0)")
    if media_type == "image":
        return Media("image", _image(array))
    if media_type == "video":
        return Media("video", _video(array))
    return Media("latent", _latent(array, media_type))


def _image(array: ArrayRef) -> ArrayRef:
    shape = array.shape
    if len(shape) == 4 and shape[3] != 3 and shape[1] == 3:  # channels first: transpose the view
        order = (0, 2, 3, 1)
        array = replace(array, shape=tuple(shape[i] for i in order), strides=tuple(array.strides[i] for i in order))
    if len(array.shape) != 4 or array.shape[3] != 3 or not array.size:
        raise Refused(f"payload: images must be [B, H, W, 3] (or [B, 3, H, W]), got {list(shape)}")
    return array


def _video(array: ArrayRef) -> ArrayRef:
    if len(array.shape) != 5 or array.shape[1] != 3 or not array.size:
        raise Refused(f"payload: videos must be [B, 3, T, H, W], got {list(array.shape)}")
    return array


def _latent(array: ArrayRef, media_type: str | None) -> ArrayRef:
    shape = array.shape
    if len(shape) != 5 or shape[1] not in LATENT_SCALE or not array.size:
        message = f"payload: latents must be [B, 16 or 48, T, h, w], got {list(shape)}"
        if not media_type:
            message += " (metadata.media_type is absent, which means latents; set 'image' or 'video')"
        raise Refused(message)
    if array.dtype != BFLOAT16 and np.dtype(array.dtype) == np.uint8:
        # raw bytes of bfloat16: the last axis counts bytes
        if shape[-1] % 2 or array.strides[-1] != 1 or any(s % 2 for s in array.strides[:-1]):
            raise Refused(f"payload: uint8 latents hold bfloat16 bytes, but the last axis has {shape[-1]} of them")
        strides = (*(s // 2 for s in array.strides[:-1]), 1)
        return ArrayRef(BFLOAT16, (*shape[:-1], shape[-1] // 2), strides, array.offset)
    return array
