"""The rewards that come with the service. A module is imported only in the worker of a reward it defines."""

# reward name -> module of this package, without its prefix; a module registers its classes with RewardRegistry
MODULES: dict[str, str] = {
    "cosmos_reason1": "cosmos_reason1",
    "dance_grpo": "dance_grpo",
    "gen_eval": "gen_eval",
    "hpsv2": "hpsv2",
    "hpsv3": "hpsv3",
    "image_reward": "image_reward",
    "jpeg_compressibility": "jpeg",
    "jpeg_incompressibility": "jpeg",
    "ocr": "ocr",
    "pickscore": "pickscore",
    "unified_reward": "unified_reward",
}
