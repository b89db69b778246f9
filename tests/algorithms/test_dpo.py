"""The DPO loss: golden numbers, an independent computation, its gradient at the reference, and a known optimum."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.algorithms.dpo import FollowingBeta, dpo_loss, pair_best_with_worst
from tests.algorithms.fixture import CLEAN, NEW, NOISE, REFERENCE, TARGET, doubles

NOISES = NOISE[:1]
"""That of both members."""


def at(velocity: np.ndarray) -> Tensor:
    """The fixture's velocities, as far from the target of the one pair as they are from their own: ``[2, 1, 4]``."""
    return doubles((NOISES - CLEAN) + velocity - TARGET).unsqueeze(1)


def loss_of(velocity: Tensor, beta: float, reference: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    if reference is None:
        reference = at(REFERENCE)
    return dpo_loss(velocity, reference, doubles(CLEAN).unsqueeze(1), doubles(NOISES), beta=beta)


@pytest.mark.parametrize(("beta", "loss", "factor"), [(100, 0.8112671776, 0.5557052909), (2000, 4.4863258420, None)])
def test_golden_losses(beta: float, loss: float, factor: float | None) -> None:
    found, terms = loss_of(at(NEW), beta)
    assert terms["margin"].item() == pytest.approx(0.004475, abs=1e-12)
    assert found.item() == pytest.approx(loss, abs=1e-9)
    assert terms["policy_loss"].item() == found.item()
    assert terms["margin_size"].item() == terms["margin"].item()
    assert 4 * terms["margin"].item() == pytest.approx(0.0179, abs=1e-12)  # of errors summed over the four elements
    if factor is not None:
        assert terms["gradient_factor"].item() == pytest.approx(factor, abs=1e-9)
    assert terms["chosen_error_change"].item() == pytest.approx(0.021975 - 0.035, abs=1e-12)
    assert terms["accuracy"].item() == 0.0


def test_at_the_reference_the_loss_is_the_logarithm_of_two_and_pulls_the_members_apart() -> None:
    velocity = at(REFERENCE).requires_grad_()
    loss, terms = loss_of(velocity, 100)
    (gradient,) = torch.autograd.grad(loss, velocity)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-12)
    assert terms["gradient_factor"].item() == 0.5
    expected = [[1.25, -2.5, 3.75, 0.0], [-2.5, -1.25, 1.25, -5.0]]
    np.testing.assert_allclose(gradient[:, 0], expected, atol=1e-9)


def test_a_beta_of_sums_is_one_of_means_over_the_number_of_elements() -> None:
    """SimpleTuner's 1 of errors summed over 65,536 elements, and 2000 of means."""
    chosen, rejected = (NEW - TARGET)[0], (NEW - TARGET)[1]
    ref_chosen, ref_rejected = (REFERENCE - TARGET)[0], (REFERENCE - TARGET)[1]
    sums = (chosen**2).sum() - (ref_chosen**2).sum() - (rejected**2).sum() + (ref_rejected**2).sum()
    assert sums == pytest.approx(0.0179, abs=1e-12)
    loss, _ = loss_of(at(NEW), 2000.0)
    assert loss.item() == pytest.approx(np.log1p(np.exp(0.5 * (2000.0 / 4) * sums)), rel=1e-12)


def test_a_learnt_pair_of_mean_margin_keeps_the_target_of_the_gradient() -> None:
    """By hand: weights ``0.99^k`` on the sizes so far, from the first one on that is not 0."""
    beta, sizes = FollowingBeta(100.0, target=0.2), [0.03, 0.01, 0.08, 0.02]
    beta.follow(0.0)
    assert beta.value == 100.0  # at the reference nothing is known
    for number in range(1, 5):
        beta.follow(sizes[number - 1])
        weights = 0.99 ** np.arange(number)[::-1]
        mean = float((weights * sizes[:number]).sum() / weights.sum())
        assert beta.value == pytest.approx(2 * math.log(4) / mean, rel=1e-12)  # 2.77 over the mean
        assert 1 / (1 + math.exp(0.5 * beta.value * mean)) == pytest.approx(0.2)
    beta.follow(math.nan)
    assert (beta.mean, beta.count) == (pytest.approx(mean), 4)


def test_a_beta_that_follows_has_bounds_and_continues_from_its_state() -> None:
    beta = FollowingBeta(100.0, target=0.2, least=65.0, most=65536.0)
    found = []
    for size in (1e-9, 10.0):
        beta.follow(size)
        found.append(beta.value)
    assert found == [65536.0, 65.0]
    other = FollowingBeta(100.0, target=0.2)
    other.load_state_dict(beta.state_dict())
    assert (other.mean, other.count) == (beta.mean, 2)
    constant = FollowingBeta(100.0)
    constant.follow(0.5)
    assert constant.value == 100.0


