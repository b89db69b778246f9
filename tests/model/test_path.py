"""The path x0 + s e, seen as (1 - sigma) x0 + sigma e: closed forms of points and Euler steps."""

import pytest
import torch

from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.driver.path import PATHS

S = torch.tensor([80.0, 1.0, 0.002], dtype=torch.float64)


def points(seed: int) -> torch.Tensor:
    return torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wide(value: torch.Tensor) -> torch.Tensor:
    return value[:, None, None]


def test_states_velocities_and_levels_are_those_of_the_usual_path() -> None:
    path, clean, noise = PATHS["edm"], points(0), points(1)
    level = path.from_stock_level(Level(S, S))
    sigma = level.sigma
    assert sigma.tolist() == pytest.approx([80 / 81, 0.5, 0.002 / 1.002])
    torch.testing.assert_close(path.to_stock_level(level).sigma, S)
    assert torch.equal(level.t, S)
    stock = clean + wide(S) * noise
    state = path.from_stock_state(stock, sigma)
    torch.testing.assert_close(state, (1 - wide(sigma)) * clean + wide(sigma) * noise)
    torch.testing.assert_close(path.to_stock_state(state, sigma), stock)
    torch.testing.assert_close(path.from_stock_velocity(noise, stock, sigma), noise - clean, atol=1e-10, rtol=1e-10)


def test_an_euler_step_is_the_pipelines() -> None:
    path, stock, velocity = PATHS["edm"], points(0), points(1)
    following = torch.tensor([20.0, 0.3, 0.001], dtype=torch.float64)
    sigma, later = (path.from_stock_level(Level(s, s)).sigma for s in (S, following))
    state = path.from_stock_state(stock, sigma)
    moved = state + wide(later - sigma) * path.from_stock_velocity(velocity, stock, sigma)
    torch.testing.assert_close(path.to_stock_state(moved, later), stock + wide(following - S) * velocity)


def test_the_usual_path_keeps_every_bit() -> None:
    path, state, level = PATHS["flow"], points(0), Level(S, S)
    assert path.from_stock_level(level) is path.to_stock_level(level) is level
    assert path.from_stock_state(state, S) is path.to_stock_state(state, S) is state
    assert path.from_stock_velocity(state, points(1), S) is state


def test_states_of_half_precision_do_not_lose_the_factor() -> None:
    path, sigma = PATHS["edm"], torch.tensor([80 / 81])
    state = path.from_stock_state(torch.full((1, 4), 80.0, dtype=torch.bfloat16), sigma)
    assert float(state[0, 0]) == pytest.approx(80 / 81, rel=1e-4)
