"""One optimiser step: clip, refuse what is not finite, follow the schedule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cosmos_rl.optim.schedule import LrSchedule


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step did."""

    grad_norm: float
    learning_rate: float
    applied: bool
    """False when the gradient was not finite: the weights and the moments are then untouched."""


class Optimizer:
    """AdamW or Adam over named parameters with a schedule that is a function of the step."""

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        *,
        name: str,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        impl: str,
        schedule: LrSchedule,
        max_grad_norm: float,
    ) -> None:
        classes: dict[str, Any] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}
        self._params = list(params.values())
        self._lr = lr
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self.torch_optimizer: torch.optim.Optimizer = classes[name](
            self._params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=impl == "fused",
            foreach=impl == "foreach",
        )

    def learning_rate(self, step: int) -> float:
        """The learning rate of 0-based optimiser step ``step``."""
        return self._lr * self._schedule.factor(step)

    def step(self, step: int, *, scale: float = 1.0, loss: float = 0.0) -> StepResult:
        """Scale the gradients, clip them by their global L2 norm (0 or less: only measure), step, and clear them.

        Args:
            step: 0-based step of the schedule.
            scale: factor on the gradients; one over the weight of the whole step where losses were sums.
            loss: the step's loss, the same on all ranks; when it is not finite nothing is applied.
        """
        if not math.isfinite(loss):
            self.torch_optimizer.zero_grad(set_to_none=True)
            return StepResult(grad_norm=math.nan, learning_rate=self.learning_rate(step), applied=False)
        if scale != 1.0:
            grads = [param.grad for param in self._params if param.grad is not None]
            torch._foreach_mul_(grads, scale)
        lr = self.learning_rate(step)
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr
        bound = self._max_grad_norm if self._max_grad_norm > 0 else float("inf")
        total = torch.nn.utils.clip_grad_norm_(self._params, bound)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        finite = math.isfinite(norm)
        if finite:
            self.torch_optimizer.step()
        self.torch_optimizer.zero_grad(set_to_none=True)
        return StepResult(grad_norm=norm, learning_rate=lr, applied=finite)
