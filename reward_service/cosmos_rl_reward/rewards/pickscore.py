"""PickScore: human preference for an image given its prompt (Kirstain et al. 2023)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from cosmos_rl_reward.handler import RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards import clip
from cosmos_rl_reward.rewards.weights import MODEL_FILES, TOKENIZER_FILES, find_folder, require_packages, torch_dtype

_MODEL = "yuvalkirstain/PickScore_v1"
_TOKENIZER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


@RewardRegistry.register()
class PickScore(clip.ClipReward):
    """``exp(logit_scale) * <image, text> / 26`` of CLIP features of norm 1; usually 0.6 to 0.95.

    ``model_path`` is a folder with a transformers CLIP model, or its name on the hub.

    Options:
        tokenizer: folder or hub name; empty = the model's folder when it has one, else that of CLIP ViT-H-14.
    """

    reward_name = "pickscore"
    preprocessing = "crop-224-bicubic"
    score_keys = ("pickscore",)
    OPTIONS: ClassVar[dict[str, Any]] = {"tokenizer": ""}

    def fetch(self, offline: bool) -> str | None:
        require_packages("transformers")
        self._folder = find_folder(self.model_path or _MODEL, MODEL_FILES, offline=offline)
        tokenizer = self.options["tokenizer"]
        if not tokenizer and not any((self._folder / name).exists() for name in ("tokenizer.json", "vocab.json")):
            tokenizer = _TOKENIZER
        self._tokenizer_folder = find_folder(tokenizer, TOKENIZER_FILES, offline=offline) if tokenizer else self._folder
        return f"pickscore: {self._folder}"

    def set_up(self) -> None:
        """Load model and tokenizer."""
        self.fetch(offline=True)  # a start never downloads
        from transformers import AutoTokenizer, CLIPModel

        model: Any = CLIPModel.from_pretrained(str(self._folder), dtype=torch_dtype(self.dtype, self.device))
        self._model = model.to(self.device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(str(self._tokenizer_folder))
        self.model_digest = digest(sorted(self._folder.glob("*.safetensors")))

    def _pixels(self, images: np.ndarray, size: int) -> np.ndarray:
        return clip.resize_and_crop(images, size)

    def _score(self, cosine: Any) -> Any:
        return self._model.logit_scale.float().exp() * cosine / 26
