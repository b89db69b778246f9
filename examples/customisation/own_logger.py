"""The loss of every step as a line of a CSV file, whose name the [custom] table may give."""

from pathlib import Path
from typing import Any

from cosmos_rl.launcher import worker_entry
from cosmos_rl.policy.config import Config
from cosmos_rl.tools.dataset.diffusers_dataset import training_pairs, validation_data


class CsvFile:
    path = Path("loss.csv")

    def __call__(self, metrics: dict[str, Any], step: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{step},{metrics.get('train/loss_mean')},{metrics.get('val/loss_mean')}\n")


csv_file = CsvFile()


def training_data(config: Config):
    csv_file.path = Path(str(config.custom.get("csv", csv_file.path)))
    return training_pairs(config)


if __name__ == "__main__":
    worker_entry.main(dataset=training_data, val_dataset=validation_data, custom_logger_fns=[csv_file])