def test_many_pairs_equal_an_independent_computation() -> None:
    rng = np.random.default_rng(0)
    new, ref, clean = (rng.normal(size=(2, 5, 3, 4)) for _ in range(3))
    noise, mask = rng.normal(size=(5, 3, 4)), rng.random((5, 1, 4)) < 0.7
    level, weight, beta = rng.random(5), np.array([1.0, 1.0, 0.0, 2.0, 1.0]), 3.0
    expected, margins = 0.0, []
    for pair in range(5):
        change = []
        for member in range(2):
            where = np.broadcast_to(mask[pair], (3, 4))
            target = (noise[pair] - clean[member, pair])[where]
            errors = [((v[member, pair][where] - target) ** 2).mean() for v in (new, ref)]
            change.append(level[pair] * (errors[0] - errors[1]))
        margins.append(change[0] - change[1])
        expected += weight[pair] * np.log1p(np.exp(0.5 * beta * margins[-1]))
    loss, terms = dpo_loss(
        *(doubles(value) for value in (new, ref, clean, noise)),
        beta=beta,
        element_mask=torch.from_numpy(mask),
        level_weight_P=doubles(level),
        weight_P=doubles(weight),
    )
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(terms["margin"], margins, rtol=1e-12)
    np.testing.assert_array_equal(terms["accuracy"], np.array(margins) < 0)


def test_a_large_margin_neither_overflows_nor_loses_its_gradient() -> None:
    velocity = torch.zeros(2, 1, 4, requires_grad=True)
    clean, noise = torch.stack([torch.full((1, 4), -30.0), torch.zeros(1, 4)]), torch.zeros(1, 4)
    loss, terms = dpo_loss(velocity, torch.full((2, 1, 4), 30.0), clean, noise, beta=2000.0)
    loss.backward()
    assert loss.item() == pytest.approx(1000 * terms["margin"].item(), rel=1e-6)
    assert velocity.grad is not None
    assert bool(velocity.grad.isfinite().all())
    assert float(velocity.grad[0].abs().max()) > 0


def test_shapes_that_would_be_broadcast_are_refused() -> None:
    pair, noise = torch.zeros(2, 3, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"\[2, P, C, ...\]"):
        dpo_loss(pair, pair, pair, noise[:1], beta=1.0)
    with pytest.raises(ValueError, match="one value per row"):
        dpo_loss(pair, pair, pair, noise, beta=1.0, weight_P=torch.ones(3, 1))


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_the_optimum_is_the_reference_times_the_exponential_of_the_reward(beta: float) -> None:
    """All pairs of a grid, labelled by the reward's own logistic model; log-densities ``f`` in place of velocities. A
    velocity ``sqrt(c - 2 f)`` where clean and noise are 0 has the error ``c - 2 f``, which makes ``-m / 2`` the
    difference of the log-ratios. The loss is then convex, and Newton's method finds its minimum."""
    count, offset = 41, 400.0
    grid = torch.linspace(-4, 4, count, dtype=torch.float64)
    reward, base = torch.sin(2 * grid) + 0.3 * grid, torch.log_softmax(-(grid**2) / 2, 0)
    rows, columns = torch.triu_indices(count, count, 1)
    mass, wins = (base[rows] + base[columns]).exp(), torch.sigmoid(reward[rows] - reward[columns])
    zeros = torch.zeros(len(rows), 1, dtype=torch.float64)

    def velocities(log_density: Tensor) -> Tensor:
        return torch.stack([(offset - 2 * log_density[index]).sqrt() for index in (rows, columns)]).unsqueeze(2)

    def loss_at(log_density: Tensor) -> Tensor:
        new, ref, clean = velocities(log_density), velocities(base), torch.stack([zeros, zeros])
        won, _ = dpo_loss(new, ref, clean, zeros, beta=beta, weight_P=mass * wins)
        lost, _ = dpo_loss(new.flip(0), ref.flip(0), clean, zeros, beta=beta, weight_P=mass * (1 - wins))
        return won + lost

    found = base.clone()
    for _ in range(10):
        gradient = torch.autograd.functional.jacobian(loss_at, found)
        hessian: Any = torch.autograd.functional.hessian(loss_at, found)
        found = found - torch.linalg.solve(hessian + 1.0, gradient)  # a constant on all log-densities changes nothing
    target = torch.softmax(base + reward / beta, 0)
    assert 0.5 * float((base.exp() - target).abs().sum()) > 0.1
    assert 0.5 * float((torch.softmax(found, 0) - target).abs().sum()) <= 1e-5


def test_the_best_of_each_group_is_paired_with_its_worst() -> None:
    group = torch.tensor([7, 7, 7, 2, 2, 2, 5, 5, 9, 9])
    reward = torch.tensor([0.1, 0.9, 0.4, 1.0, math.nan, 0.2, 3.0, 3.0, math.nan, 1.0])
    assert pair_best_with_worst(reward, group) == {1: 0, 3: 5}
    close = torch.tensor([1.0, 1.0 + 1e-9])
    assert pair_best_with_worst(close, torch.zeros(2)) == {}
    assert pair_best_with_worst(torch.tensor([1.0, 2.0, 2.0, 1.0]), torch.zeros(4)) == {1: 0}
