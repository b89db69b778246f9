"""The bundled pairs, every second one mirrored when the script's own option --mirror is given."""

import argparse
from dataclasses import replace

from cosmos_rl.data.folders import Folders
from cosmos_rl.data.items import Item
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.launcher import worker_entry
from cosmos_rl.policy.config import Config
from cosmos_rl.tools.dataset.diffusers_dataset import training_pairs, validation_data


class Mirrored:
    def __init__(self, pairs: LocalPairs | Folders) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Item:
        item = self.pairs[index]
        return replace(item, visual=item.visual.flip(-1)) if index % 2 else item


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--mirror", action="store_true")
    args, _ = parser.parse_known_args()

    def training_data(config: Config) -> Mirrored | LocalPairs | Folders:
        pairs = training_pairs(config)
        return Mirrored(pairs) if args.mirror else pairs

    worker_entry.main(dataset=training_data, val_dataset=validation_data, args=args)
