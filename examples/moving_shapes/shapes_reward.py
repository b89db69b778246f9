"""What a clip of `moving_shapes.py` shows. Computed from the pixels: nothing here was trained."""

import numpy as np
from numpy.typing import NDArray

from cosmos_rl.policy.model.tiny.shapes import COLOURS, WAY

_EXPECTED_WAY = sum(WAY) / 2


def find_centres(clip: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Centre (row, column) of what differs from the background in each frame, ``[T, 2]``; NaN: nothing does.

    ``clip`` is ``[T, H, W, 3]``.
    """
    pixels = clip.astype(np.float64)
    background = np.median(pixels, axis=(1, 2), keepdims=True)
    weight = np.clip(abs(pixels - background).sum(-1) - 60, 0, None)  # 60: what compression and decoding leave
    total = weight.sum((1, 2))
    rows, columns = np.mgrid[: clip.shape[1], : clip.shape[2]]
    with np.errstate(invalid="ignore"):
        return np.stack([(weight * rows).sum((1, 2)), (weight * columns).sum((1, 2))], -1) / total[:, None]


def find_move(clip: NDArray[np.uint8]) -> NDArray[np.float64]:
    """From the first to the last frame, (down, right): 1 is the usual way; NaN: there is nothing to see."""
    return np.diff(find_centres(clip)[[0, -1]], axis=0)[0] / _EXPECTED_WAY


def moves_right(to_be_evaluated: NDArray[np.uint8]) -> float:
    """How far the shape moves to the right, less how far it moves up or down: 1 is the usual way of the data."""
    down, right = find_move(to_be_evaluated)
    if not np.isfinite([down, right]).all():
        return -1.5  # less than any clip of the data
    return float(right - abs(down))


def has_the_colour(to_be_evaluated: NDArray[np.uint8], prompt: str) -> float:
    """Share of the frames whose shape is nearest to the colour of the prompt."""
    names = list(COLOURS)
    palette = np.array([COLOURS[name] for name in names], dtype=np.float64)
    right = 0
    for frame in to_be_evaluated.astype(np.float64):
        difference = abs(frame - np.median(frame, axis=(0, 1))).sum(-1)
        shown = frame[difference >= max(np.quantile(difference, 0.97), 60.0)]
        if len(shown):
            nearest = np.linalg.norm(palette - shown.mean(0), axis=1).argmin()
            right += names[nearest] == prompt.split()[1]
    return right / len(to_be_evaluated)
