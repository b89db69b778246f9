"""Supervised fine-tuning on a folder of captioned images: `cosmos-rl --config X.toml THIS_MODULE`."""

from typing import TYPE_CHECKING

from cosmos_rl.data.prompts import PromptFile
from cosmos_rl.launcher import worker_entry
from cosmos_rl.policy.config import Config

if TYPE_CHECKING:
    from cosmos_rl.data.folders import Folders
    from cosmos_rl.data.local_pairs import LocalPairs


def training_pairs(config: Config) -> "LocalPairs | Folders":
    """The pairs in `train.train_policy.dataset.local_dir`, or in `folders`."""
    from cosmos_rl.data.folders import load_training_pairs  # imports torch, which `worker_entry` does faster

    return load_training_pairs(config)


def validation_data(config: Config) -> "LocalPairs | PromptFile | None":
    """The pairs or the prompts in `validation.dataset.local_dir`; None without validation or where none is named."""
    from cosmos_rl.data.local_pairs import load_held_out_data

    return load_held_out_data(config)


if __name__ == "__main__":
    worker_entry.main(dataset=training_pairs, val_dataset=validation_data)
