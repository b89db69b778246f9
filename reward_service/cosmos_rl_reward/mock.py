"""A reward without weights, for trying the service out."""

from __future__ import annotations

from typing import Any

from cosmos_rl_reward.handler import BaseRewardHandler, RewardRegistry


@RewardRegistry.register()
class MockReward(BaseRewardHandler):
    """Mean brightness of each sample, 0..1."""

    reward_name = "mock"
    array_type = "numpy"
    mergeable = True
    max_batch = 64
    score_keys = ("mock",)

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        return {"scores": {"mock": images.mean(axis=tuple(range(1, images.ndim)), dtype="float64") / 255}}

    def probes(self) -> list[tuple[Any, dict[str, Any]]]:
        probes = super().probes()
        return [(probes[0][0] * 0, probes[0][1]), probes[1]]
