"""Warns about rewards from which nothing can be learnt: cut by their clip, or always the same. Once for each."""

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cosmos_rl.algorithms.advantage import all_equal
from cosmos_rl.reward.combine import Reward
from cosmos_rl.utils.logging import logger

_CLIPPED = 0.5
"""Share of scores at a bound from which a clip is named."""
_EQUAL_BATCHES = 5
"""Batches in a row with equal scores after which a reward is named."""


class ScoreMonitor:
    """Checks the scores of every batch."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._rewards = rewards
        self._equal = dict.fromkeys((reward.name for reward in rewards), 0)
        self._warned: set[tuple[str, str]] = set()
        self._lock = threading.Lock()  # batches may be finished by several threads

    def check(self, values: Mapping[str, Tensor]) -> None:
        """Check the scores ``[N]`` of one batch, by reward."""
        with self._lock:
            for reward in self._rewards:
                score = values[reward.name]
                finite = score[torch.isfinite(score)]
                if len(finite):
                    self._check_clips(reward, finite)
                if len(finite) > 1:
                    self._check_equal(reward, finite)

    def _check_clips(self, reward: Reward, score: Tensor) -> None:
        at_bound = ((score <= reward.clip_min) | (score >= reward.clip_max)).double().mean().item()
        if at_bound > _CLIPPED:
            self._warn_once(
                reward.name,
                "clip",
                f"reward {reward.name}: {at_bound:.0%} of a batch's scores ({score.min().item():g} ... "
                f"{score.max().item():g}) are cut at clip_min = {reward.clip_min:g} or clip_max = {reward.clip_max:g}; "
                "set the bounds of this reward, and reward_clip_min and reward_clip_max of its table, to its range",
            )

    def _check_equal(self, reward: Reward, score: Tensor) -> None:
        self._equal[reward.name] += 1
        if not all_equal(score):
            self._equal[reward.name] = 0
        if self._equal[reward.name] >= _EQUAL_BATCHES:
            self._warn_once(
                reward.name,
                "equal",
                f"reward {reward.name}: all samples of {_EQUAL_BATCHES} batches in a row had equal scores (now "
                f"{score[0].item():g}), so nothing can be learnt from it; does it work?",
            )

    def _warn_once(self, name: str, about: str, message: str) -> None:
        if (name, about) not in self._warned:
            self._warned.add((name, about))
            logger.warning(message)
