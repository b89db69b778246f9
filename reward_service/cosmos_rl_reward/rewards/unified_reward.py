"""UnifiedReward: a vision-language model behind an OpenAI-compatible server rates an image and its caption."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards.chat_endpoint import ENDPOINT_OPTIONS, ChatEndpoint, image_part
from cosmos_rl_reward.rewards.samples import SampleError, as_images, get_per_sample, score_samples
from cosmos_rl_reward.rewards.templates import read_constants, read_template
from cosmos_rl_reward.rewards.weights import download_text

_TEMPLATE = Path(__file__).parent / "unified_reward.txt"
_PUBLISHED = "point_score_image_generation.py"
_PUBLISHED_URL = (
    "https://raw.githubusercontent.com/CodeGoat24/UnifiedReward/ed52f98c680bfeca1e23e26aa61715de03412f2b"
    f"/inference_llava/image_generation/{_PUBLISHED}"
)
_OWN_QUESTION = (
    "the question is in our own words, so scores do not compare with published ones; run cosmos-rl-reward-prepare,"
    " which fetches the published one, or name a file with it in reward_args.options.template"
)


@RewardRegistry.register()
class UnifiedReward(BaseRewardHandler):
    """The number the model ends its answer with, divided by ``divisor``: 0.2 to 1 with the defaults.

    An answer without such a number is an error of that sample, not a 0.

    Options:
        model: name of the model on the server.
        template: text file with the question, ``{prompt}`` where the caption goes; empty = the published one, which
            ``prepare`` fetches to ``<download_path>/unified_reward``, else one in our own words, with a warning.
        pattern: regular expression whose first group is the number; its last match counts.
        divisor: scale of the number.
        size: images are scaled to size x size; 0 = sent as they are.
        max_tokens, timeout_s, retries, concurrency: of the requests.
    """

    reward_name = "unified_reward"
    array_type = "numpy"
    media_types = ("image",)
    mergeable = True
    max_batch = 32
    score_keys = ("unified_reward",)
    OPTIONS: ClassVar[dict[str, Any]] = {
        "model": "UnifiedReward-7b-v1.5",
        "template": "",
        "pattern": r"Final Score:\s*([1-5](?:\.\d+)?)",
        "divisor": 5.0,
        "size": 512,
        "max_tokens": 1024,
        **ENDPOINT_OPTIONS,
    }

    def _published_path(self) -> Path:
        return Path(self.download_path, "unified_reward", _PUBLISHED)

    def _question_file(self) -> Path:
        if self.options["template"]:
            return Path(self.options["template"])
        if self._published_path().is_file():
            return self._published_path()
        self.warning = _OWN_QUESTION
        return _TEMPLATE

    def fetch(self, offline: bool) -> str | None:
        """See ``BaseRewardHandler.fetch``: the published question, unless another one is configured."""
        path = self._published_path()
        if self.options["template"]:
            return None
        if not path.is_file() and not offline:
            download_text(_PUBLISHED_URL, path)
        return f"unified_reward: {path}" if path.is_file() else _OWN_QUESTION

    def set_up(self) -> None:
        """Read the template and see that the server has the model."""
        if not self.endpoint_url:
            raise NotReady("reward_args.endpoint_url: unified_reward needs the address of an OpenAI-compatible server")
        path = self._question_file()
        if not path.is_file():
            raise NotReady(f"reward_args.options.template: no file {path}")
        if path.suffix == ".py":  # the image is sent as a part of its own
            self._template = read_constants(path, "question")[0].removeprefix("<image>").lstrip()
        else:
            self._template = read_template(path)
        if "{prompt}" not in self._template:
            raise NotReady(f"reward_args.options.template: {path} has no {{prompt}}")
        try:
            self._pattern = re.compile(self.options["pattern"])
        except re.error as error:
            raise NotReady(f"reward_args.options.pattern: {error}") from error
        if self._pattern.groups < 1:
            raise NotReady("reward_args.options.pattern: needs a group around the number")
        self._digest = digest([path])
        self._endpoint = ChatEndpoint(self)

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        images = as_images(images)
        prompts = get_per_sample(metadata, "prompts", len(images))
        pairs = zip(images, prompts, strict=True)
        answers = self._endpoint.run_concurrently([lambda p=p, t=t: self._rating(p, t) for p, t in pairs])
        return score_samples(self.score_keys, len(images), lambda k: {"unified_reward": answers[k].result()})

    def _rating(self, image: np.ndarray, prompt: str) -> float:
        question = {"type": "text", "text": self._template.replace("{prompt}", prompt)}
        content = [image_part(image, int(self.options["size"])), question]
        text = self._endpoint.ask(content, temperature=0, max_tokens=int(self.options["max_tokens"]))
        found = list(self._pattern.finditer(text))
        try:
            return float(found[-1][1]) / float(self.options["divisor"])
        except (IndexError, ValueError, TypeError):
            raise SampleError(f"the model's answer holds no score: {text[-80:]!r}") from None

    def provenance(self) -> dict[str, Any]:
        """Adds server and template; never the key or a password."""
        return {**super().provenance(), "endpoint": self._endpoint.address, "template_digest": self._digest}
