"""Learning rate as a pure function of the step, so that a resume has no schedule state to restore."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LrSchedule:
    """Warm-up, plateau, decay. Steps count from 0."""

    total_steps: int
    warmup_steps: int
    decay_steps: int
    warmup_start_factor: float = 0.0
    min_factor: float = 0.0
    decay_type: str | None = None
    num_cycles: int = 1
    """Of ``cosine_with_restarts``: falls from the full rate."""

    @classmethod
    def build(
        cls,
        total_steps: int,
        warmup: int | float,
        decay_ratio: float | None,
        decay_type: str | None,
        warmup_start_factor: float,
        min_factor: float,
        num_cycles: int = 1,
    ) -> "LrSchedule":
        """From the config's values: ``warmup`` is a number of steps, or a fraction of all steps when it is a float
        of at most 1; ``decay_ratio`` None means that everything after the warm-up decays."""
        is_fraction = isinstance(warmup, float) and warmup <= 1.0
        warmup_steps = min(int(warmup * total_steps) if is_fraction else int(warmup), total_steps)
        room = total_steps - warmup_steps
        decay_steps = room if decay_ratio is None else min(round(total_steps * decay_ratio), room)
        return cls(total_steps, warmup_steps, decay_steps, warmup_start_factor, min_factor, decay_type, num_cycles)

    def factor(self, step: int) -> float:
        """Factor on the base learning rate at 0-based ``step``."""
        plateau = self.total_steps + 1 - self.warmup_steps - self.decay_steps
        if step < self.warmup_steps:
            done = step / (self.warmup_steps - 1) if self.warmup_steps > 1 else 1.0
            return self.warmup_start_factor + (1.0 - self.warmup_start_factor) * done
        if step < self.warmup_steps + plateau or self.decay_steps == 0:
            return 1.0
        done = min(step + 1 - self.warmup_steps - plateau, self.decay_steps)
        if self.decay_type == "cosine_with_restarts" and done < self.decay_steps:
            done = self.num_cycles * done % self.decay_steps  # whole numbers: a restart is exactly at the full rate
        progress = done / self.decay_steps
        return self.min_factor + (1.0 - self.min_factor) * _decay_factor(self.decay_type, progress)


def _decay_factor(decay_type: str | None, progress: float) -> float:
    """Share of the learning rate that is left at ``progress`` in [0, 1] of the decay, or of one of its cycles."""
    if decay_type in (None, "none"):
        return 1.0
    if decay_type == "linear":
        return 1.0 - progress
    if decay_type == "sqrt":
        return 1.0 - math.sqrt(progress)
    if decay_type in ("cosine", "cosine_with_restarts"):
        return (1.0 + math.cos(math.pi * progress)) / 2.0
    raise ValueError(f"unknown decay type {decay_type!r}")
