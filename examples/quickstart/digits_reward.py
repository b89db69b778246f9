"""The quickstart's reward: how sure a small classifier is that an image shows the digit that its prompt asks for.

A plug-in of the reward service, named by `reward_class` in rewards.toml. The classifier was fitted on real digits that
neither the training nor the last judge ever sees.
"""

from typing import Any

import numpy as np
from cosmos_rl_reward.handler import BaseRewardHandler
from digits import WORDS, enlarge, load_part, prompt_of
from judge import features
from PIL import Image
from sklearn.neural_network import MLPClassifier


class DigitProbability(BaseRewardHandler):
    """Probability of the asked digit."""

    reward_name = "digit_probability"
    array_type = "numpy"
    media_types = ("image",)
    mergeable = True
    max_batch = 64
    score_keys = ("digit_probability",)

    def set_up(self) -> None:
        """Fit a network with one hidden layer on 8 x 8 cells: seconds, once."""
        digits, labels = load_part("judge_fit")
        cells = features([enlarge(digit) for digit in digits])
        self.classifier = MLPClassifier((64,), max_iter=600, alpha=1e-3, random_state=0).fit(cells, labels)

    def calculate_reward(self, images: np.ndarray, metadata: dict[str, Any]) -> dict[str, Any]:
        """Scores of images uint8 `[B, H, W, 3]`; a prompt without a digit gets none."""
        asked = [next((WORDS.index(word) for word in p.split() if word in WORDS), None) for p in metadata["prompts"]]
        cells = features([Image.fromarray(np.asarray(image)) for image in images])
        probabilities = np.asarray(self.classifier.predict_proba(cells))
        scores = [None if digit is None else float(row[digit]) for row, digit in zip(probabilities, asked, strict=True)]
        missing = {k: "the prompt names no digit" for k, digit in enumerate(asked) if digit is None}
        return {"scores": {self.reward_name: scores}, "item_errors": missing}

    def probes(self) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """A real zero that was asked for, and one that was not."""
        digits, labels = load_part("judge_fit")
        zero = np.asarray(enlarge(digits[labels == 0][0]).convert("RGB"))[None]
        return [(zero, {"prompts": [prompt_of(label)]}) for label in (0, 1)]
