"""Writes run folders that look like real ones: digits that become legible while a reward rises. For reports."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from cosmos_rl.tracking.media import Shown, save_gallery
from cosmos_rl.tracking.metrics import MetricsFile

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PROMPTS = tuple(f"a handwritten {word}" for word in WORDS)

NFT = """mode = "colocated"
[policy]
model_name_or_path = "/data/models/tiny_sd3"
[policy.lora]
r = 16
[train]
output_dir = "/data/outputs/digits-nft"
max_num_steps = {wanted}
seed = 42
[train.train_policy]
type = "grpo"
trainer_type = "diffusion_nft"
dataset.local_dir = "/data/digits.txt"
[logging]
experiment_name = "Legible digits"
[custom]
password = "hunter2"
"""
SFT = """[policy]
model_name_or_path = "/data/models/tiny_sd3"
[train]
output_dir = "/data/outputs/digits-sft"
max_num_steps = {wanted}
[train.train_policy]
type = "sft"
dataset.local_dir = "/data/digits"
"""


def digit(number: int, legible: float, seed: int, side: int = 32) -> torch.Tensor:
    """A digit that drowns in blotches at ``legible`` 0 and stands out at 1; uint8 ``[side, side, 3]``."""
    rng = np.random.default_rng(seed)
    canvas = Image.new("L", (12, 12), 0)
    ImageDraw.Draw(canvas).text((3, 0), str(number), fill=255)
    turned = canvas.resize((side, side), Image.Resampling.BICUBIC).rotate(float(rng.uniform(-14, 14)))
    ink = np.asarray(turned, np.float32)[..., None] / 255
    blotches = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((side, side))
    noise = np.asarray(blotches, np.float32) / 255
    tint = rng.uniform(0.75, 1.0, 3).astype(np.float32)
    shown = legible * ink * tint + (1 - legible) * (0.35 * ink + 0.65 * noise)
    return torch.from_numpy((shown.clip(0, 1) * 255).astype(np.uint8))


def progress(step: int, wanted: int) -> float:
    """How legible digits are after ``step`` of ``wanted`` steps."""
    return 0.12 + 0.8 / (1 + math.exp(-8 * (step / wanted - 0.4)))


def write_nft_run(
    root: Path, steps: int = 300, wanted: int | None = None, side: int = 32, prompts: Sequence[str] = PROMPTS
) -> Path:
    """A reinforcement-learning run with two rewards, validations every tenth of the steps, and two skipped steps."""
    wanted = wanted or steps
    rng = np.random.default_rng(0)
    _describe(root, NFT.format(wanted=wanted))
    metrics = MetricsFile(root / "metrics.jsonl")
    every = max(wanted // 10, 1)
    for step in range(steps + 1):
        good = progress(step, wanted)
        row = _nft_row(step, good, rng) if step else {}
        if step in (120, 121) and steps > 200:
            row |= {"train/loss_mean": math.nan, "optim/grad_norm": math.nan}
        if step % every == 0 or step == steps:
            row |= {"val/reward/mean": good * 0.9, "val/reward/std": 0.1, "val/reward/legible_mean": good}
            row |= {"time/validation": 2.5}
            row |= {"val/reward/ink_mean": 0.4 + 0.2 * good, "guard/loss_ratio": 1 + 0.12 * step / wanted}
            row |= {"guard/diversity_ratio": 1 - 0.45 * step / wanted, "guard/diversity_ratio_limit": 0.5}
            _gallery(root / "media" / "validation" / f"step_{step}", prompts, good, side, "fixed")
        if step % every == 0 and step:
            _extremes(root / "media" / "rollout" / f"step_{step}", prompts, good, side, step)
        metrics.log(step, row)
    return root


def write_sft_run(root: Path, steps: int = 200) -> Path:
    """A fine-tuning run with held-out losses and images without scores."""
    rng = np.random.default_rng(1)
    _describe(root, SFT.format(wanted=steps))
    metrics = MetricsFile(root / "metrics.jsonl")
    for step in range(1, steps + 1):
        loss = 0.3 + 0.7 * math.exp(-step / (steps / 4))
        row = {"time/iteration": 0.21 + rng.uniform(0, 0.04), "train/loss_mean": loss + rng.normal() * 0.05}
        row |= {"optim/grad_norm": loss * rng.uniform(0.8, 1.2), "optim/learning_rate": 1e-3 * min(1, step / 20)}
        if step % (steps // 5) == 0:
            row |= {"val/loss_mean": loss * 1.05, "time/validation": 1.5}
            shown = [Shown(digit(i, progress(step, steps), i), p, i, "fixed") for i, p in enumerate(PROMPTS)]
            save_gallery(root / "media" / "validation" / f"step_{step}", shown)
        metrics.log(step, row)
    return root


def _describe(root: Path, toml: str) -> None:
    root.mkdir(parents=True)
    (root / "config.toml").write_text(toml)
    started: dict[str, Any] = {
        "argv": [
            "cosmos-rl",
            "--config",
            "digits.toml",
            "--custom.password=hunter2 hunter2",
            "--hub-token",
            "hunter2",
            "a b",
        ],
        "started": "2026-11-27T23:49:36+01:00",
        "seed": 42,
        "git_commit": "0123abc",
        "versions": {"python": "3.12.1", "torch": "2.11.0"},
    }
    (root / "run.json").write_text(json.dumps(started))


def _nft_row(step: int, good: float, rng: np.random.Generator) -> dict[str, float]:
    mean = good * 0.9 + rng.normal() * 0.02
    return {
        "time/iteration": 3.1 + rng.uniform(0, 0.5),
        "time/rollout": 1.9 + rng.uniform(0, 0.2),
        "time/reward_wait": 0.3 + rng.uniform(0, 0.2),
        "train/loss_mean": 0.3 - 0.05 * good + rng.normal() * 0.01,
        "train/policy_loss_mean": 0.29 - 0.05 * good + rng.normal() * 0.01,
        "train/kl_loss_mean": 0.02 * good**2 + abs(rng.normal()) * 1e-3,
        "optim/grad_norm": 0.2 + abs(rng.normal()) * 0.05,
        "optim/learning_rate": 3e-4 * min(1, step / 20),
        "reward/mean": mean,
        "reward/std": 0.16 - 0.08 * good,
        "reward/max": mean + 0.3,
        "reward/min": mean - 0.3,
        "reward/legible_mean": good + rng.normal() * 0.02,
        "reward/ink_mean": 0.4 + 0.2 * good + rng.normal() * 0.02,
        "train/nfe": step * 1920,
    }


def _gallery(folder: Path, prompts: Sequence[str], good: float, side: int, group: str) -> None:
    shown = []
    for i, prompt in enumerate(prompts):
        own = min(1.0, max(0.0, good + 0.1 * math.sin(i)))
        scores = {"legible": own, "ink": 0.4 + 0.2 * own, "total": own * 0.9}
        shown.append(Shown(digit(i % 10, own, i, side), prompt, i, group, scores))
    save_gallery(folder, shown)


def _extremes(folder: Path, prompts: Sequence[str], good: float, side: int, step: int) -> None:
    shown = []
    for group, shift in (("best", 0.12), ("worst", -0.3)):
        for i, prompt in enumerate(prompts[:4]):
            own = min(1.0, max(0.0, good + shift - 0.02 * i))
            ink = None if group == "worst" and i == 3 else 0.4 + 0.2 * own
            scores = {"legible": own, "ink": ink, "total": own * 0.9}
            shown.append(Shown(digit(i % 10, own, step + i, side), prompt, step * 100 + i, group, scores))
    save_gallery(folder, shown)
