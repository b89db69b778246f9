"""Reinforcement learning on a list of prompts: `cosmos-rl --config X.toml THIS_MODULE`.

Copy and edit it for other prompts (any sequence of texts or of mappings with "prompt") or for rewards of your own
(`worker_entry.main(..., reward_fns=[(my_function, 1.0)])`).
"""

from cosmos_rl.data.prompt_sets import load_prompts
from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.launcher import worker_entry
from cosmos_rl.policy.config import Config


def training_prompts(config: Config) -> list[PromptRecord]:
    """The prompts of `[train.train_policy.dataset]`."""
    return load_prompts(config.train.train_policy.dataset, "train.train_policy.dataset", split="train")


def validation_prompts(config: Config) -> list[PromptRecord] | None:
    """The prompts of `[validation.dataset]`; None without validation."""
    if not config.validation.enable:
        return None
    return load_prompts(config.validation.dataset, "validation.dataset", split="test")


if __name__ == "__main__":
    worker_entry.main(dataset=training_prompts, val_dataset=validation_prompts)
