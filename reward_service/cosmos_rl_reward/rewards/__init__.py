"""The rewards that come with the service. A module is imported only in the worker of a reward it defines."""

# reward name -> module in this package; a module registers its classes with RewardRegistry
MODULES: dict[str, str] = {
    "brightness_target": "cosmos_rl_reward.rewards.measured",
    "classifier": "cosmos_rl_reward.rewards.classifier",
    "function": "cosmos_rl_reward.rewards.function_reward",
    "hpsv2": "cosmos_rl_reward.rewards.hpsv2",
    "image_reward": "cosmos_rl_reward.rewards.image_reward",
    "jpeg_compressibility": "cosmos_rl_reward.rewards.measured",
    "jpeg_incompressibility": "cosmos_rl_reward.rewards.measured",
    "motion_smoothness": "cosmos_rl_reward.rewards.measured",
    "ocr": "cosmos_rl_reward.rewards.ocr",
    "pickscore": "cosmos_rl_reward.rewards.pickscore",
    "sharpness": "cosmos_rl_reward.rewards.measured",
    "ssim_to_reference": "cosmos_rl_reward.rewards.measured",
}
