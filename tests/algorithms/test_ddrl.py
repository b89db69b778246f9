"""DDRL on a discrete distribution, where its optimum is known: the data times the exponential of the reward."""

import pytest
import torch
from torch import Tensor

from cosmos_rl.algorithms.advantage import AdvantageTransform, transform_advantages

DATA = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05], dtype=torch.float64)
REWARD = torch.tensor([0.0, 0.5, 1.0, 0.2, 0.9], dtype=torch.float64)


def optimum(transform: AdvantageTransform, temperature: float, *, data_weight: float) -> Tensor:
    """What maximises ``E_p[transform(A)] - data_weight KL(data, p)`` with ``A = (r - Z) / temperature``."""
    normaliser = temperature * torch.log((DATA * torch.exp(REWARD / temperature)).sum())
    value = transform_advantages((REWARD - normaliser) / temperature, transform)
    logits = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(1500):
        optimizer.zero_grad()
        log_p = torch.log_softmax(logits, 0)
        loss = -(log_p.exp() * value).sum() - data_weight * (DATA * log_p).sum()
        loss.backward()
        optimizer.step()
    return torch.softmax(logits.detach(), 0)


@pytest.mark.parametrize("transform", ["exp_reward", "centred_exp_reward"])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_optimum_is_the_data_times_the_exponential_of_the_reward(
    transform: AdvantageTransform, temperature: float
) -> None:
    wanted = DATA * torch.exp(REWARD / temperature)
    wanted /= wanted.sum()
    found = optimum(transform, temperature, data_weight=1.0)
    assert 0.5 * float((found - wanted).abs().sum()) < 1e-3
    assert 0.5 * float((DATA - wanted).abs().sum()) > 0.1  # an optimum worth finding


def test_without_data_it_collapses_to_the_best() -> None:
    found = optimum("exp_reward", 0.5, data_weight=0.0)
    assert float(found[REWARD.argmax()]) > 0.95


def test_the_transform_is_monotone_and_the_centred_one_leaves_the_mean_alone() -> None:
    advantage = torch.tensor([-2.0, -0.5, 0.0, 1.0, torch.nan], dtype=torch.float64)
    plain, centred = (transform_advantages(advantage, name) for name in ("exp_reward", "centred_exp_reward"))
    assert float(centred[2]) == 0.0
    torch.testing.assert_close(centred[:4], 1 + plain[:4])
    assert bool((plain[:4].diff() > 0).all())
    assert bool(torch.stack([plain[4], centred[4]]).isnan().all())
    assert transform_advantages(advantage, "identity") is advantage
