"""Pairs for training, and a text file with one prompt per line for validation images."""

from pathlib import Path

from cosmos_rl.launcher import worker_entry
from cosmos_rl.policy.config import Config
from cosmos_rl.tools.dataset.diffusers_dataset import training_pairs


def prompts(config: Config) -> list[str]:
    return Path(config.validation.dataset.local_dir).read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    worker_entry.main(dataset=training_pairs, val_dataset=prompts)
