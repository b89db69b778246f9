"""Scores for generated media: local functions, the reward service, and how several of them become one number."""

from cosmos_rl.reward.functions import RewardFns, batch_reward

__all__ = ["RewardFns", "batch_reward"]
