"""Both paths from data to noise as the one that training knows, ``(1 - sigma) x0 + sigma e``.

A state ``x = x0 + s e`` times ``1 - sigma``, with ``sigma = s / (1 + s)``, is a state of that path. So losses,
transitions and samplers need not know of the other one.
"""

from typing import Protocol

from torch import Tensor

from cosmos_rl.diffusion.schedule import shape_like
from cosmos_rl.policy.model.driver.contract import Level


class Path(Protocol):
    """Between what training has and what the pipeline has; sigmas are ``[B]``, states ``[B, ...]``."""

    def from_stock_level(self, level: Level) -> Level: ...

    def to_stock_level(self, level: Level) -> Level: ...

    def from_stock_state(self, state: Tensor, sigma: Tensor) -> Tensor:
        """``sigma``: training's."""
        ...

    def to_stock_state(self, state: Tensor, sigma: Tensor) -> Tensor:
        """``sigma``: training's."""
        ...

    def from_stock_velocity(self, velocity: Tensor, stock_state: Tensor, sigma: Tensor) -> Tensor:
        """The pipeline's ``dx/ds`` at its state -> the change of training's state per training's ``sigma``."""
        ...


class FlowPath:
    """``(1 - sigma) x0 + sigma e``: nothing to convert."""

    def from_stock_level(self, level: Level) -> Level:
        return level

    def to_stock_level(self, level: Level) -> Level:
        return level

    def from_stock_state(self, state: Tensor, sigma: Tensor) -> Tensor:
        return state

    def to_stock_state(self, state: Tensor, sigma: Tensor) -> Tensor:
        return state

    def from_stock_velocity(self, velocity: Tensor, stock_state: Tensor, sigma: Tensor) -> Tensor:
        return velocity


class EdmPath:
    """``x0 + s e`` (Karras et al. 2022, arXiv 2206.00364)."""

    def from_stock_level(self, level: Level) -> Level:
        return Level(level.t, level.sigma / (1.0 + level.sigma))

    def to_stock_level(self, level: Level) -> Level:
        return Level(level.t, level.sigma / (1.0 - level.sigma))

    def from_stock_state(self, state: Tensor, sigma: Tensor) -> Tensor:
        return state * self._factor(sigma, state)

    def to_stock_state(self, state: Tensor, sigma: Tensor) -> Tensor:
        return state / self._factor(sigma, state)

    def from_stock_velocity(self, velocity: Tensor, stock_state: Tensor, sigma: Tensor) -> Tensor:
        return velocity / self._factor(sigma, velocity) - stock_state

    def _factor(self, sigma: Tensor, like: Tensor) -> Tensor:
        # in the sigma's precision: near 1, half of one has no digits left
        return shape_like((1.0 - sigma).to(like.device), like)


PATHS: dict[str, Path] = {"flow": FlowPath(), "edm": EdmPath()}
