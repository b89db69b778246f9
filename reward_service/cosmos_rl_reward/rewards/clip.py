"""What the CLIP-like rewards share: pixels for a 224 x 224 encoder, and features of images and texts."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from cosmos_rl_reward.handler import BaseRewardHandler
from cosmos_rl_reward.rewards.samples import as_images, get_per_sample

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


def resize_and_crop(images: np.ndarray, size: int, *, nearest_offset: bool = False) -> np.ndarray:
    """Shorter side to ``size`` (bicubic), centre crop.

    Args:
        images: uint8 ``[B, H, W, 3]``.
        size: of the square result.
        nearest_offset: round an odd crop offset (torchvision) instead of cutting it down (transformers).

    Returns:
        uint8 ``[B, size, size, 3]``.
    """
    height, width = images.shape[1:3]
    short = min(height, width)
    target = (size * height // short, size * width // short)
    offset = [(round((n - size) / 2) if nearest_offset else (n - size) // 2) for n in target]
    rows, columns = (slice(n, n + size) for n in offset)
    return np.stack([_resize(image, *target)[rows, columns] for image in images])


def resize_and_pad(images: np.ndarray, size: int) -> np.ndarray:
    """Longer side to ``size`` (bicubic), black borders on both ends of the shorter: uint8 ``[B, size, size, 3]``."""
    height, width = images.shape[1:3]
    scale = size / max(height, width)
    target = (max(1, round(height * scale)), max(1, round(width * scale)))
    top, left = (size - target[0]) // 2, (size - target[1]) // 2
    canvas = np.zeros((len(images), size, size, 3), np.uint8)
    for index, image in enumerate(images):
        canvas[index, top : top + target[0], left : left + target[1]] = _resize(image, *target)
    return canvas


def normalize(images: np.ndarray) -> np.ndarray:
    """uint8 ``[B, H, W, 3]`` -> float32 ``[B, 3, H, W]`` with CLIP's mean and standard deviation."""
    return np.ascontiguousarray(((images.astype(np.float32) / 255 - MEAN) / STD).transpose(0, 3, 1, 2))


def _resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    if image.shape[:2] == (height, width):
        return image
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def encode_images(model: Any, pixels: np.ndarray) -> Any:
    """Features of a transformers CLIP model, each of norm 1: float32 ``[B, D]``."""
    import torch

    inputs = torch.from_numpy(pixels).to(model.device, model.dtype)
    return _unit(model.get_image_features(pixel_values=inputs))


def encode_texts(model: Any, tokenizer: Any, texts: list[str]) -> Any:
    """Features of texts (at most the tokenizer's 77 tokens), each of norm 1: float32 ``[B, D]``."""
    length = min(77, model.config.text_config.max_position_embeddings)
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt").to(model.device)
    return _unit(model.get_text_features(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]))


def _unit(features: Any) -> Any:
    features = getattr(features, "pooler_output", features)  # an output object since transformers 5, before a tensor
    features = features.float()
    return features / features.norm(dim=-1, keepdim=True).clamp_min(1e-12)


class ClipReward(BaseRewardHandler):
    """A score from the cosine of an image and its prompt. ``set_up`` has to set ``_model`` and ``_tokenizer``."""

    media_types = ("image",)
    mergeable = True
    _model: Any
    _tokenizer: Any

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        import torch

        batch = as_images(images)
        prompts = get_per_sample(metadata, "prompts", len(batch))
        size = self._model.config.vision_config.image_size
        with torch.inference_mode():
            image = encode_images(self._model, normalize(self._pixels(batch, size)))
            text = encode_texts(self._model, self._tokenizer, prompts)
            scores = self._score((image * text).sum(-1))
        return {"scores": {self.reward_name: scores.tolist()}}

    def _pixels(self, images: np.ndarray, size: int) -> np.ndarray:
        """uint8 ``[B, H, W, 3]`` -> uint8 ``[B, size, size, 3]``."""
        raise NotImplementedError

    def _score(self, cosine: Any) -> Any:
        return cosine
