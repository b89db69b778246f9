"""What the checks of the gate share."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cosmos_rl.policy.model.driver.conditions import DrivenCond
from cosmos_rl.policy.model.driver.contract import Rollout
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.facts import Facts


class Failed(Exception):
    """A check did not hold."""


@dataclass
class Probing:
    """What the checks share: ``modes`` are guidance "off" and, where it has an effect, "on"."""

    driver: Driver
    prompts: list[str]
    facts: Facts
    guidance: dict[str, float | None] = field(default_factory=dict)
    conds: dict[str, DrivenCond] = field(default_factory=dict)
    loops: dict[str, Rollout] = field(default_factory=dict)

    def generators(self) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(row) for row in range(len(self.prompts))]

    def noise_like(self, x: Tensor, seed: int = 7) -> Tensor:
        return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)

    @property
    def exact(self) -> bool:
        """Other batch sizes and layouts agree closely; in half precision they only agree roughly."""
        weights = {weight.dtype for part in self.driver.denoisers.values() for weight in part.parameters()}
        return weights | {self.driver.state_dtype} == {torch.float32}

    def noise(self, seed: int = 7) -> Tensor:
        """A state of noise for each prompt."""
        return self.noise_rows(len(self.prompts), seed)

    def noise_rows(self, rows: int, seed: int = 7) -> Tensor:
        """States of noise."""
        shape = rows, *self.facts.state_shape
        return self.noise_like(torch.empty(shape, dtype=self.driver.state_dtype, device=self.driver.device), seed)
