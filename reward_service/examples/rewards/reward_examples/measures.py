"""Measures of images and videos that need no model. Pure functions on numpy arrays."""

from __future__ import annotations

import numpy as np

_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601


def luma(pixels: np.ndarray) -> np.ndarray:
    """Brightness in [0, 1] of uint8 ``[..., 3]``: float64 ``[...]``."""
    return pixels @ _LUMA / 255.0


def laplacian_variance(image: np.ndarray) -> float:
    """Variance of the 4-neighbour Laplacian of the brightness on the 0..255 scale, borders left out.

    Flat 0; below about 100 a photograph looks blurred. ``[H, W, 3]`` with H, W >= 3.
    """
    grey = luma(image) * 255.0
    inner = grey[1:-1, 1:-1]
    response = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:] - 4 * inner
    return float(response.var())


def closeness(value: float, target: float) -> float:
    """1 at the target, falling linearly to 0 at the far end of [0, 1]."""
    return 1.0 - abs(value - target) / max(target, 1.0 - target)


def motion(frames: np.ndarray) -> tuple[float, float]:
    """How much a video moves and how evenly.

    With first differences ``d`` and second differences ``a`` of the brightness along time, evenness is
    ``1 - sum|a_t| / sum(|d_t| + |d_(t-1)|)``. It is in [0, 1] (triangle inequality), 1 for a brightness that changes
    linearly and 0 for a flicker between two images; a video without motion has evenness 1.

    Args:
        frames: uint8 ``[T, H, W, 3]``, T >= 3.

    Returns:
        Mean absolute difference of neighbouring frames in [0, 1]; evenness.
    """
    first = np.diff(luma(frames), axis=0)
    bound = (np.abs(first[1:]) + np.abs(first[:-1])).sum()
    evenness = 1.0 - np.abs(np.diff(first, axis=0)).sum() / bound if bound > 0 else 1.0
    return float(np.abs(first).mean()), float(evenness)


def ssim(image: np.ndarray, reference: np.ndarray) -> float:
    """Structural similarity of two uint8 ``[H, W, 3]`` images of one size (H, W >= 11), in [-1, 1].

    Brightness only; Gaussian window of 11 pixels and sigma 1.5, K1 = 0.01, K2 = 0.03, mean over all whole windows
    (Wang, Bovik, Sheikh, Simoncelli 2004).
    """
    x, y = luma(image), luma(reference)
    mean_x, mean_y = _blur(x), _blur(y)
    var_x, var_y = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2
    covariance = _blur(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    similar = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return float((similar / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())


def _blur(image: np.ndarray) -> np.ndarray:
    """Gaussian mean over whole 11 x 11 windows: ``[H, W]`` -> ``[H - 10, W - 10]``."""
    taps = np.exp(-0.5 * (np.arange(-5, 6) / 1.5) ** 2)
    taps /= taps.sum()
    rows = np.lib.stride_tricks.sliding_window_view(image, 11, axis=0) @ taps
    return np.lib.stride_tricks.sliding_window_view(rows, 11, axis=1) @ taps
