"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) on weights that are spread over ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_rl.distributed.sharding import copy_full


class AdafactorOverRanks(torch.optim.Adafactor):
    """``torch.optim.Adafactor``, whose means over rows and columns and norms are of whole weights on several ranks too.

    A weight that is spread over ranks is gathered for its step, one after the other, and so is its gradient. Every rank
    then computes the step of the whole weight, which is that of a single rank, and keeps its own part of it. The means
    are whole on each rank.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of all weights with a gradient."""
        groups = self.param_groups
        if not any(isinstance(param, DTensor) for group in groups for param in group["params"]):
            super().step(closure)
            return
        try:
            for group in groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self._step_on_whole(group, param)
        finally:
            self.param_groups = groups

    def _step_on_whole(self, group: dict[str, Any], param: nn.Parameter) -> None:
        whole = nn.Parameter(_gather(param.detach()))
        whole.grad = _gather(param.grad)
        # what a checkpoint was read into is spread like the parameter where it has its shape
        self.state[whole] = {name: _gather(value) for name, value in self.state.pop(param, {}).items()}
        self.param_groups = [{**group, "params": [whole]}]
        super().step()
        copy_full(param, whole)
        self.state[param] = self.state.pop(whole)


def _gather(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
