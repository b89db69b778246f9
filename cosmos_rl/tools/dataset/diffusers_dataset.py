"""Supervised fine-tuning on a folder of captioned images: `cosmos-rl --config X.toml THIS_MODULE`."""

from typing import TYPE_CHECKING

from cosmos_rl.data.prompts import PromptFile
from cosmos_rl.errors import UserError
from cosmos_rl.launcher import worker_entry
from cosmos_rl.policy.config import Config

if TYPE_CHECKING:
    from cosmos_rl.data.local_pairs import LocalPairs


def training_pairs(config: Config) -> "LocalPairs":
    """The pairs in `train.train_policy.dataset.local_dir`."""
    from cosmos_rl.data.local_pairs import LocalPairs  # imports torch, which `worker_entry` does faster

    folder = config.train.train_policy.dataset.local_dir
    if not folder:
        raise UserError("train.train_policy.dataset.local_dir: missing; give the folder of training images")
    return LocalPairs.of_config(folder, config)


def validation_data(config: Config) -> "LocalPairs | PromptFile | None":
    """The pairs or the prompts in `validation.dataset.local_dir`; None without validation or where none is named."""
    from cosmos_rl.data.local_pairs import load_held_out_data

    return load_held_out_data(config)


if __name__ == "__main__":
    worker_entry.main(dataset=training_pairs, val_dataset=validation_data)
