"""Trains in a process of its own and prints how far memory rose above the level after the imports, in bytes.

`python -m tests.support.memory_job CONFIG [--a.b=v …]`
"""

import importlib
import sys
from pathlib import Path
from typing import Any

IMPORTED = (
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "transformers.models.clip.modeling_clip",
    "transformers.models.t5.modeling_t5",
    "cosmos_rl.policy.trainer.loop",
    "cosmos_rl.policy.trainer.diffusers_trainer.build",
    "cosmos_rl.policy.trainer.rl.build",
    "cosmos_rl.policy.model.diffusers.sd3_model",
    "torch.distributed.checkpoint",
)


def high_water() -> int:
    """The most memory that this process ever had, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def data_of(config: str) -> dict[str, Any]:
    """The prompts of a reinforcement-learning job; other jobs bring theirs."""
    if 'type = "grpo"' not in Path(config).read_text():
        return {}
    from cosmos_rl.tools.dataset.diffusion_nft import training_prompts, validation_prompts

    return {"dataset": training_prompts, "val_dataset": validation_prompts}


def main(config: str, *overrides: str) -> None:
    """Train and print the rise."""
    for name in IMPORTED:
        importlib.import_module(name)
    from tests.support.trainer_runs import train

    before = high_water()
    train(Path(config), *overrides, **data_of(config))
    print(f"rise {high_water() - before}")


if __name__ == "__main__":
    main(*sys.argv[1:])
