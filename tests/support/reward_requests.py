"""What tests ask the misbehaving reward service."""

import torch

from cosmos_rl.policy.config import RemoteRewardConfig
from cosmos_rl.reward.table import ScoringRequest

WAIT = 60.0


def table(*names: str, **keys: object) -> RemoteRewardConfig:
    fns = [{"name": name} for name in names or ("a",)]
    return RemoteRewardConfig.model_validate({"reward_fns": fns, **keys})


def request(count: int = 2, size: int = 4, **fields: object) -> ScoringRequest:
    """Sample k is an image of the grey k + 1."""
    media = torch.arange(1, count + 1, dtype=torch.uint8)[:, None, None, None].expand(count, size, size, 3)
    values = {"prompts": [f"p{k}" for k in range(count)], "metadata": [{}] * count, "sample_ids": range(count)}
    return ScoringRequest(**{"media": media.contiguous(), **values, **fields})


def grey(count: int) -> list[float]:
    return [(k + 1) / 255 for k in range(count)]
