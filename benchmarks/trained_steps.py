"""CPU time of a FlowGRPO step on tiny SD3 by how many of its ten sampling steps are trained."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from cosmos_rl.policy.model.quiet import quiet_libraries
from cosmos_rl.policy.model.tiny import build
from tests.support.nft_runs import nft_toml, nft_trainer

ROUNDS = 5
_FLOW = (
    "--train.train_policy.trainer_type=flow_grpo",
    "--train.train_policy.kl_beta=0.0",
    "--train.train_policy.mini_batch=16",
    "--policy.lora.target_modules=all-linear",
    "--policy.diffusers.weight_copy_decay_type=0",
    "--policy.diffusers.timesteps_fraction=0.9",
    '--policy.diffusers.sample={num_steps = 10, guidance_scale = 1.0, solver = "flow", noise_level = 0.7}',
    "--train.max_num_steps=100",
)
_WINDOW = ('--train.train_policy.steps={choose = "window", size = 2, within = 0.5, elsewhere = "euler"}',)


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    with tempfile.TemporaryDirectory() as name, quiet_libraries():
        folder = Path(name)
        config = nft_toml(folder, build("sd3", folder / "sd3", "unit", seed=0))
        tasks = [nft_trainer(config, *_FLOW), nft_trainer(config, *_FLOW, *_WINDOW)]
        ratios, evaluations = [], [0.0, 0.0]
        for step in range(ROUNDS + 1):
            spent = [_time_step(task, step) for task in tasks]
            ratios.append(spent[1][0] / spent[0][0])
            evaluations = [each / (step + 1) for _, each in spent]
    spread = f"{statistics.median(ratios[1:]):.2f} ({min(ratios[1:]):.2f} ... {max(ratios[1:]):.2f})"
    counted = f"evaluations {evaluations[1] / evaluations[0]:.2f}"
    return [("FlowGRPO, window of 2 of 10 steps / all", f"{spread}, {counted}", "<= 0.55")]


def _time_step(task: Any, step: int) -> tuple[float, float]:
    """CPU seconds of one step, and evaluations since the start."""
    began = time.process_time()
    nfe = task.train_step(step).metrics["train/nfe"]
    return time.process_time() - began, nfe
