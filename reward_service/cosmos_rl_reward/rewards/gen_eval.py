"""GenEval: are the objects, counts, colours and positions that a prompt asks for in the image?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageDraw

from cosmos_rl_reward.handler import BaseRewardHandler, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards import gen_eval_rules as rules
from cosmos_rl_reward.rewards.gen_eval_models import ColorClassifier, Detector
from cosmos_rl_reward.rewards.samples import as_images, get_per_sample, score_samples
from cosmos_rl_reward.rewards.weights import MODEL_FILES, find_folder, require_packages, torch_dtype

_DETECTOR, _CLIP = "facebook/mask2former-swin-small-coco-instance", "openai/clip-vit-large-patch14"
_KEYS = ("gen_eval_score", "gen_eval_reward", "gen_eval_strict")


@RewardRegistry.register()
class GenEval(BaseRewardHandler):
    """Scores against ``metadata.geneval_includes``, by the rules in ``gen_eval_rules``.

    * ``gen_eval_score``: share of what is asked that holds, with exact counts (at most 1, below 0 with far too many).
    * ``gen_eval_strict``: 1 when all of it does and nothing of ``metadata.geneval_excludes``.
    * ``gen_eval_reward``: GenEval's own binary score, 0 or 1; 0 for all with ``metadata.geneval_only_strict``.
    * ``gen_eval_group``: ``gen_eval_reward`` under the image's tag, -10 (does not apply) under the five others.

    ``model_path`` is the detector, a folder or its name on the hub. It is not the detector of the paper, so numbers are
    comparable among themselves only; ``detector`` in the provenance says which it was.

    Options:
        clip_model: folder or hub name of the CLIP model that names colours.
        upstream_scoring: count a wrong position as 0 and 1 in ``gen_eval_score``, and ignore what is excluded.
    """

    reward_name = "gen_eval"
    media_types = ("image",)
    required_metadata = ("geneval_tags", "geneval_includes")
    score_keys = (*_KEYS, "gen_eval_group")
    OPTIONS: ClassVar[dict[str, Any]] = {"clip_model": _CLIP, "upstream_scoring": False}
    _detect: Callable[[np.ndarray], rules.Objects]
    """The objects of an image ``[H, W, 3]``, by name."""
    _color: Callable[[np.ndarray, str, list[rules.Detection]], list[str]]
    """The colours of the objects of one name in an image."""

    def fetch(self, offline: bool) -> str | None:
        require_packages("transformers", "torchvision", "scipy")
        self._folders = [
            find_folder(self.model_path or _DETECTOR, MODEL_FILES, offline=offline),
            find_folder(self.options["clip_model"], MODEL_FILES, offline=offline),
        ]
        return f"gen_eval: {', '.join(map(str, self._folders))}"

    def set_up(self) -> None:
        """Load detector and colour classifier."""
        self.fetch(offline=True)  # a start never downloads
        dtype = torch_dtype(self.dtype, self.device)
        self._detect = Detector(str(self._folders[0]), self.device, dtype)
        self._color = ColorClassifier(str(self._folders[1]), self.device, dtype)
        self.model_digest = digest(sorted(p for f in self._folders for p in f.glob("*.safetensors")))

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        images = as_images(images)
        count = len(images)
        tags = get_per_sample(metadata, "geneval_tags", count)
        includes = get_per_sample(metadata, "geneval_includes", count)
        given = metadata.get("geneval_excludes")
        excludes = get_per_sample(metadata, "geneval_excludes", count) if given is not None else [[]] * count
        for index in range(count):
            rules.check(tags[index], includes[index], excludes[index], index)
        only_strict = bool(metadata.get("geneval_only_strict", False))

        def score(index: int) -> dict[str, Any]:
            return self._one(images[index], tags[index], includes[index], excludes[index], only_strict)

        result = score_samples(_KEYS, count, score)
        values = result["scores"]["gen_eval_reward"]
        result["scores"]["gen_eval_group"] = {
            tag: [v if own == tag else rules.NOT_APPLICABLE for v, own in zip(values, tags, strict=True)]
            for tag in rules.TAGS
        }
        return result

    def _one(
        self, image: np.ndarray, tag: str, includes: list[dict], excludes: list[dict], only_strict: bool
    ) -> dict[str, float]:
        objects = {name: rules.select_detections(found, tag) for name, found in self._detect(image).items()}
        known: dict[int, str] = {}  # both scores need the colours of the same detections

        def colors_of(name: str, detections: list[rules.Detection]) -> list[str]:
            new = [d for d in detections if id(d) not in known]
            known.update(zip(map(id, new), self._color(image, name, new), strict=True))
            return [known[id(d)] for d in detections]

        upstream = bool(self.options["upstream_scoring"])
        share, exact = rules.score_strictly(objects, includes, colors_of, upstream=upstream)
        excludes = [] if upstream else excludes
        correct = not only_strict and rules.score_leniently(objects, includes, excludes, colors_of)
        return {
            "gen_eval_score": share,
            "gen_eval_strict": float(exact and rules.contains_none(objects, excludes)),
            "gen_eval_reward": float(correct),
        }

    def probes(self) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """A drawn stop sign and an empty image, asked for a stop sign."""
        empty = Image.new("RGB", (256, 256), (150, 190, 230))
        sign = empty.copy()
        draw = ImageDraw.Draw(sign)
        draw.rectangle((122, 190, 134, 255), fill=(110, 110, 110))
        draw.regular_polygon((128, 110, 88), 8, rotation=22, fill=(190, 20, 30), outline="white")
        draw.text((76, 88), "STOP", fill="white", font_size=42)
        asked = {
            "prompts": ["a photo of a stop sign"],
            "geneval_tags": ["single_object"],
            "geneval_includes": [[{"class": "stop sign", "count": 1}]],
        }
        return [(np.array(image)[None], asked) for image in (sign, empty)]

    def provenance(self) -> dict[str, Any]:
        """Adds the detector."""
        return {**super().provenance(), "detector": self.model_path or _DETECTOR}
