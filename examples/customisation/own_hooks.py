"""Prints the held-out loss after each validation, and the checkpoints that are saved and loaded."""

from typing import Any

from cosmos_rl.launcher import worker_entry
from cosmos_rl.tools.dataset.diffusers_dataset import training_pairs, validation_data


def after_validation(loop: Any, data: dict[str, Any]) -> None:
    print(f"epoch {data['current_epoch']}: held-out loss {data['val_avg_loss']}")


def after_save(manager: Any, data: dict[str, Any]) -> None:
    print(f"step {data['step']} of {data['total_steps']} goes to {data['checkpoint_path']}")


def after_load(manager: Any, data: dict[str, Any]) -> None:
    print(f"step {data['extra_vars']['step']} comes from {data['checkpoint_path']}")


if __name__ == "__main__":
    worker_entry.main(
        dataset=training_pairs,
        val_dataset=validation_data,
        hook_fns={
            "post_validation_hook": after_validation,
            "save_checkpoint_hook": after_save,
            "load_checkpoint_hook": after_load,
        },
    )
