"""Online objectives on the forward process: golden numbers, one shared first gradient, NFT's bits, a known optimum."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.algorithms.forward_process import (
    AWM,
    ELBO_GRPO,
    EPG,
    NFT,
    PAR,
    PEPG,
    Estimator,
    ForwardProcess,
    estimate_cost,
    forward_process_loss,
    norm_penalty,
)
from cosmos_rl.algorithms.nft import nft_loss, norm_ratio, velocity_kl
from tests.algorithms.fixture import ADVANTAGE, CLEAN, NEW, NOISED, OLD, REFERENCE, SIGMA, doubles


def loss_of(
    objective: ForwardProcess, velocity: Tensor | None = None, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    if velocity is None:
        velocity = doubles(NEW)
    value = doubles(ADVANTAGE)
    if objective.surrogate == "mirrored":
        value = value / (2 * objective.bound) + 0.5
    rows = (doubles(OLD), doubles(CLEAN), doubles(NOISED), doubles(SIGMA), value)
    return forward_process_loss(velocity, *rows, objective, **options)


def gradient_of(objective: ForwardProcess, at: np.ndarray) -> Tensor:
    velocity = doubles(at).requires_grad_()
    return torch.autograd.grad(loss_of(objective, velocity)[0], velocity)[0]


def with_estimator(objective: ForwardProcess, estimator: Estimator) -> ForwardProcess:
    return replace(objective, estimator=estimator)


@pytest.mark.parametrize(
    ("estimator", "new", "old"),
    [
        ("adaptive", [-0.112212766, -0.0642857143], [-0.0833333333, -0.0675]),
        ("uniform", [-0.021975, -0.0375], [-0.015625, -0.045]),
        ("ghuber", [-0.9164562607, -0.5242723092], [-0.8409386724, -0.5488987893]),
    ],
)
def test_golden_estimates(estimator: Estimator, new: list[float], old: list[float]) -> None:
    for velocity, expected in ((NEW, new), (OLD, old)):
        error = doubles(NOISED - SIGMA[:, None] * velocity - CLEAN)
        found = -estimate_cost(error, doubles(SIGMA), estimator)
        assert found.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("estimator", ["adaptive", "x0", "uniform", "linear", "exact", "huber", "ghuber"])
def test_estimates_equal_an_independent_computation(estimator: Estimator) -> None:
    mask = np.array([[1, 1, 0, 1], [0, 1, 1, 0]], bool)
    for row in range(2):
        error = (NOISED - SIGMA[:, None] * NEW - CLEAN)[row][mask[row]]
        gap = (NEW - (NOISED - CLEAN) / SIGMA[:, None])[row][mask[row]]  # of the velocity from its target
        t, mean = SIGMA[row], (gap**2).mean()
        expected = {
            "adaptive": (error**2).mean() / np.abs(error).mean(),
            "x0": t**2 * mean,
            "uniform": mean,
            "linear": t * mean,
            "exact": (1 - t) / (t + 1e-3) * mean,
            "huber": t * (math.sqrt(mean + 1e-10) - 1e-5),
            "ghuber": 4 * t * ((mean + 1e-10) ** 0.25 - 1e-10**0.25),
        }[estimator]
        whole = doubles(NOISED - SIGMA[:, None] * NEW - CLEAN)
        found = estimate_cost(whole, doubles(SIGMA), estimator, torch.from_numpy(mask))
        assert float(found[row]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("objective", "estimator", "rows"),
    [
        (EPG, "adaptive", [0.0872147773, -0.0322463397]),
        (PEPG, "adaptive", [0.0903631689, -0.0324536376]),
        (PAR, "adaptive", [0.3337417608, 0.1270199316]),
        (EPG, "uniform", [0.0174687207, -0.0188911537]),
        (PEPG, "uniform", [0.0176073787, -0.0191745210]),
        (PAR, "uniform", [0.3230423158, 0.1297475919]),
    ],
)
def test_golden_losses(objective: ForwardProcess, estimator: Estimator, rows: list[float]) -> None:
    total, terms = loss_of(with_estimator(objective, estimator))
    assert terms["policy_loss"].tolist() == pytest.approx(rows, abs=1e-9)
    assert float(total) == pytest.approx(sum(rows), abs=1e-9)


def test_golden_log_ratio_of_the_adaptive_estimates() -> None:
    assert loss_of(EPG)[1]["log_ratio"].tolist() == pytest.approx([-0.0288794326, 0.0032142857], abs=1e-9)


def test_golden_awm() -> None:
    total, terms = loss_of(replace(AWM, old_weight=0.0))
    assert terms["log_ratio"].exp().tolist() == pytest.approx([0.9272634214, 1.0249322160], abs=1e-9)
    assert float(total) / 2 == pytest.approx(-0.1146723145, abs=1e-9)
    assert terms["old_deviation"].tolist() == pytest.approx([0.0071, 0.0225], abs=1e-12)
    assert float(loss_of(AWM)[0]) == pytest.approx(float(total) + 0.0071 + 0.0225, abs=1e-12)
    assert velocity_kl(doubles(NEW), doubles(REFERENCE)).tolist() == pytest.approx([0.003475, 0.0275], abs=1e-12)
    expected = [0.2715290027, -0.5430580053, 1.086116011, 0.5430580053]
    np.testing.assert_allclose(gradient_of(AWM, OLD)[0].numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("estimator", ["adaptive", "uniform"])
def test_proximal_and_squared_have_one_gradient(estimator: Estimator) -> None:
    proximal, squared = (gradient_of(with_estimator(one, estimator), NEW) for one in (PEPG, PAR))
    torch.testing.assert_close(proximal, squared, rtol=1e-12, atol=1e-15)
    if estimator == "uniform":
        expected = [0.0080124590, -0.0600934425, 0.1001557375, -0.0200311475]
        np.testing.assert_allclose(proximal[0].numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("with_ratio", [True, False])
@pytest.mark.parametrize("objective", [EPG, PEPG, PAR, ELBO_GRPO, NFT, replace(NFT, beta=0.1)])
@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [
        ("adaptive", [0.1066666667, -0.2133333333, 0.4266666667, 0.2133333333], [-0.0375, -0.075, 0.075, -0.1125]),
        ("x0", [0.0072, -0.0144, 0.0288, 0.0144], None),
        ("uniform", [0.02, -0.04, 0.08, 0.04], None),
    ],
)
def test_all_have_one_first_gradient(
    objective: ForwardProcess, estimator: Estimator, first: list[float], second: list[float] | None, with_ratio: bool
) -> None:
    """From ``v = v_old`` it is that of ``A cost``, whatever the objective."""
    found = gradient_of(replace(objective, estimator=estimator, with_ratio=with_ratio), OLD)
    np.testing.assert_allclose(found[0].numpy(), first, atol=1e-9)
    if second is not None:
        np.testing.assert_allclose(found[1].numpy(), second, atol=1e-9)


def test_nft_is_weighted_matching_and_a_distance_to_the_old_policy() -> None:
    """``NFT = A <(x - t v - x0)^2> + (M beta - A) t^2 <(v - v_old)^2> + const``."""
    nft = replace(NFT, estimator="x0", beta=0.7)
    left = float(loss_of(nft)[0] - loss_of(nft, doubles(OLD))[0])
    matching = replace(EPG, estimator="x0", with_ratio=False)
    distance = SIGMA**2 * velocity_kl(doubles(NEW), doubles(OLD)).numpy()
    right = float(loss_of(matching)[0] - loss_of(matching, doubles(OLD))[0])
    right += float(((5 * 0.7 - ADVANTAGE) * distance).sum())
    assert left == pytest.approx(0.0171675, abs=1e-12)
    assert right == pytest.approx(0.0171675, abs=1e-12)


@pytest.mark.parametrize("estimator", ["adaptive", "x0"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mirrored_row_is_nft_bit_for_bit(estimator: Estimator, masked: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, clean, noised = (torch.randn(8, 3, 4, 5, generator=generator).to(dtype) for _ in range(4))
    sigma, value = (torch.rand(8, generator=generator) for _ in range(2))
    mask = torch.rand(8, 1, 4, 5, generator=generator) < 0.5 if masked else None
    weight = torch.tensor([1.0] * 6 + [0.0] * 2)
    losses, gradients = [], []
    for form in ("nft_loss", "row"):
        velocity = new.clone().requires_grad_()
        rows, options = (velocity, old, clean, noised, sigma, value), {"element_mask": mask, "weight_B": weight}
        if form == "nft_loss":
            adaptive = estimator == "adaptive"
            loss, terms = nft_loss(*rows, beta=0.3, scale=5.0, adaptive_weight=adaptive, **options)
        else:
            loss, terms = forward_process_loss(*rows, replace(NFT, estimator=estimator, beta=0.3), **options)
        losses.append(torch.cat([loss.detach()[None], terms["policy_loss"]]))
        gradients += torch.autograd.grad(loss, velocity)
    assert torch.equal(*losses)
    assert torch.equal(*gradients)


def test_padding_counts_for_nothing_even_without_a_reward() -> None:
    for objective in (NFT, EPG, PEPG, PAR, AWM):
        velocity = doubles(NEW).requires_grad_()
        rows = (doubles(OLD), doubles(CLEAN), doubles(NOISED), doubles(SIGMA), doubles([0.8, math.nan]))
        loss, _ = forward_process_loss(velocity, *rows, objective, weight_B=doubles([1.0, 0.0]))
        (gradient,) = torch.autograd.grad(loss, velocity)
        assert bool(loss.isfinite())
        assert not gradient[1].any()
        assert gradient[0].any()


def test_a_distant_policy_stays_finite() -> None:
    for objective in (EPG, PEPG, PAR, AWM):
        velocity = doubles(NEW + 1e6).requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(objective, velocity)[0], velocity)
        assert bool(gradient.isfinite().all())


# ---- a known optimum ------------------------------------------------------------------------------------------------

GRID = torch.linspace(-4.0, 4.0, 161, dtype=torch.float64)
LOG_BASE = torch.log_softmax(-(GRID**2) / 2, 0)
REWARD = torch.sin(2 * GRID) + 0.3 * GRID


def on_the_grid(objective: ForwardProcess, log_new: Tensor, log_old: Tensor, advantage: Tensor) -> Tensor:
    """The expected loss of all points under the old policy. Where clean and noised are 0 at sigma 1, the velocity
    ``sqrt(c - f)`` has the uniform estimate ``f - c``, so that log-densities take the place of velocities."""
    zeros = torch.zeros(len(GRID), 1, dtype=torch.float64)
    new, old = ((100.0 - f).sqrt()[:, None] for f in (log_new, log_old))
    rows = (old, zeros, zeros, torch.ones(len(GRID)).double(), advantage)
    uniform = with_estimator(objective, "uniform")
    return forward_process_loss(new, *rows, uniform, weight_B=torch.softmax(log_old, 0))[0]


def total_variation(log_density: Tensor, target: Tensor) -> float:
    return 0.5 * float((torch.softmax(log_density, 0) - target).abs().sum())


def test_epg_with_a_kl_penalty_has_the_tilt_as_its_optimum() -> None:
    """Natural gradients, each from the policy itself, where the ratio is 1; the penalty is a part of the reward."""
    target, found = torch.softmax(LOG_BASE + REWARD, 0), LOG_BASE.clone()
    assert total_variation(found, target) > 0.3
    for _ in range(60):
        logits = found.clone().requires_grad_()
        log_new = torch.log_softmax(logits, 0)
        value = REWARD - (log_new.detach() - LOG_BASE)
        advantage = value - (log_new.detach().exp() * value).sum()
        (gradient,) = torch.autograd.grad(on_the_grid(EPG, log_new, log_new.detach(), advantage), logits)
        found = found - 0.5 * gradient / log_new.detach().exp()
    assert total_variation(found, target) <= 2e-6


@pytest.mark.parametrize(("eta", "distances"), [(1.0, {1: 0.157, 5: 0.0087, 20: 2.6e-7}), (0.1, {1: 0.306, 5: 0.200})])
@pytest.mark.parametrize("objective", [PAR, PEPG], ids=["par", "pepg"])
def test_proximal_steps_are_the_closed_form_and_lead_to_the_tilt(
    objective: ForwardProcess, eta: float, distances: dict[int, float]
) -> None:
    """``pi' ~ (base e^R)^(eta / (1 + eta)) pi^(1 / (1 + eta))``, golden distances from the limit ``base e^R``."""
    target, old, share = torch.softmax(LOG_BASE + REWARD, 0), LOG_BASE.clone(), eta / (1 + eta)
    for number in range(1, max(distances) + 1):
        advantage, new = share * (LOG_BASE + REWARD - old), old.clone()
        for _ in range(12):  # the gradient is -mass (A - l) times the ratio
            logits = new.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(on_the_grid(objective, logits, old, advantage), logits)
            new = new - gradient / torch.softmax(old, 0) / (new - old).exp()
        closed = torch.softmax(share * (LOG_BASE + REWARD) + (1 - share) * old, 0)
        assert total_variation(new, closed) <= 9e-5
        old = torch.log_softmax(new, 0)
        if number in distances:
            assert total_variation(old, target) == pytest.approx(distances[number], rel=0.02, abs=2e-7)


