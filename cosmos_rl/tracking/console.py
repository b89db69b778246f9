"""The progress line: one per step, with the time that is left."""

import re
import time
from collections.abc import Mapping
from typing import Any

from cosmos_rl.tracking.durations import format_duration
from cosmos_rl.tracking.live import LiveDisplay
from cosmos_rl.utils.logging import logger

_SHOWN = {
    "train/loss_mean": ("Loss", ".5f"),
    "reward/mean": ("Reward", ".4f"),
    "reward/std": ("Reward std", ".4f"),
    "train/kl_loss_mean": ("KL", ".3g"),
    "train/accuracy_mean": ("Accuracy", ".2f"),
    "optim/grad_norm": ("Grad norm", ".5f"),
    "optim/learning_rate": ("LR", ".3g"),
    "optim/effective_learning_rate": ("Effective LR", ".3g"),
    "guard/loss_ratio": ("Held-out loss ratio", ".3g"),
    "val/loss_mean": ("Val loss", ".5f"),
    "val/reward/mean": ("Val reward", ".4f"),
}
"""Metric -> its name and format in the line; only what a job has is shown."""
_DISPLAYED = ("Loss", "Reward", "KL", "Accuracy", "Val loss", "Val reward")
"""Those that the live display has room for."""


class Console:
    """Prints progress lines, feeds the live display, and knows how fast the run goes."""

    def __init__(self, total_steps: int, start_step: int, display: LiveDisplay) -> None:
        self._total = total_steps
        self._start = start_step
        self._display = display
        self._began = time.perf_counter()
        display.show_step(start_step, total_steps, left_s=None, step_s=None, numbers={})

    def show(self, step: int, metrics: Mapping[str, Any]) -> None:
        """1-based ``step`` is done: what the live display shows until the next one is."""
        shown = {name: text for name, text in _format_numbers(metrics).items() if name in _DISPLAYED}
        seconds = metrics["time/iteration"]
        self._display.show_step(step, self._total, left_s=self._left(step), step_s=seconds, numbers=shown)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The line of 1-based ``step``."""
        parts = [f"Step: {step}/{self._total}"]
        parts += [f"{name}: {text}" for name, text in _format_numbers(metrics).items()]
        eta = format_duration(self._left(step))
        parts.append(f"Iteration time: {metrics['time/iteration']:.2f}s, ETA: {eta}")
        logger.info(", ".join(parts))

    def _left(self, step: int) -> float:
        spent = time.perf_counter() - self._began
        return spent / max(step - self._start, 1) * (self._total - step)


def _format_numbers(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Name -> value of what a line shows."""
    found = {name: format(metrics[key], form) for key, (name, form) in _SHOWN.items() if key in metrics}
    for key, value in metrics.items():
        if match := re.fullmatch(r"val/([^/]+)/(reward/mean|loss_mean)", key):
            name, form = _SHOWN[f"val/{match[2]}"]
            found[f"{name} on {match[1]}"] = format(value, form)
    return found
