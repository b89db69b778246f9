"""The progress line: one per step, with the time that is left."""

import time
from collections.abc import Mapping
from typing import Any

from cosmos_rl.utils.logging import logger

_SHOWN = {
    "train/loss_mean": ("Loss", ".5f"),
    "reward/mean": ("Reward", ".4f"),
    "reward/std": ("Reward std", ".4f"),
    "train/kl_loss_mean": ("KL", ".3g"),
    "train/accuracy_mean": ("Accuracy", ".2f"),
    "optim/grad_norm": ("Grad norm", ".5f"),
    "optim/learning_rate": ("LR", ".3g"),
    "guard/loss_ratio": ("Held-out loss ratio", ".3g"),
    "val/loss_mean": ("Val loss", ".5f"),
    "val/reward/mean": ("Val reward", ".4f"),
}
"""Metric -> its name and format in the line; only what a job has is shown."""


def format_duration(seconds: float) -> str:
    """``95.2s`` below two minutes, else ``1h02m`` or ``12m05s``."""
    if seconds < 120:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s"


class Console:
    """Prints progress lines and knows how fast the run goes."""

    def __init__(self, total_steps: int, start_step: int) -> None:
        self._total = total_steps
        self._start = start_step
        self._began = time.perf_counter()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The line of 1-based ``step``."""
        spent = time.perf_counter() - self._began
        left = spent / max(step - self._start, 1) * (self._total - step)
        parts = [f"Step: {step}/{self._total}"]
        parts += [f"{name}: {format(metrics[key], form)}" for key, (name, form) in _SHOWN.items() if key in metrics]
        parts.append(f"Iteration time: {metrics['time/iteration']:.2f}s, ETA: {format_duration(left)}")
        logger.info(", ".join(parts))
