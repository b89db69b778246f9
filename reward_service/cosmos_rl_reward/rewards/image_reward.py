"""ImageReward: human preference for an image given its prompt, on BLIP (Xu et al. 2023)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards import clip
from cosmos_rl_reward.rewards.samples import as_images, get_per_sample
from cosmos_rl_reward.rewards.weights import (
    TOKENIZER_FILES,
    build_head,
    find_file,
    find_folder,
    load_model,
    load_state,
    rename,
    require_packages,
    select_prefix,
    torch_dtype,
)

_MODEL, _OLD_NAME, _FILES = "THUDM/ImageReward", "ImageReward-v1.0", ("ImageReward.safetensors", "ImageReward.pt")
_TOKENIZER = "bert-base-uncased"
_MEAN, _STD = 0.16717362830052426, 1.0333394966054072  # of the training set's raw scores
_TOKENS = 35

# BLIP's own names -> transformers' names, and the part of the model
_NAMES = (
    (r"^blip\.visual_encoder\.", "vision."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^mlp\.layers\.", "head."),
    (r"^vision\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^vision\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^vision\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^vision\.norm\.", "vision.post_layernorm."),
    (r"^vision\.blocks\.(\d+)\.", r"vision.encoder.layers.\1."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
)
_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "image_size": 224,
    "layer_norm_eps": 1e-6,
}
_TEXT = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers"),
    "num_attention_heads",
)


def build(state: dict[str, Any], vision: dict[str, Any], text: dict[str, Any], dtype: Any, source: Path) -> list[Any]:
    """Image tower, text tower and head with an ImageReward checkpoint's weights; the head is in float32.

    Args:
        state: the checkpoint's state dict.
        vision: configuration of the image tower.
        text: configuration of the text tower, as in ``med_config.json``.
        dtype: of the towers.
        source: named in errors.
    """
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    state = {name: value for name, value in rename(state, _NAMES).items() if not name.endswith("position_ids")}
    parts = [select_prefix(state, f"{part}.") for part in ("vision", "text", "head")]
    if not all(parts):
        raise NotReady(f"weights {source}: no ImageReward checkpoint (blip.visual_encoder, blip.text_encoder, mlp)")
    text_config = BlipTextConfig(
        **{name: text[name] for name in _TEXT},
        encoder_hidden_size=vision["hidden_size"],
        is_decoder=True,  # gives the layers their cross-attention; scoring runs without the causal mask
    )
    return [
        load_model(BlipVisionModel, BlipVisionConfig(**vision), parts[0], dtype, source),
        load_model(BlipTextModel, text_config, parts[1], dtype, source, add_pooling_layer=False),
        build_head(parts[2], source),  # between its layers was dropout
    ]


@RewardRegistry.register()
class ImageReward(BaseRewardHandler):
    """Standardised preference score; usually -2.3 to 2.

    ``model_path`` is a folder with ``ImageReward.pt`` (or ``.safetensors``) and ``med_config.json``, or its name on the
    hub. Image and prompt are scored as a pair, so the cost is linear in B.

    Options:
        tokenizer: folder or hub name of the uncased BERT tokenizer.
    """

    reward_name = "image_reward"
    preprocessing = "crop-224-bicubic"
    media_types = ("image",)
    mergeable = True
    score_keys = ("image_reward",)
    OPTIONS: ClassVar[dict[str, Any]] = {"tokenizer": _TOKENIZER}
    _vision_config = _VISION

    def fetch(self, offline: bool) -> str | None:
        require_packages("transformers")
        name = _MODEL if self.model_path in ("", _OLD_NAME) else self.model_path
        self._folder = find_folder(name, (*_FILES, "med_config.json"), offline=offline)
        self._tokenizer_folder = find_folder(self.options["tokenizer"], TOKENIZER_FILES, offline=offline)
        return f"image_reward: {find_file(self._folder, _FILES)}"

    def set_up(self) -> None:
        """Load towers, head and tokenizer."""
        self.fetch(offline=True)  # a start never downloads
        from transformers import AutoTokenizer

        path = find_file(self._folder, _FILES)
        text = json.loads(find_file(self._folder, ["med_config.json"]).read_text(encoding="utf-8"))
        dtype = torch_dtype(self.dtype, self.device)
        parts = build(load_state(path), self._vision_config, text, dtype, path)
        self._vision, self._text, self._head = (part.to(self.device) for part in parts)
        self._tokenizer = AutoTokenizer.from_pretrained(str(self._tokenizer_folder))
        self.model_digest = digest([path])

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        import torch

        images = as_images(images)
        prompts = get_per_sample(metadata, "prompts", len(images))
        size = self._vision.config.image_size
        pixels = torch.from_numpy(clip.normalize(clip.resize_and_crop(images, size, nearest_offset=True)))
        words = self._tokenizer(
            prompts, padding="max_length", truncation=True, max_length=_TOKENS, return_tensors="pt"
        ).to(self.device)
        with torch.inference_mode():
            image_states = self._vision(pixel_values=pixels.to(self.device, self._vision.dtype)).last_hidden_state
            read = self._text(
                input_ids=words["input_ids"],
                attention_mask=words["attention_mask"],
                encoder_hidden_states=image_states,
                encoder_attention_mask=image_states.new_ones(image_states.shape[:-1], dtype=torch.long),
                is_decoder=False,
            )
            raw = self._head(read.last_hidden_state[:, 0].float())[:, 0]
        return {"scores": {"image_reward": ((raw - _MEAN) / _STD).tolist()}}
