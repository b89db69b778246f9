"""What a reward is written against: needs Python >= 3.10 and numpy, so it loads in every reward's own environment."""

from cosmos_rl_reward.handler.base import BadInput, BaseRewardHandler, NotReady
from cosmos_rl_reward.handler.registry import RewardRegistry

__all__ = ["BadInput", "BaseRewardHandler", "NotReady", "RewardRegistry"]
