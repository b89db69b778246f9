"""Rewards without a model: they run anywhere, can be optimised in minutes on a CPU, and show reward hacking plainly."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.rewards.samples import SampleError, as_frames, as_images, as_videos, get_per_sample, score_samples
from reward_examples import measures

_FORMATS = ("PNG", "JPEG", "WEBP")


class _Measured(BaseRewardHandler):
    """Runs on numpy and needs no prompt. Scores sample by sample: merged requests would only wait for each other."""

    array_type = "numpy"
    mergeable = False
    max_batch = 4


@RewardRegistry.register()
class Sharpness(_Measured):
    """``v / (v + half)`` with the variance v of the Laplacian: 0 flat, 0.5 at ``half``, towards 1 for fine texture."""

    reward_name = "sharpness"
    score_keys = ("sharpness", "laplacian_variance")
    OPTIONS: ClassVar[dict[str, Any]] = {"half": 500.0}

    def set_up(self) -> None:
        """Check the option."""
        _check_number(self, "half", above=0.0, most=float("inf"))

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        frames = as_frames(images)
        half = float(self.options["half"])

        def score(index: int) -> dict[str, float]:
            if min(frames.shape[2:4]) < 3:
                raise SampleError(f"{frames.shape[2]} x {frames.shape[3]} pixels; sharpness needs at least 3 x 3")
            variance = float(np.mean([measures.laplacian_variance(frame) for frame in frames[index]]))
            return {"sharpness": variance / (variance + half), "laplacian_variance": variance}

        return score_samples(self.score_keys, len(frames), score)


@RewardRegistry.register()
class BrightnessTarget(_Measured):
    """How close the mean brightness is to ``target``: 1 there, 0 at the far end of [0, 1]."""

    reward_name = "brightness_target"
    score_keys = ("brightness_target", "brightness")
    OPTIONS: ClassVar[dict[str, Any]] = {"target": 0.7}

    def set_up(self) -> None:
        """Check the option."""
        _check_number(self, "target", above=-1e-9, most=1.0)

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        values = [float(measures.luma(sample).mean()) for sample in as_frames(images)]
        close = [measures.closeness(value, float(self.options["target"])) for value in values]
        return {"scores": {"brightness_target": close, "brightness": values}}

    def probes(self) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """A black and a white image; where they rightly tie (target 0.5), a grey one instead of the white."""
        light = 255 if self.options["target"] != 0.5 else 127
        return [(np.full((1, 16, 16, 3), value, np.uint8), {"prompts": [""]}) for value in (0, light)]


@RewardRegistry.register()
class MotionSmoothness(_Measured):
    """Evenness of a video's motion, in [0, 1].

    A video that moves less than ``min_motion`` is marked down in proportion, so a frozen video scores 0, not 1.
    """

    reward_name = "motion_smoothness"
    media_types = ("video",)
    max_batch = 16
    score_keys = ("motion_smoothness", "motion", "evenness")
    OPTIONS: ClassVar[dict[str, Any]] = {"min_motion": 0.002}

    def set_up(self) -> None:
        """Check the option."""
        _check_number(self, "min_motion", above=0.0, most=1.0)

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        videos = as_videos(images)

        def score(index: int) -> dict[str, float]:
            if videos.shape[2] < 3:
                raise SampleError(f"{videos.shape[2]} frames; motion_smoothness needs at least 3")
            moved, even = measures.motion(videos[index].transpose(1, 2, 3, 0))
            enough = min(1.0, moved / float(self.options["min_motion"]))
            return {"motion_smoothness": even * enough, "motion": moved, "evenness": even}

        return score_samples(self.score_keys, len(videos), score)

    def probes(self) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """A fade and a flicker between the same two levels."""
        levels = np.linspace(40, 200, 8), np.where(np.arange(8) % 2, 200.0, 40.0)
        videos = [np.broadcast_to(v[None, None, :, None, None], (1, 3, 8, 16, 16)) for v in levels]
        return [(np.rint(v).astype(np.uint8), {"prompts": [""]}) for v in videos]


@RewardRegistry.register()
class SsimToReference(_Measured):
    """Structural similarity to a reference image of the same size.

    ``metadata.references`` names one for each sample: a file in the option ``reference_dir``, or the image itself as
    ``data:image/png;base64,...``. PNG, JPEG and WebP are read.
    """

    reward_name = "ssim_to_reference"
    media_types = ("image",)
    required_metadata = ("references",)
    score_keys = ("ssim_to_reference",)
    OPTIONS: ClassVar[dict[str, Any]] = {"reference_dir": ""}

    def set_up(self) -> None:
        """Check the folder."""
        folder = self.options["reference_dir"]
        if folder and not Path(folder).is_dir():
            raise NotReady(f"reward_args.options.reference_dir: {folder} is not a folder")

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        images = as_images(images)
        references = get_per_sample(metadata, "references", len(images))

        def score(index: int) -> dict[str, float]:
            image = images[index]
            reference = self._reference(references[index], image)
            if min(image.shape[:2]) < 11:
                raise SampleError(f"{_size(image)} pixels; SSIM needs at least 11 x 11")
            return {"ssim_to_reference": measures.ssim(image, reference)}

        return score_samples(self.score_keys, len(images), score)

    def _reference(self, name: Any, image: np.ndarray) -> np.ndarray:
        """uint8 ``[H, W, 3]`` of a data URI, or of a file that lies in ``reference_dir``; as large as ``image``."""
        if not isinstance(name, str):
            raise SampleError("metadata.references: expected a file name or a data URI")
        try:
            if name.startswith("data:"):
                source: Any = io.BytesIO(base64.b64decode(name.partition(",")[2], validate=True))
            else:
                folder = self.options["reference_dir"] and Path(self.options["reference_dir"]).resolve()
                source = Path(folder, name).resolve()
                if not folder or not source.is_relative_to(folder):
                    raise SampleError(f"metadata.references: {name!r} is not in the service's reference_dir")
            return _decoded(source, image)
        except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError) as error:
            raise SampleError(f"metadata.references: cannot read {name[:60]!r} ({type(error).__name__})") from error

    def probes(self) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """A gradient against itself and a flat image against the gradient."""
        (flat, metadata), (gradient, _) = super().probes()
        buffer = io.BytesIO()
        Image.fromarray(gradient[0]).save(buffer, format="PNG")
        uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        return [(image, {**metadata, "references": [uri]}) for image in (flat, gradient)]


def _decoded(source: Any, scored: np.ndarray) -> np.ndarray:
    """Decode a reference, after a look at its size: a small file can hold any number of pixels."""
    with Image.open(source, formats=_FORMATS) as image:
        if (image.height, image.width) != scored.shape[:2]:
            raise SampleError(f"image {_size(scored)} and reference {image.height} x {image.width} differ in size")
        return np.asarray(image.convert("RGB"))


def _size(image: np.ndarray) -> str:
    return f"{image.shape[0]} x {image.shape[1]}"


def _check_number(handler: BaseRewardHandler, option: str, *, above: float, most: float) -> None:
    value = handler.options[option]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= most:
        raise NotReady(f"reward_args.options.{option}: {value!r} is not a number in ({max(above, 0):g}, {most:g}]")
