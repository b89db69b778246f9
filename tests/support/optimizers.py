"""An optimiser of one weight."""

import torch

from cosmos_rl.optim.classes import Hyperparameters
from cosmos_rl.optim.optimizer import Optimizer
from cosmos_rl.optim.schedule import LrSchedule


def optimizer(weight: torch.nn.Parameter, **options: object) -> Optimizer:
    own = {"name": "AdamW", "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "impl": "fused", "kwargs": {}}
    settings = Hyperparameters(**{name: options.pop(name, value) for name, value in own.items()})  # type: ignore[arg-type]
    schedule = LrSchedule.build(10, 0, None, None, 0.0, 0.0)
    return Optimizer(
        {"w": weight}, settings=settings, schedule=schedule, **{"lr": 0.1, "max_grad_norm": 1.0, **options}
    )  # type: ignore[arg-type]
