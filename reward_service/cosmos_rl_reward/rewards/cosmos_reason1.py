"""Cosmos-Reason1 as a critic: does a video show physical anomalies?"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards import video_frames
from cosmos_rl_reward.rewards.pictures import SampleError, as_videos, frame_rates, prompts_of, score_samples
from cosmos_rl_reward.rewards.weights import MODEL_FILES, bfloat16_or_wider, folder_of, need

_MODEL = "nvidia/Cosmos-Reason1-7B-Reward"
_SYSTEM = Path(__file__).parent / "cosmos_reason1.txt"
_QUESTION = "Are there physical anomalies or artifacts in this video?"
_MIN_PIXELS = 16 * 28 * 28 * 2
_ALL_PIXELS = 9216 * 28 * 28 * 2  # of all frames together


@RewardRegistry.register()
class CosmosReason1(BaseRewardHandler):
    """Asks whether the video has anomalies and compares the logits of Yes and No as the next token.

    * ``no_score``: ``softmax([yes, no])[no]``, 0 to 1, high is good.
    * ``prediction``: ``Good``, or ``Bad`` when Yes is likelier.
    * ``yes_logit``, ``no_logit``: usually 10 to 30.

    ``model_path`` is a folder with a Qwen2.5-VL model, or its name on the hub.

    Options:
        system_prompt: text file; empty = the one that comes along, which is not the wording of the model's training.
        question: asked about every video.
        ask_prompts: ask ``prompts`` instead of ``question``: what a client sends there must then be a question.
    """

    reward_name = "cosmos_reason1"
    NEEDS_LATENT_DECODER = True
    media_types = ("video",)
    required_metadata = ("video_infos",)
    score_keys = ("prediction", "no_score", "yes_logit", "no_logit")
    OPTIONS: ClassVar[dict[str, Any]] = {"system_prompt": "", "question": _QUESTION, "ask_prompts": False}

    def fetch(self, offline: bool) -> str | None:
        """See ``BaseRewardHandler.fetch``."""
        need("transformers", "torchvision")
        self._folder = folder_of(self.model_path or _MODEL, MODEL_FILES, offline=offline)
        return f"cosmos_reason1: {self._folder}"

    def set_up(self) -> None:
        """Load model and processor."""
        path = Path(self.options["system_prompt"] or _SYSTEM)
        if not path.is_file():
            raise NotReady(f"reward_args.options.system_prompt: no file {path}")
        self._system = path.read_text().strip()
        self.fetch(offline=False)
        from transformers import AutoModelForImageTextToText, AutoProcessor

        model: Any = AutoModelForImageTextToText.from_pretrained(str(self._folder), dtype=bfloat16_or_wider(self.dtype))
        self._model = model.to(self.device).eval()
        self._processor: Any = AutoProcessor.from_pretrained(str(self._folder))
        encode = self._processor.tokenizer.encode
        self._yes, self._no = (encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))
        self._digest, self._system_digest = digest(sorted(self._folder.glob("*.safetensors"))), digest([path])

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        """See ``BaseRewardHandler.calculate_reward``."""
        videos = as_videos(images)
        count = len(videos)
        questions = prompts_of(metadata, count) if self.options["ask_prompts"] else [self.options["question"]] * count
        rates = frame_rates(metadata, count)

        def score(index: int) -> dict[str, Any]:
            fps = rates[index]
            if fps is None:
                raise SampleError(f"metadata.video_infos[{index}].video_fps is missing")
            yes, no = self._logits(videos[index], questions[index], fps)
            # the logistic function of the difference is the softmax over two
            share = float(1 / (1 + np.exp(np.clip(yes - no, -700, 700))))
            verdict = "Bad" if yes > no else "Good"
            return {"prediction": verdict, "no_score": share, "yes_logit": yes, "no_logit": no}

        return score_samples(self.score_keys, count, score)

    def _logits(self, video: np.ndarray, question: str, video_fps: float) -> tuple[float, float]:
        """Next-token logits of Yes and No after the question about one video, uint8 ``[3, T, H, W]``."""
        import torch

        indices, fps = video_frames.every_nth(video.shape[1], video_fps)
        most = _ALL_PIXELS // len(indices)
        frames = video_frames.resized(video[:, indices].transpose(1, 0, 2, 3), _MIN_PIXELS, most)
        messages = [
            {"role": "system", "content": [{"type": "text", "text": self._system}]},
            {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]},
        ]
        text = self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = self._processor(
            text=[text],
            videos=[frames],
            video_metadata=[{"total_num_frames": len(indices), "fps": fps}],
            do_resize=False,
            do_sample_frames=False,
            return_tensors="pt",
        ).to(self._model.device)
        inputs["pixel_values_videos"] = inputs["pixel_values_videos"].to(self._model.dtype)
        with torch.inference_mode():
            logits = self._model(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        return float(logits[self._yes]), float(logits[self._no])

    def provenance(self) -> dict[str, Any]:
        """Adds digests of the weights and of the system prompt."""
        about = {
            "model_digest": self._digest,
            "system_prompt_digest": self._system_digest,
            "dtype": "float32" if self.dtype == "float32" else "bfloat16",
        }
        return {**super().provenance(), **about}
