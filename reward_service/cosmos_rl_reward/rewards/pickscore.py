"""PickScore: human preference for an image given its prompt (Kirstain et al. 2023)."""

from __future__ import annotations

from typing import Any, ClassVar

from cosmos_rl_reward.handler import BaseRewardHandler, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards import clip
from cosmos_rl_reward.rewards.pictures import as_images, prompts_of
from cosmos_rl_reward.rewards.weights import MODEL_FILES, TOKENIZER_FILES, folder_of, need, torch_dtype

_MODEL = "yuvalkirstain/PickScore_v1"
_TOKENIZER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


@RewardRegistry.register()
class PickScore(BaseRewardHandler):
    """``exp(logit_scale) * <image, text> / 26`` of CLIP features of norm 1; usually 0.6 to 0.95.

    ``model_path`` is a folder with a transformers CLIP model, or its name on the hub.

    Options:
        tokenizer: folder or hub name; empty = the model's folder when it has one, else that of CLIP ViT-H-14.
    """

    reward_name = "pickscore"
    media_types = ("image",)
    mergeable = True
    score_keys = ("pickscore",)
    OPTIONS: ClassVar[dict[str, Any]] = {"tokenizer": ""}

    def fetch(self, offline: bool) -> str | None:
        """See ``BaseRewardHandler.fetch``."""
        need("transformers")
        self._folder = folder_of(self.model_path or _MODEL, MODEL_FILES, offline=offline)
        tokenizer = self.options["tokenizer"]
        if not tokenizer and not any((self._folder / name).exists() for name in ("tokenizer.json", "vocab.json")):
            tokenizer = _TOKENIZER
        self._tokenizer_folder = folder_of(tokenizer, TOKENIZER_FILES, offline=offline) if tokenizer else self._folder
        return f"pickscore: {self._folder}"

    def set_up(self) -> None:
        """Load model and tokenizer."""
        self.fetch(offline=True)  # a start never downloads
        from transformers import AutoTokenizer, CLIPModel

        model: Any = CLIPModel.from_pretrained(str(self._folder), dtype=torch_dtype(self.dtype, self.device))
        self._model = model.to(self.device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(str(self._tokenizer_folder))
        self._digest = digest(sorted(self._folder.glob("*.safetensors")))

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        """See ``BaseRewardHandler.calculate_reward``."""
        import torch

        pictures = as_images(images)
        prompts = prompts_of(metadata, len(pictures))
        size = self._model.config.vision_config.image_size
        with torch.inference_mode():
            image = clip.image_features(self._model, clip.normalised(clip.cropped(pictures, size)))
            text = clip.text_features(self._model, self._tokenizer, prompts)
            scores = self._model.logit_scale.float().exp() * (image * text).sum(-1) / 26
        return {"scores": {"pickscore": scores.tolist()}}

    def provenance(self) -> dict[str, Any]:
        """Adds the weights' digest."""
        return {**super().provenance(), "model_digest": self._digest, "preprocessing": "crop-224-bicubic"}
