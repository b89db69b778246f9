"""Rewards of a configuration, and what they say about samples of which sample k has the red channel k."""

from typing import Any

import torch

from cosmos_rl.policy.config import Config
from cosmos_rl.reward.build import make_rewards
from cosmos_rl.reward.table import Rewards, RewardTable, ScoringRequest

WAIT = 60.0


def config(local: dict[str, Any] | None = None, validation: dict[str, Any] | None = None, **job: Any) -> Config:
    train = {"train_policy": {"type": "grpo", "local_reward": local or {}, **job}}
    return Config.from_dict({"train": train, "validation": validation or {}})


def request(count: int = 3, metadata: list[dict[str, Any]] | None = None, frames: int | None = None) -> ScoringRequest:
    """Sample k is black with the red channel k."""
    shape = (count, 4, 6, 3) if frames is None else (count, frames, 4, 6, 3)
    media = torch.zeros(shape, dtype=torch.uint8)
    for k in range(count):
        media[k, ..., 0] = k
    fps = None if frames is None else 12.0
    return ScoringRequest(media, [f"p{k}" for k in range(count)], metadata or [{}] * count, range(count), fps)


def make(fns: Any, local: dict[str, Any] | None = None, **job: Any) -> Rewards:
    """Of functions, and of the table of local ones."""
    return make_rewards(config(local, **job), fns, validation=False)


def score(rewards: Rewards, asked: ScoringRequest | None = None) -> RewardTable:
    return rewards.submit(asked or request()).result(WAIT)
