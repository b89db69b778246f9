"""The size of an image as JPEG, as a reward: runs anywhere, can be optimised in minutes on a CPU, is easily hacked."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from cosmos_rl_reward.handler import BaseRewardHandler, RewardRegistry
from cosmos_rl_reward.rewards.samples import as_frames


def jpeg_kilobytes(image: np.ndarray, quality: int = 95) -> float:
    """Size of a uint8 ``[H, W, 3]`` image as JPEG, in units of 1000 bytes."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, format="JPEG", quality=quality)
    return buffer.tell() / 1000


@RewardRegistry.register()
class JpegIncompressibility(BaseRewardHandler):
    """Size of the image as JPEG, quality 95, in kB: high for fine texture and noise; of a video the mean."""

    reward_name = "jpeg_incompressibility"
    array_type = "numpy"
    max_batch = 4
    score_keys = ("jpeg_incompressibility",)

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        sizes = [float(np.mean([jpeg_kilobytes(frame) for frame in sample])) for sample in as_frames(images)]
        return {"scores": {self.reward_name: [self._score(size) for size in sizes]}}

    def _score(self, kilobytes: float) -> float:
        return kilobytes


@RewardRegistry.register()
class JpegCompressibility(JpegIncompressibility):
    """Minus the size as JPEG, quality 95, in units of 500 kB: 0 is the (unreachable) best."""

    reward_name = "jpeg_compressibility"
    score_keys = ("jpeg_compressibility",)

    def _score(self, kilobytes: float) -> float:
        return -kilobytes / 500
