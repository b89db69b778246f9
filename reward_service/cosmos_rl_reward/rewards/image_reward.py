"""ImageReward: human preference for an image given its prompt, on BLIP (Xu et al. 2023)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards import clip
from cosmos_rl_reward.rewards.samples import as_images, get_per_sample
from cosmos_rl_reward.rewards.weights import (
    TOKENIZER_FILES,
    find_file,
    find_folder,
    load_state,
    load_weights,
    require_packages,
    torch_dtype,
)

_MODEL, _OLD_NAME, _FILES = "THUDM/ImageReward", "ImageReward-v1.0", ("ImageReward.safetensors", "ImageReward.pt")
_TOKENIZER = "bert-base-uncased"
_MEAN, _STD = 0.16717362830052426, 1.0333394966054072  # of the training set's raw scores
_TOKENS = 35

# BLIP's own names of the image tower -> transformers' names
_VISION = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.(\d+)\.norm([12])\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.self_attn.qkv."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^blocks\.(\d+)\.mlp\.", r"encoder.layers.\1.mlp."),
)


def split_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """An ImageReward state dict as three: image tower and text tower under transformers' names, and the head."""
    vision, text, head = {}, {}, {}
    for name, value in state.items():
        if name.startswith("blip.visual_encoder."):
            name = name[len("blip.visual_encoder.") :]
            for pattern, replacement in _VISION:
                name = re.sub(pattern, replacement, name)
            vision[name] = value
        elif name.startswith("blip.text_encoder.") and not name.endswith("position_ids"):
            text[name[len("blip.text_encoder.") :]] = value
        elif name.startswith("mlp.layers."):
            head[name[len("mlp.layers.") :]] = value
    return vision, text, head


def build(state: dict[str, Any], heads: tuple[int, int], source: Path) -> tuple[Any, Any, Any]:
    """Image tower, text tower and head with an ImageReward checkpoint's weights; sizes are read off the weights.

    Args:
        state: the checkpoint's state dict.
        heads: attention heads of the image and the text tower.
        source: named in errors.
    """
    import torch
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    vision_state, text_state, head_state = split_state(state)
    if not vision_state or not text_state or not head_state:
        raise NotReady(f"weights {source}: no ImageReward checkpoint (blip.visual_encoder, blip.text_encoder, mlp)")
    patches, width = vision_state["embeddings.position_embedding"].shape[1:]
    patch = vision_state["embeddings.patch_embedding.weight"].shape[-1]
    vision_config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=vision_state["encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_layers(vision_state, r"encoder\.layers\.(\d+)\."),
        num_attention_heads=heads[0],
        patch_size=patch,
        image_size=round((patches - 1) ** 0.5) * patch,
        layer_norm_eps=1e-6,
    )
    words = text_state["embeddings.word_embeddings.weight"]
    text_config = BlipTextConfig(
        vocab_size=words.shape[0],
        hidden_size=words.shape[1],
        encoder_hidden_size=width,
        intermediate_size=text_state["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_layers(text_state, r"encoder\.layer\.(\d+)\."),
        num_attention_heads=heads[1],
        max_position_embeddings=text_state["embeddings.position_embeddings.weight"].shape[0],
        is_decoder=True,  # gives the layers their cross-attention; scoring runs without the causal mask
    )
    with torch.device("meta"):
        vision, text = BlipVisionModel(vision_config), BlipTextModel(text_config, add_pooling_layer=False)
        linears = [n for n in range(8) if f"{n}.weight" in head_state]
        head = torch.nn.Sequential(
            *[
                torch.nn.Linear(*reversed(head_state[f"{n}.weight"].shape)) if n in linears else torch.nn.Identity()
                for n in range(max(linears) + 1)  # what is not a linear layer was dropout
            ]
        )
    positions = torch.arange(text_config.max_position_embeddings)[None]
    text.embeddings.register_buffer("position_ids", positions, persistent=False)
    return (
        load_weights(vision, vision_state, source),
        load_weights(text, text_state, source),
        load_weights(head, head_state, source),
    )


def _layers(state: dict[str, Any], pattern: str) -> int:
    return 1 + max(int(found[1]) for name in state if (found := re.match(pattern, name)))


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
    _image_heads = 16

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
        text_heads = json.loads(find_file(self._folder, ["med_config.json"]).read_text(encoding="utf-8"))[
            "num_attention_heads"
        ]
        vision, text, head = build(load_state(path), (self._image_heads, text_heads), path)
        dtype = torch_dtype(self.dtype, self.device)
        self._vision, self._text = vision.to(self.device, dtype), text.to(self.device, dtype)
        self._head = head.to(self.device).float()
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
