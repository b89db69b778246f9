"""Example rewards: a plug-in for ``cosmos_rl_reward``."""
