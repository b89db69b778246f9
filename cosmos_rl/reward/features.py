"""Features of generated samples, by a function of the user: how much the samples of a prompt differ."""

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import LocalRewardConfig
from cosmos_rl.reward.functions import find_function
from cosmos_rl.reward.local import Worker

KEY = "train.train_policy.diversity_features"
_SIDE = 8


class FeatureFunction:
    """Calls ``package.module:function`` or ``path/file.py:function`` with the media of several samples at a time."""

    def __init__(self, place: str, table: LocalRewardConfig) -> None:
        """``table``: how many samples a call has, and how long it may take.

        Raises:
            UserError: there is no such function.
        """
        self._place, self._function = place, find_function(place, KEY)
        self._size, self._timeout_s = table.batch_size, table.timeout_s
        self._worker = Worker()

    def __call__(self, media: Tensor) -> Tensor:
        """``[N, D]`` float64 of media as rewards get them.

        Raises:
            UserError: the function fails, takes too long, or gives something else than finite numbers ``[N, D]``.
        """
        parts = [self._call(media[first : first + self._size]) for first in range(0, len(media), self._size)]
        widths = {part.shape[1] for part in parts}
        if len(widths) > 1:
            raise UserError(f'{KEY} = "{self._place}": gave {sorted(widths)} features; allowed: always as many')
        return torch.cat(parts)

    def close(self) -> None:
        """End the thread."""
        self._worker.end()

    def _call(self, media: Tensor) -> Tensor:
        given, what = media.numpy().copy(), f'{KEY} = "{self._place}"'
        try:
            found = self._worker.run(lambda: np.asarray(self._function(given), dtype=np.float64), self._timeout_s, what)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{what}: {type(error).__name__}: {error}") from error
        if found.ndim != 2 or len(found) != len(given) or not np.isfinite(found).all():
            raise UserError(
                f"{what}: gave {_describe(found)} for {len(given)} samples; allowed: finite [{len(given)}, D]"
            )
        return torch.from_numpy(found)


def thumbnails(media: NDArray[Any]) -> NDArray[np.float64]:
    """``[N, D]``: colours of 8 x 8 parts of images uint8 ``[N, H, W, 3]`` or of the frames of videos, less their mean.

    No weights, and no more than composition and colour; GARDO takes an image encoder (DINOv3).
    """
    rows, columns = (np.linspace(0, size, _SIDE + 1).astype(int) for size in media.shape[-3:-1])
    cells = [
        media[..., top : max(bottom, top + 1), left : max(right, left + 1), :].mean(axis=(-3, -2))
        for top, bottom in itertools.pairwise(rows)
        for left, right in itertools.pairwise(columns)
    ]
    features = np.stack(cells, axis=1).reshape(len(media), -1)
    return features - features.mean(axis=1, keepdims=True)


def _describe(found: NDArray[np.float64]) -> str:
    if found.ndim == 2 and not np.isfinite(found).all():
        return "numbers that are not finite"
    return f"an array {list(found.shape)}"
