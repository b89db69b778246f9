"""Cosmos-Reason1 as a critic: does a video show physical anomalies?"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.rewards import video_frames
from cosmos_rl_reward.rewards.chat_endpoint import ENDPOINT_OPTIONS, ChatEndpoint
from cosmos_rl_reward.rewards.cosmos_reason1_critics import EndpointCritic, LocalCritic, Pair, no_probability
from cosmos_rl_reward.rewards.samples import as_videos, get_frame_rate, get_per_sample, score_samples
from cosmos_rl_reward.rewards.templates import read_constants, read_template
from cosmos_rl_reward.rewards.weights import MODEL_FILES, choose_dtype, download_text, find_folder, require_packages

_MODEL = "nvidia/Cosmos-Reason1-7B-Reward"
_SYSTEM = Path(__file__).parent / "cosmos_reason1.txt"
_PUBLISHED = "cosmos_reason1.py"
_PUBLISHED_URL = (
    "https://raw.githubusercontent.com/nvidia-cosmos/cosmos-rl/9f39936ce9a6f36e9cdea3f6e1ef63d8143c3d97"
    f"/reward_service/cosmos_rl_reward/model/{_PUBLISHED}"
)
_OWN_QUESTION = (
    "system prompt or question are in our own words, so scores do not compare with published ones; run"
    " cosmos-rl-reward-prepare, which fetches the published ones, or give both in reward_args.options"
)
_QUESTION = "Are there physical anomalies or artifacts in this video?"
_MIN_PIXELS = 16 * 28 * 28 * 2
_ALL_PIXELS = 9216 * 28 * 28 * 2  # of all frames together
_OF_ENDPOINT: dict[str, Any] = {"model": _MODEL, **ENDPOINT_OPTIONS}


@RewardRegistry.register()
class CosmosReason1(BaseRewardHandler):
    """Asks whether the video has anomalies and compares the logits of Yes and No as the next token.

    * ``no_score``: ``softmax([yes, no])[no]``, 0 to 1, high is good.
    * ``prediction``: ``Good``, or ``Bad`` when Yes is likelier.
    * ``yes_logit``, ``no_logit``: usually 10 to 30. Not with an endpoint, which returns log-probabilities: their
      softmax is the same, the values are not.

    ``model_path`` is a folder with a Qwen2.5-VL model, or its name on the hub. With ``endpoint_url`` no weights are
    loaded: a server that takes videos as JPEG frames (vLLM) is asked.

    Options:
        system_prompt: text file; empty = the published one, which ``prepare`` fetches to
            ``<download_path>/cosmos_reason1``, else one in our own words, with a warning.
        question: asked about every video; empty = the published one, as above.
        ask_prompts: ask ``prompts`` instead of ``question``: what a client sends there must then be a question.
        model: name of the model on the server.
        timeout_s, retries, concurrency: of the requests to the server.
    """

    reward_name = "cosmos_reason1"
    NEEDS_LATENT_DECODER = True
    media_types = ("video",)
    required_metadata = ("video_infos",)
    score_keys = ("prediction", "no_score", "yes_logit", "no_logit")
    OPTIONS: ClassVar[dict[str, Any]] = {
        "system_prompt": "",
        "question": "",
        "ask_prompts": False,
        **_OF_ENDPOINT,
    }

    def fetch(self, offline: bool) -> str | None:
        require_packages("transformers", "torchvision")  # frames are sized with them too
        texts = Path(self.download_path, "cosmos_reason1", _PUBLISHED)
        if not offline and not self._has_own_texts() and not texts.is_file():
            download_text(_PUBLISHED_URL, texts)
        system, question = _SYSTEM.read_text(encoding="utf-8"), _QUESTION
        if texts.is_file():
            system, question = read_constants(texts, "SYSTEM_PROMPT", "USER_PROMPT")
        elif not self._has_own_texts():
            self.warning = _OWN_QUESTION
        if path := self.options["system_prompt"]:
            if not Path(path).is_file():
                raise NotReady(f"reward_args.options.system_prompt: no file {path}")
            system = read_template(Path(path))
        self._system, self._question = system.strip(), self.options["question"] or question
        if self.endpoint_url:
            return None
        self._folder = find_folder(self.model_path or _MODEL, MODEL_FILES, offline=offline)
        return f"cosmos_reason1: {self._folder}"

    def _has_own_texts(self) -> bool:
        """Whether the configuration has all words that are sent."""
        return bool(self.options["system_prompt"] and (self.options["question"] or self.options["ask_prompts"]))

    def set_up(self) -> None:
        """Load model and processor, or see that the server has the model."""
        self.fetch(offline=True)  # a start never downloads
        if self.endpoint_url:
            self._critic = EndpointCritic(ChatEndpoint(self))
            self.score_keys = ("prediction", "no_score")
        else:
            self._critic = LocalCritic(self._folder, self.device, choose_dtype(self))

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        videos = as_videos(images)
        count = len(videos)
        questions = [self._question] * count
        if self.options["ask_prompts"]:
            questions = get_per_sample(metadata, "prompts", count)
        infos = get_per_sample(metadata, "video_infos", count)

        def ask(index: int) -> Pair:
            video = videos[index]
            indices, fps = video_frames.sample_every_nth(video.shape[1], get_frame_rate(infos, index))
            most = _ALL_PIXELS // len(indices)
            frames = video_frames.resize_frames(video[:, indices].transpose(1, 0, 2, 3), _MIN_PIXELS, most)
            return self._critic.yes_and_no(frames, fps, self._system, questions[index])

        answers = self._critic.answers([partial(ask, index) for index in range(count)])

        def score(index: int) -> dict[str, Any]:
            yes, no = answers[index]()
            prediction = "Bad" if yes > no else "Good"
            return {"prediction": prediction, "no_score": no_probability(yes, no), "yes_logit": yes, "no_logit": no}

        return score_samples(self.score_keys, count, score)

    def provenance(self) -> dict[str, Any]:
        """Adds digests of the weights, or the server, and of the system prompt."""
        about = {**super().provenance(), **self._critic.describe()}
        about["system_prompt_digest"] = "sha256:" + hashlib.sha256(self._system.encode()).hexdigest()
        about["question"] = self._question
        if self.endpoint_url:
            del about["device"], about["dtype"]  # of this machine, where no model runs
            return about
        return {key: value for key, value in about.items() if key not in _OF_ENDPOINT}
