"""Exponential moving average of the trained weights."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from cosmos_rl.algorithms.decay import ema_decay
from cosmos_rl.distributed.sharding import local_part


class Ema:
    """A float32 shadow of named parameters.

    The parameters are captured once: switching adapters later never changes what the shadow follows.
    """

    def __init__(self, params: Mapping[str, torch.nn.Parameter], decay: float, interval: int) -> None:
        """``decay`` bounds the decay from above; the shadow moves every ``interval`` steps (0 and 1: every step)."""
        self._params = dict(params)
        self._decay = decay
        self._interval = max(interval, 1)
        self.shadow: dict[str, Tensor] = {k: p.detach().float().clone() for k, p in self._params.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follow the weights after 0-based optimiser step ``step``."""
        if (step + 1) % self._interval:
            return
        keep = ema_decay(step, self._decay)
        shadow = [local_part(value) for value in self.shadow.values()]
        live = [local_part(param.detach()).float() for param in self._params.values()]
        torch._foreach_lerp_(shadow, live, 1.0 - keep)

    @contextlib.contextmanager
    def average_parameters(self) -> Iterator[None]:
        """The parameters hold the average inside the block and the live weights, bit for bit, after it."""
        with torch.no_grad():
            live = {k: p.detach().clone() for k, p in self._params.items()}
            for name, param in self._params.items():
                param.copy_(self.shadow[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, param in self._params.items():
                    param.copy_(live[name])
