"""HPSv3: human preference for an image given its prompt, on Qwen2-VL (Ma et al. 2025)."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards import special_tokens
from cosmos_rl_reward.rewards.samples import as_images, get_per_sample
from cosmos_rl_reward.rewards.templates import read_constants
from cosmos_rl_reward.rewards.video_frames import FACTOR
from cosmos_rl_reward.rewards.weights import (
    TOKENIZER_FILES,
    choose_dtype,
    find_folder,
    find_or_download,
    load_state,
    require_packages,
)

_REPOSITORY, _FILE = "MizzenAI/HPSv3", "HPSv3.safetensors"
_BASE = "Qwen/Qwen2-VL-7B-Instruct"
_TOKEN = "<|Reward|>"
_PIXELS = 256 * 28 * 28
_TEXTS = ("INSTRUCTION", "prompt_with_special_token")


@RewardRegistry.register()
class HPSv3(BaseRewardHandler):
    """The mean ``mu`` of the preference the model predicts; usually -5 to 13, so widen the client's clip of 5.

    The weights are ``model_path`` (a file), else ``<download_path>/hpsv3/HPSv3.safetensors``. The question's text is
    read from the package ``hpsv3``, which need not be importable.

    Options:
        engine: ``"transformers"`` runs the model here; ``"package"`` calls the package ``hpsv3``, whose pins need an
            environment of their own.
        base_model: folder or hub name of the Qwen2-VL-7B it was trained from (configuration and processor).
        batch: images in one forward pass.
    """

    reward_name = "hpsv3"
    media_types = ("image",)
    mergeable = True
    score_keys = ("hpsv3",)
    OPTIONS: ClassVar[dict[str, Any]] = {"engine": "transformers", "base_model": _BASE, "batch": 4}

    def fetch(self, offline: bool) -> str | None:
        if self.options["engine"] not in ("transformers", "package"):
            raise NotReady(f"options.engine: {self.options['engine']!r} is not 'transformers' or 'package'")
        require_packages("transformers", "huggingface_hub", "hpsv3")
        path = Path(self.download_path, "hpsv3", _FILE)
        self._file = find_or_download(self.model_path, path, _REPOSITORY, offline=offline)
        if self.options["engine"] == "transformers":
            self._base = find_folder(self.options["base_model"], TOKENIZER_FILES, offline=offline)
        return f"hpsv3: {self._file}"

    def set_up(self) -> None:
        """Load the model, by either engine."""
        self.fetch(offline=True)  # a start never downloads
        self.model_digest = digest([self._file])
        dtype = choose_dtype(self)
        if self.options["engine"] == "package":
            self._package = _package_inferencer(self._file, self.device)
            return
        spec = find_spec("hpsv3")
        places = spec.submodule_search_locations if spec else None
        source = Path(next(iter(places or ["."])), "dataset", "data_collator_qwen.py")
        instruction, ending = read_constants(source, *_TEXTS)
        self._template = instruction + ending
        state = load_state(self._file)
        self._model = special_tokens.SpecialTokenModel(self._base, state, [_TOKEN], dtype, self.device, self._file)

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        images = as_images(images)
        prompts = get_per_sample(metadata, "prompts", len(images))
        step = max(1, int(self.options["batch"]))
        score = self._by_package if self.options["engine"] == "package" else self._by_transformers
        values: list[float] = []
        for start in range(0, len(images), step):
            values += score(images[start : start + step], prompts[start : start + step])
        return {"scores": {"hpsv3": values}}

    def _by_package(self, images: np.ndarray, prompts: list[str]) -> list[float]:
        import torch

        # by keyword: the order of the two has changed between versions
        with torch.inference_mode():
            rewards = self._package.reward(prompts=prompts, image_paths=[Image.fromarray(p) for p in images])
        return [float(row[0]) for row in rewards]

    def _by_transformers(self, images: np.ndarray, prompts: list[str]) -> list[float]:
        texts = [self._template.replace("{text_prompt}", prompt) for prompt in prompts]
        return self._model.ask(texts, "image", [resize_to_budget(p) for p in images])[:, 0, 0].tolist()


def resize_to_budget(image: np.ndarray) -> Image.Image:
    """A uint8 ``[H, W, 3]`` image with 256 * 28 * 28 pixels, as far as sides that are multiples of 28 allow."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    height, width = smart_resize(*image.shape[:2], factor=FACTOR, min_pixels=_PIXELS, max_pixels=_PIXELS)
    return Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)


def _package_inferencer(path: Path, device: str) -> Any:
    """The package's own scorer.

    Raises:
        NotReady: it cannot be imported, or takes other keywords.
    """
    try:
        from hpsv3 import HPSv3RewardInferencer  # type: ignore[attr-defined]
    except ImportError as error:
        raise NotReady(f"package hpsv3 cannot be imported: {error}") from error
    takes = inspect.signature(HPSv3RewardInferencer.reward).parameters
    missing = [name for name in ("prompts", "image_paths") if name not in takes]
    if missing:
        raise NotReady(
            f"package hpsv3: reward() takes {', '.join(list(takes)[1:])}, not {', '.join(missing)};"
            " this service knows version 1.0.0"
        )
    return HPSv3RewardInferencer(checkpoint_path=str(path), device=device)
