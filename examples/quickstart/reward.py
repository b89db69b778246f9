"""The quickstart's reward: how sure a small classifier is that a picture shows the digit that its prompt asks for.

    [[train.train_policy.local_reward.reward_fns]]
    function = "examples/quickstart/reward.py:digit_probability"

The classifier was fitted on real digits that neither the training nor the last judge ever sees.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from digits import WORDS, enlarge, load_part
from judge import features
from PIL import Image
from sklearn.neural_network import MLPClassifier

from cosmos_rl.reward import batch_reward


@functools.cache
def classifier() -> MLPClassifier:
    """A network with one hidden layer on 8 x 8 cells, fitted on the part `judge_fit`: seconds, once."""
    digits, labels = load_part("judge_fit")
    cells = features([enlarge(digit) for digit in digits])
    return MLPClassifier((64,), max_iter=600, alpha=1e-3, random_state=0).fit(cells, labels)


@batch_reward
def digit_probability(media: np.ndarray, prompts: Sequence[str], **_: Any) -> list[float]:
    """Probability of the asked digit for each picture uint8 `[N, H, W, 3]`."""
    asked = [WORDS.index(next(word for word in prompt.split() if word in WORDS)) for prompt in prompts]
    cells = features([Image.fromarray(picture) for picture in media])
    probabilities = np.asarray(classifier().predict_proba(cells))
    return probabilities[np.arange(len(asked)), asked].tolist()