# ---- the penalty on the norm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("velocity", "expected"), [(NEW, [9.256942626e-4, 0.0]), (1.1 * REFERENCE, [0.03285625, 0.01350625])]
)
def test_golden_norm_penalty(velocity: np.ndarray, expected: list[float]) -> None:
    found = norm_penalty(doubles(velocity), doubles(REFERENCE))
    assert found.tolist() == pytest.approx(expected, abs=1e-11)


def test_golden_norm_ratio_and_its_relative_excess() -> None:
    ratio = norm_ratio(doubles(NEW), doubles(REFERENCE))
    assert ratio.tolist() == pytest.approx([1.0167851331, 0.8628804682], abs=1e-10)
    assert float(ratio[0] - 1) ** 2 == pytest.approx(2.817406924e-4, abs=1e-12)
    velocity = (1.1 * doubles(REFERENCE)).requires_grad_()
    excess = (norm_ratio(velocity, doubles(REFERENCE)) - 1.0) ** 2
    assert excess.tolist() == pytest.approx([0.01, 0.01], abs=1e-12)


def test_the_norm_penalty_pulls_along_the_velocity_and_only_above_the_reference() -> None:
    for factor in (1.0, 0.9, 1.2):
        velocity = (factor * doubles(REFERENCE)).requires_grad_()
        (gradient,) = torch.autograd.grad(norm_penalty(velocity, doubles(REFERENCE)).sum(), velocity)
        size = doubles(REFERENCE).pow(2).mean(1).sqrt()
        excess = max(factor - 1.0, 0.0) * size
        expected = (2 * excess / (2 * velocity.detach().norm(dim=1)))[:, None] * velocity.detach()
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    zero = torch.zeros(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm_penalty(zero, torch.zeros(2, 4)).sum(), zero)
    assert not gradient.any()


def test_the_norm_penalty_keeps_the_direction_of_the_optimum() -> None:
    """``|v - u|^2 + w (|v| - R)+^2``: along ``u``, of the norm ``(|u| + w R) / (1 + w)``."""
    wanted, radius, weight = doubles([[3.0, -4.0, 0.0, 0.0]]), 2.0, 0.5
    reference = doubles([[radius, 0.0, 0.0, 0.0]])
    velocity = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([velocity], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = ((velocity - wanted) ** 2).mean() + weight * norm_penalty(velocity, reference).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    expected = wanted * ((5.0 + weight * radius) / (1.0 + weight) / 5.0)
    torch.testing.assert_close(velocity.detach(), expected, rtol=1e-5, atol=1e-6)
