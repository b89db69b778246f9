"""The rewards that come with the service. A module is imported only in the worker of a reward it defines."""

# reward name -> module of this package, without its prefix; a module registers its classes with RewardRegistry
MODULES: dict[str, str] = {
    "brightness_target": "measured",
    "classifier": "classifier",
    "cosmos_reason1": "cosmos_reason1",
    "dance_grpo": "dance_grpo",
    "gen_eval": "gen_eval",
    "hpsv2": "hpsv2",
    "hpsv3": "hpsv3",
    "image_reward": "image_reward",
    "jpeg_compressibility": "measured",
    "jpeg_incompressibility": "measured",
    "motion_smoothness": "measured",
    "ocr": "ocr",
    "pickscore": "pickscore",
    "sharpness": "measured",
    "ssim_to_reference": "measured",
    "unified_reward": "unified_reward",
}
