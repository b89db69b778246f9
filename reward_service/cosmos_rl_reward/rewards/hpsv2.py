"""HPS v2.1: human preference for an image given its prompt, on CLIP ViT-H-14 (Wu et al. 2023)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cosmos_rl_reward.handler import NotReady, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards import clip
from cosmos_rl_reward.rewards.weights import (
    TOKENIZER_FILES,
    find_folder,
    find_or_download,
    load_state,
    load_weights,
    require_packages,
    torch_dtype,
)

_REPOSITORY, _FILE = "xswu/HPSv2", "HPS_v2.1_compressed.pt"
_TOKENIZER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

# open_clip's names -> transformers' names; the fused query-key-value weights are split apart from these
_TOWERS = (("visual.", "vision_model."), ("", "text_model."))
_BLOCK = (
    (r"transformer\.resblocks\.(\d+)\.", r"encoder.layers.\1."),
    (r"\.ln_1\.", ".layer_norm1."),
    (r"\.ln_2\.", ".layer_norm2."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
_SINGLE = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "logit_scale": "logit_scale",
}


def rename_to_transformers(state: dict[str, Any]) -> dict[str, Any]:
    """An open_clip state dict under transformers' names for the same model."""
    renamed: dict[str, Any] = {}
    for name, value in state.items():
        if name in _SINGLE:
            renamed[_SINGLE[name]] = value
        elif name in ("visual.proj", "text_projection"):  # used as x @ p, so a linear layer holds its transpose
            renamed["visual_projection.weight" if "visual" in name else "text_projection.weight"] = value.T.contiguous()
        elif "resblocks" in name:
            renamed.update(_block(name, value))
        elif not name.endswith("attn_mask"):
            raise NotReady(f"HPS v2 weights: unknown entry {name}; this is another model's file")
    return renamed


def _block(name: str, value: Any) -> dict[str, Any]:
    prefix, tower = next((p, t) for p, t in _TOWERS if name.startswith(p))
    name = name[len(prefix) :]
    for pattern, replacement in _BLOCK:
        name = re.sub(pattern, replacement, name)
    fused = re.fullmatch(r"(.*)\.attn\.in_proj_(weight|bias)", name)
    if not fused:
        return {tower + name: value}
    parts = zip("qkv", value.chunk(3), strict=True)
    return {f"{tower}{fused[1]}.self_attn.{part}_proj.{fused[2]}": piece.contiguous() for part, piece in parts}


def clip_from_open_clip(state: dict[str, Any], heads: tuple[int, int], eos_token_id: int, source: Path) -> Any:
    """A transformers CLIP model with an open_clip checkpoint's weights; sizes are read off the weights.

    Args:
        state: open_clip's state dict.
        heads: attention heads of the image and the text tower (not part of the weights).
        eos_token_id: the token whose position gives a text's feature.
        source: named in errors.
    """
    import torch
    from transformers import CLIPConfig, CLIPModel

    patches, image_width = state["visual.positional_embedding"].shape
    patch = state["visual.conv1.weight"].shape[-1]
    vocabulary, text_width = state["token_embedding.weight"].shape
    blocks = {
        name.rpartition("resblocks.")[0] + name.split("resblocks.")[1].split(".")[0]
        for name in state
        if "resblocks" in name
    }
    image_layers = sum(name.startswith("visual.") for name in blocks)
    common = {"hidden_act": "gelu", "projection_dim": state["text_projection"].shape[1]}
    config = CLIPConfig(
        projection_dim=common["projection_dim"],
        vision_config={
            **common,
            "hidden_size": image_width,
            "intermediate_size": state["visual.transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
            "num_hidden_layers": image_layers,
            "num_attention_heads": heads[0],
            "patch_size": patch,
            "image_size": round((patches - 1) ** 0.5) * patch,
        },
        text_config={
            **common,
            "hidden_size": text_width,
            "intermediate_size": state["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
            "num_hidden_layers": len(blocks) - image_layers,
            "num_attention_heads": heads[1],
            "vocab_size": vocabulary,
            "max_position_embeddings": state["positional_embedding"].shape[0],
            "eos_token_id": eos_token_id,
            "bos_token_id": None,
            "pad_token_id": None,
        },
    )
    with torch.device("meta"):
        model = CLIPModel(config)
    for tower in (model.vision_model, model.text_model):  # not part of a state dict, so they would stay on "meta"
        count = tower.embeddings.position_embedding.num_embeddings
        tower.embeddings.register_buffer("position_ids", torch.arange(count)[None], persistent=False)
    return load_weights(model, rename_to_transformers(state), source)


@RewardRegistry.register()
class HPSv2(clip.ClipReward):
    """Cosine of image and text features; usually 0.05 to 0.40.

    The weights are ``model_path`` (a file), else ``<download_path>/hpsv2/ckpts/HPS_v2.1_compressed.pt``.

    Options:
        tokenizer: folder or hub name of CLIP ViT-H-14's tokenizer.
    """

    reward_name = "hpsv2"
    preprocessing = "pad-224-bicubic"
    score_keys = ("hpsv2",)
    OPTIONS: ClassVar[dict[str, Any]] = {"tokenizer": _TOKENIZER}
    _heads = (16, 16)

    def fetch(self, offline: bool) -> str | None:
        require_packages("transformers", "huggingface_hub")
        self._tokenizer_folder = find_folder(self.options["tokenizer"], TOKENIZER_FILES, offline=offline)
        path = Path(self.download_path, "hpsv2", "ckpts", _FILE)
        self._file = find_or_download(self.model_path, path, _REPOSITORY, offline=offline)
        return f"hpsv2: {self._file}"

    def set_up(self) -> None:
        """Load model and tokenizer."""
        self.fetch(offline=True)  # a start never downloads
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(self._tokenizer_folder))
        model = clip_from_open_clip(load_state(self._file), self._heads, self._tokenizer.eos_token_id, self._file)
        self._model = model.to(self.device, torch_dtype(self.dtype, self.device))
        self.model_digest = digest([self._file])

    def _pixels(self, images: np.ndarray, size: int) -> np.ndarray:
        return clip.resize_and_pad(images, size)
