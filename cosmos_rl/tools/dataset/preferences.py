"""Preference optimisation on chosen and rejected images or videos: `cosmos-rl --config X.toml THIS_MODULE`."""

from typing import TYPE_CHECKING

from cosmos_rl.data.prompts import PromptFile
from cosmos_rl.errors import UserError
from cosmos_rl.launcher import worker_entry
from cosmos_rl.policy.config import Config

if TYPE_CHECKING:
    from cosmos_rl.data.preferences import PreferencePairs


def training_preferences(config: Config) -> "PreferencePairs":
    """The preferences in `[train.train_policy.dataset]`."""
    from cosmos_rl.data.preferences import PreferencePairs  # imports torch, which `worker_entry` does faster

    dataset = config.train.train_policy.dataset
    if not dataset.local_dir:
        raise UserError("train.train_policy.dataset.local_dir: missing; give the folder of the chosen images")
    return PreferencePairs.of_config(dataset, config)


def validation_data(config: Config) -> "PreferencePairs | PromptFile | None":
    """The preferences or the prompts in `[validation.dataset]`; None without validation or where none are named."""
    from cosmos_rl.data.preferences import load_held_out_preferences

    return load_held_out_preferences(config)


if __name__ == "__main__":
    worker_entry.main(dataset=training_preferences, val_dataset=validation_data)
