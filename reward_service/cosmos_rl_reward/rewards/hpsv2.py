"""HPS v2.1: human preference for an image given its prompt, on CLIP ViT-H-14 (Wu et al. 2023)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cosmos_rl_reward.handler import RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards import clip
from cosmos_rl_reward.rewards.weights import (
    TOKENIZER_FILES,
    find_folder,
    find_or_download,
    load_model,
    load_state,
    rename,
    require_packages,
    torch_dtype,
)

_REPOSITORY, _FILE = "xswu/HPSv2", "HPS_v2.1_compressed.pt"
_TOKENIZER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

# open_clip's names -> transformers' names, in this order
_NAMES = (
    (r"^visual\.(?!proj$)", "vision_model."),
    (r"^(?=transformer|token_embedding|positional_embedding|ln_final)", "text_model."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^text_projection$", "text_projection.weight"),
    (r"\.transformer\.resblocks\.", ".encoder.layers."),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.attn\.", ".self_attn."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.(class_embedding|token_embedding\.weight)$", r".embeddings.\1"),
    (r"\.positional_embedding$", ".embeddings.position_embedding.weight"),
    (r"\.conv1\.", ".embeddings.patch_embedding."),
    (r"\.ln_pre\.", ".pre_layrnorm."),
    (r"\.ln_post\.", ".post_layernorm."),
    (r"\.ln_final\.", ".final_layer_norm."),
)
# CLIP ViT-H-14; what is not here has transformers' defaults
_COMMON = {"num_attention_heads": 16, "hidden_act": "gelu", "projection_dim": 1024}
_CONFIG = {
    "projection_dim": 1024,
    "vision_config": {
        **_COMMON,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "patch_size": 14,
    },
    "text_config": {**_COMMON, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
}


def convert_to_transformers(state: dict[str, Any]) -> dict[str, Any]:
    """An open_clip state dict as transformers has it for the same model."""
    converted: dict[str, Any] = {}
    for name, value in rename(state, _NAMES).items():
        if name.endswith("_projection.weight"):  # used as x @ p, so a linear layer holds its transpose
            converted[name] = value.T.contiguous()
        elif ".in_proj_" in name:  # query, key and value fused
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                converted[name.replace("in_proj_", f"{part}_proj.")] = piece.contiguous()
        elif not name.endswith("attn_mask"):
            converted[name] = value
    return converted


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
    _config = _CONFIG

    def fetch(self, offline: bool) -> str | None:
        require_packages("transformers", "huggingface_hub")
        self._tokenizer_folder = find_folder(self.options["tokenizer"], TOKENIZER_FILES, offline=offline)
        path = Path(self.download_path, "hpsv2", "ckpts", _FILE)
        self._file = find_or_download(self.model_path, path, _REPOSITORY, offline=offline)
        return f"hpsv2: {self._file}"

    def set_up(self) -> None:
        """Load model and tokenizer."""
        self.fetch(offline=True)  # a start never downloads
        from transformers import AutoTokenizer, CLIPConfig, CLIPModel

        self._tokenizer = AutoTokenizer.from_pretrained(str(self._tokenizer_folder))
        state, dtype = convert_to_transformers(load_state(self._file)), torch_dtype(self.dtype, self.device)
        self._model = load_model(CLIPModel, CLIPConfig(**self._config), state, dtype, self._file).to(self.device)
        self.model_digest = digest([self._file])

    def _pixels(self, images: np.ndarray, size: int) -> np.ndarray:
        return clip.resize_and_pad(images, size)
