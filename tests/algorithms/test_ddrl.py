"""What the objectives of FlowGRPO and DDRL lead to, on a grid where the optimum is known: base times exp(reward)."""

import pytest
import torch
from torch import Tensor

from cosmos_rl.algorithms.advantage import AdvantageTransform, transform_advantages

GRID = torch.linspace(-4.0, 4.0, 161, dtype=torch.float64)
LOG_BASE = torch.log_softmax(-(GRID**2) / 2, 0)
REWARD = torch.sin(2 * GRID) + 0.3 * GRID


def minimise(objective) -> Tensor:
    """The distribution that minimises it."""
    logits = LOG_BASE.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits], lr=0.5, max_iter=250, tolerance_grad=1e-9, tolerance_change=1e-13, line_search_fn="strong_wolfe"
    )

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = objective(torch.log_softmax(logits, 0))
        loss.backward()
        return loss

    optimizer.step(evaluate)
    return torch.softmax(logits.detach(), 0)


def total_variation(found: Tensor, temperature: float) -> float:
    return 0.5 * float((found - torch.softmax(LOG_BASE + REWARD / temperature, 0)).abs().sum())


def ddrl(transform: AdvantageTransform, temperature: float) -> Tensor:
    normaliser = temperature * torch.logsumexp(LOG_BASE + REWARD / temperature, 0)
    value = transform_advantages((REWARD - normaliser) / temperature, transform)
    return minimise(lambda log_p: -(log_p.exp() * value).sum() - (LOG_BASE.exp() * log_p).sum())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_ddrl_with_the_exponential_and_grpo_with_a_kl_divergence_have_the_tilt_as_their_optimum(
    temperature: float,
) -> None:
    reverse = minimise(lambda log_p: (log_p.exp() * (log_p - LOG_BASE - REWARD / temperature)).sum())
    assert total_variation(LOG_BASE.exp(), temperature) > 0.18
    assert total_variation(reverse, temperature) <= 0.002
    for transform in ("exp_reward", "centred_exp_reward"):
        assert total_variation(ddrl(transform, temperature), temperature) <= 0.002


@pytest.mark.parametrize(("temperature", "distance"), [(0.5, 0.765), (1.0, 0.465), (2.0, 0.028)])
def test_ddrl_without_the_exponential_goes_too_far(temperature: float, distance: float) -> None:
    assert total_variation(ddrl("identity", temperature), temperature) == pytest.approx(distance, abs=0.01)


def test_without_data_it_collapses_to_the_best() -> None:
    reward = torch.tensor([0.0, 0.5, 1.0, 0.2, 0.9], dtype=torch.float64)
    value = transform_advantages(2 * (reward - reward.mean()), "exp_reward")
    logits = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(1500):
        optimizer.zero_grad()
        (-(torch.softmax(logits, 0) * value).sum()).backward()
        optimizer.step()
    assert float(torch.softmax(logits, 0)[2]) > 0.95


def test_the_two_exponentials_have_the_same_expected_gradient() -> None:
    """They differ by a constant, which moves no probability."""
    logits = (LOG_BASE + 0.3 * GRID.cos()).requires_grad_()
    advantage, gradients = REWARD - REWARD.mean(), []
    for transform in ("exp_reward", "centred_exp_reward"):
        probability, value = torch.softmax(logits, 0), transform_advantages(advantage, transform)
        gradients.append(torch.autograd.grad(-(probability * value).sum(), logits)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)
    assert float(gradients[0].norm()) > 1e-3


def test_of_the_two_exponentials_the_centred_one_has_less_variance() -> None:
    """Of the score times the value of a draw, in closed form; draws of one reward alone teach nothing."""
    log_p, score, spread = LOG_BASE, torch.eye(len(GRID), dtype=torch.float64) - LOG_BASE.exp(), []
    for transform in ("exp_reward", "centred_exp_reward"):
        of_draw = transform_advantages(REWARD - (LOG_BASE.exp() * REWARD).sum(), transform)[:, None] * score
        mean = (log_p.exp()[:, None] * of_draw).sum(0)
        spread.append(float((log_p.exp()[:, None] * (of_draw - mean) ** 2).sum()))
        equal = transform_advantages(torch.zeros(4, dtype=torch.float64), transform)
        assert equal.any() == (transform == "exp_reward")
    assert spread[1] < 0.75 * spread[0]


def test_the_transform_is_monotone_and_the_centred_one_leaves_the_mean_alone() -> None:
    advantage = torch.tensor([-2.0, -0.5, 0.0, 1.0, torch.nan], dtype=torch.float64)
    plain, centred = (transform_advantages(advantage, name) for name in ("exp_reward", "centred_exp_reward"))
    assert float(centred[2]) == 0.0
    torch.testing.assert_close(centred[:4], 1 + plain[:4])
    assert bool((plain[:4].diff() > 0).all())
    assert bool(torch.stack([plain[4], centred[4]]).isnan().all())
    assert transform_advantages(advantage, "identity") is advantage
