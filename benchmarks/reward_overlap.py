"""Wall time of rollout and rewards, where the rewards take as long as the rollout, against one after the other."""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from cosmos_rl.distributed.context import process_group
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.model.tiny import build
from cosmos_rl.policy.trainer.rl.build import build_online
from cosmos_rl.reward import batch_reward

PROMPTS, GROUP, ROUNDS = 8, 16, 7


pause_s = [0.0]
"""Seconds that the reward takes for an image."""


@batch_reward
def slow(images: np.ndarray, **_others: object) -> list[float]:
    """Brightness; asleep meanwhile, as a reward that waits for a service or a GPU."""
    time.sleep(pause_s[0] * len(images))
    return [float(image.mean()) / 255 for image in images]


def config_for(folder: Path) -> Config:
    """Each prompt's samples are a chunk, which is scored while the next one is sampled."""
    return Config.from_dict(
        {
            "mode": "colocated",
            "policy": {
                "model_name_or_path": str(folder / "model"),
                "is_diffusers": True,
                "lora": {"lora_names": ["default", "old"], "target_modules": ["to_q"]},
                "diffusers": {
                    "max_prompt_length": 16,
                    "inference_size": [32, 32],
                    "timesteps_fraction": 0.1,
                    "sample": {"num_steps": 10, "guidance_scale": 1.0, "deterministic_sampling": True},
                },
            },
            "rollout": {"n_generation": GROUP, "batch_size": 1},
            "train": {
                "output_dir": str(folder / "out"),
                "epoch": 1000,
                "train_batch_per_replica": PROMPTS * GROUP,
                "param_dtype": "float32",
                "train_policy": {
                    "type": "grpo",
                    "trainer_type": "diffusion_nft",
                    "uncentralized_training": True,
                    "mini_batch": PROMPTS * GROUP,
                    "reward_hacking_guard": {"enable": False},
                },
            },
        }
    )


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    ratios = []
    with tempfile.TemporaryDirectory() as name, process_group("cpu") as context:
        folder = Path(name)
        build("sd3", folder / "model", "digits", seed=0)
        prompts = [f"a photo of the digit {i}" for i in range(PROMPTS)]
        trainer = build_online(config_for(folder), context, dataset=prompts, reward_fns=[slow])
        trainer.start(0)
        for step in range(ROUNDS + 2):
            metrics = trainer.train_step(step).metrics
            rollout = metrics["time/rollout"]
            if step > 1:  # the first two warm up and show how long a rollout takes
                serial = rollout + pause_s[0] * PROMPTS * GROUP
                ratios.append((rollout + metrics["time/reward_wait"]) / serial)
            pause_s[0] = rollout / (PROMPTS * GROUP)
    what = f"rollout and rewards of equal length in {PROMPTS} chunks, against one after the other (wall)"
    return [(what, f"{statistics.median(ratios):.3f}", "<= 0.65")]
