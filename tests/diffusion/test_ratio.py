"""Log-probabilities of two policies: their ratio, and the KL between their steps."""

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.diffusion.kernels import Kernel, log_ratio, transition_kl, transition_log_prob
from tests.support.kernels import HARD, noisy, noisy_kernel, seeded

ERRORS = {"new": [0.02, -0.15, 0.25, -0.05], "old": [0.05, -0.1, 0.2, 0.1], "ref": [0.1, -0.2, 0.3, 0.0]}
DRAWN = torch.tensor([[0.3, -1.1, 0.7, 0.2]], dtype=torch.float64)


def policy_velocity(name: str) -> Tensor:
    """Of a policy that is off by so much about one sample."""
    exact = torch.tensor([[-0.2 - 0.5, 0.4 + 1.0, 1.0 - 0.25, -1.2 - 2.0]], dtype=torch.float64)
    return exact + torch.tensor([ERRORS[name]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kernel", "g", "s", "ratio", "kl"),
    [
        (noisy_kernel("flow", 0.7), -0.1245, 0.2711088342, -6.603772425e-3, 7.486515306e-4),
        (noisy_kernel("cps", 0.8), -0.2381966011, 0.4755282581, -7.277327070e-3, 8.907315052e-4),
    ],
)
def test_ratio_and_kl_of_two_policies_are_the_golden_ones(
    kernel: Kernel, g: float, s: float, ratio: float, kl: float
) -> None:
    transition = kernel(1, [0.7, 0.6, 0.5, 0.0])
    assert (transition.g, transition.s) == pytest.approx((g, s), rel=1e-9)
    new, old = policy_velocity("new"), policy_velocity("old")
    assert float(log_ratio(new, old, DRAWN, transition)) == pytest.approx(ratio, rel=1e-6)
    assert float(transition_kl(new, old, transition)) == pytest.approx(kl, rel=1e-6)


def test_the_kl_to_another_policy_and_its_gradient_are_the_golden_ones() -> None:
    transition = noisy_kernel("flow", 0.7)(1, [0.7, 0.6, 0.5, 0.0])
    assert float(transition_kl(policy_velocity("new"), policy_velocity("ref"), transition)) == pytest.approx(
        3.664174745e-4, rel=1e-6
    )
    student = policy_velocity("old").requires_grad_()
    transition_kl(student, policy_velocity("ref"), transition).sum().backward()
    golden = [[-0.0026360969, 0.0052721939, -0.0052721939, 0.0052721939]]
    assert student.grad is not None
    np.testing.assert_allclose(student.grad.numpy(), golden, rtol=0, atol=1e-9)


def test_the_gradient_of_the_ratio_on_policy_is_the_golden_one() -> None:
    """``-A (1 + a^2 / 2) sqrt(dt (1 - t) / t) / a * xi / N`` for ``flow``."""
    transition = noisy_kernel("flow", 0.7)(1, [0.7, 0.6, 0.5, 0.0])
    new = policy_velocity("old").requires_grad_()
    loss = -0.8 * log_ratio(new, policy_velocity("old"), DRAWN, transition).exp()
    loss.sum().backward()
    golden = [[0.0275535101, -0.101029537, 0.0642915236, 0.0183690067]]
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), golden, rtol=0, atol=1e-9)


@noisy
def test_the_ratio_is_the_difference_of_log_probabilities(solver: str) -> None:
    transition = noisy_kernel(solver, 0.8)(1, HARD)
    z, old, noise = (seeded(4, 3, 8, seed=seed) for seed in range(3))
    new = (old + 0.1 * seeded(4, 3, 8, seed=3)).requires_grad_()
    following = transition.mean(z, old) + transition.s * noise
    difference = transition_log_prob(following, z, new, transition) - transition_log_prob(following, z, old, transition)
    ratio = log_ratio(new, old, noise, transition)
    torch.testing.assert_close(ratio, difference, rtol=1e-9, atol=1e-12)
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0]).double()
    gradients = [torch.autograd.grad((weight * value).sum(), new)[0] for value in (ratio, difference)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ratio_is_exactly_1_on_policy(dtype: torch.dtype) -> None:
    transition = noisy_kernel("flow", 0.7)(1, HARD)
    v, noise = seeded(4, 3, 8, dtype=dtype), seeded(4, 3, 8, seed=1, dtype=dtype)
    ratio = log_ratio(v, v.clone(), noise, transition)
    assert ratio.dtype == torch.float32
    assert ratio.tolist() == [0.0] * 4


def test_the_kl_is_that_of_two_gaussians_of_one_std() -> None:
    transition = noisy_kernel("flow", 0.7)(1, HARD)
    z, v, ref = (seeded(4, 3, 8, seed=seed) for seed in range(3))
    first, second = (torch.distributions.Normal(transition.mean(z, u), transition.s) for u in (v, ref))
    expected = torch.distributions.kl_divergence(first, second).flatten(1).mean(1)
    torch.testing.assert_close(transition_kl(v, ref, transition), expected, rtol=1e-6, atol=0)


def test_only_elements_of_the_mask_count() -> None:
    transition = noisy_kernel("flow", 0.7)(1, HARD)
    z, v, ref, noise = (seeded(2, 3, 8, seed=seed) for seed in range(4))
    following = transition.mean(z, ref) + transition.s * noise
    mask = torch.zeros(2, 1, 8)
    mask[0, :, :5] = 1.0
    mask[1, :, 2:4] = 1.0
    for row, kept in ((0, slice(0, 5)), (1, slice(2, 4))):
        one = slice(row, row + 1)
        inside = [value[one, :, kept] for value in (following, z, v, ref, noise)]
        for whole, part in (
            (
                transition_log_prob(following, z, v, transition, element_mask=mask),
                transition_log_prob(inside[0], inside[1], inside[2], transition),
            ),
            (log_ratio(v, ref, noise, transition, mask), log_ratio(inside[2], inside[3], inside[4], transition)),
            (transition_kl(v, ref, transition, mask), transition_kl(inside[2], inside[3], transition)),
        ):
            torch.testing.assert_close(whole[one], part, rtol=1e-12, atol=0)
