"""Rewards that need no weights: for first tries, tests, and as a model for your own.

Each takes an image uint8 ``[H, W, 3]`` or a video uint8 ``[T, H, W, 3]`` (the mean over its frames) and gives a number
whose range is well within the usual clip of -5 ... 5.
"""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Media = NDArray[np.uint8]
_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
_QUALITY = 75
"""Of the JPEG files whose size is measured."""


def brightness(to_be_evaluated: Media) -> float:
    """Mean luma: 0 is black, 1 is white."""
    return float(_luma(to_be_evaluated).mean())


def darkness(to_be_evaluated: Media) -> float:
    """1 - brightness."""
    return 1.0 - brightness(to_be_evaluated)


def ink(to_be_evaluated: Media) -> float:
    """Share of dark pixels (luma below one half), 0 ... 1: how much is drawn on a light ground."""
    return float((_luma(to_be_evaluated) < 0.5).mean())


def sharpness(to_be_evaluated: Media) -> float:
    """Mean absolute difference of the luma of neighbouring pixels, 0 (flat) ... 1 (black and white in turns)."""
    luma = _luma(to_be_evaluated)
    differences = [np.abs(np.diff(luma, axis=axis)).mean() for axis in (-2, -1) if luma.shape[axis] > 1]
    if not differences:
        return 0.0
    return float(np.mean(differences))


def colourfulness(to_be_evaluated: Media) -> float:
    """Measure M3 of Hasler and Süsstrunk (2003), divided by 100: 0 is grey, above 1 is very colourful."""
    red, green, blue = np.moveaxis(to_be_evaluated.astype(np.float64), -1, 0)
    red_green, yellow_blue = red - green, (red + green) / 2 - blue
    axes = (-2, -1)
    deviation = np.hypot(red_green.std(axis=axes), yellow_blue.std(axis=axes))
    mean = np.hypot(red_green.mean(axis=axes), yellow_blue.mean(axis=axes))
    return float(np.mean(deviation + 0.3 * mean) / 100)


def jpeg_incompressibility(to_be_evaluated: Media) -> float:
    """Bits per pixel of a JPEG file beyond those of a plain grey image: 0 (plain) ... about 5 (noise)."""
    frames = to_be_evaluated.reshape(-1, *to_be_evaluated.shape[-3:])
    plain = _jpeg_bytes(np.full_like(frames[0], 128))
    beyond = np.mean([_jpeg_bytes(frame) - plain for frame in frames])
    return float(8 * beyond / (frames.shape[1] * frames.shape[2]))


def jpeg_compressibility(to_be_evaluated: Media) -> float:
    """-jpeg_incompressibility: rewards plain images."""
    return -jpeg_incompressibility(to_be_evaluated)


def _luma(media: Media) -> NDArray[np.float64]:
    """0 ... 1, without the last axis."""
    return media @ _LUMA / 255


def _jpeg_bytes(image: Media) -> int:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=_QUALITY)
    return file.tell()
