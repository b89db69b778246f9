"""The DiffusionNFT loss against golden numbers, its minimiser, its gradients and the optimum it promises."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.algorithms.advantage import optimality
from cosmos_rl.algorithms.decay import old_policy_decay
from cosmos_rl.algorithms.nft import nft_loss, velocity_kl

ROWS = ("velocity", "velocity_old", "clean", "noised", "sigma_B", "optimality_B")


def doubles(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def golden_case() -> dict[str, Tensor]:
    clean, sigma = doubles([[0.5, -1.0], [1.5, 0.25]]), doubles([0.8, 0.25])
    noise = doubles([[1.0, 0.0], [-0.5, 2.0]])
    return {
        "velocity": doubles([[0.4, 0.9], [-1.8, 1.6]]),
        "velocity_old": doubles([[0.3, 0.7], [-1.5, 1.0]]),
        "clean": clean,
        "noised": (1 - sigma[:, None]) * clean + sigma[:, None] * noise,
        "sigma_B": sigma,
        "optimality_B": optimality(doubles([2.0, -1.0]), -5.0, 5.0),
    }


def random_case(rows: int = 8, shape: tuple[int, ...] = (2, 3, 4), seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    clean, old = draw(rows, *shape), draw(rows, *shape)
    sigma = torch.rand(rows, generator=generator, dtype=torch.float64) * 0.9 + 0.1
    wide = sigma.reshape(-1, *[1] * len(shape))
    return {
        "velocity": old + 0.3 * draw(rows, *shape),
        "velocity_old": old,
        "clean": clean,
        "noised": (1 - wide) * clean + wide * draw(rows, *shape),
        "sigma_B": sigma,
        "optimality_B": torch.rand(rows, generator=generator, dtype=torch.float64),
    }


@dataclass(frozen=True)
class Found:
    """What ``nft_loss`` gives, and the sum of the row weights."""

    loss_sum: Tensor
    weight: Tensor
    terms: dict[str, Tensor]


def loss_of(case: dict[str, Tensor], **options: Any) -> Found:
    loss_sum, terms = nft_loss(*(case[name] for name in ROWS), **options)
    return Found(loss_sum, options.get("weight_B", torch.ones_like(case["sigma_B"])).sum(), terms)


def gradient_of(case: dict[str, Tensor], **options: Any) -> Tensor:
    velocity = case["velocity"].detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(loss_of({**case, "velocity": velocity}, **options).loss_sum, velocity)
    return found


@pytest.mark.parametrize(
    ("beta", "rows", "policy", "with_kl"),
    [
        (1.0, [0.158, 0.1896595], 0.8691487, 0.8691617),
        (0.1, [2.0276515, 1.6497427], 9.1934855, 9.1934986),
    ],
)
def test_golden_numbers(beta: float, rows: list[float], policy: float, with_kl: float) -> None:
    case = golden_case()
    np.testing.assert_allclose(case["noised"].numpy(), [[0.9, -0.2], [1.0, 0.6875]], rtol=1e-12)
    terms = loss_of(case, beta=beta, scale=5.0)
    kl = velocity_kl(case["velocity"], doubles([[0.25, 0.6], [-1.4, 1.1]]))
    assert terms.terms["unweighted_policy_loss"].tolist() == pytest.approx(rows, abs=1e-7)
    assert terms.terms["policy_loss"].tolist() == pytest.approx([5 * row for row in rows], abs=5e-7)
    assert float(terms.weight) == 2.0
    assert float(terms.loss_sum / terms.weight) == pytest.approx(policy, abs=1e-7)
    assert float(kl.mean()) == pytest.approx(0.130625, abs=1e-12)
    assert float((terms.loss_sum + 1e-4 * kl.sum()) / terms.weight) == pytest.approx(with_kl, abs=1e-7)


def test_diagnostics_by_hand() -> None:
    terms = loss_of(golden_case(), beta=1.0, scale=5.0)
    assert terms.terms["x0_norm"].tolist() == pytest.approx([0.625, 1.15625])
    assert terms.terms["x0_norm_max"].tolist() == [1.0, 2.25]
    assert terms.terms["old_deviation"].tolist() == pytest.approx([0.025, 0.225])
    assert terms.terms["old_deviation_max"].tolist() == pytest.approx([0.04, 0.36])


def test_diagnostics_have_no_gradient() -> None:
    case = {**golden_case(), "velocity": golden_case()["velocity"].requires_grad_()}
    found = loss_of(case, beta=1.0, scale=5.0)
    assert found.loss_sum.requires_grad
    assert not any(value.requires_grad for value in found.terms.values())


@pytest.mark.parametrize("r", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_the_minimiser_of_one_row(beta: float, r: float) -> None:
    """Without weighting the best ``v - v_old`` is ``(2 r - 1) u / beta`` with ``u = noise - clean - v_old``."""
    case = random_case(rows=1)
    sigma = case["sigma_B"].reshape(1, 1, 1, 1)
    u = (case["noised"] - case["clean"]) / sigma - case["velocity_old"]
    case["optimality_B"] = doubles([r])
    case["velocity"] = case["velocity_old"] + (2 * r - 1) / beta * u
    plain: dict[str, Any] = {"beta": beta, "scale": 1.0, "adaptive_weight": False}
    assert float(gradient_of(case, **plain).abs().max()) < 1e-6
    best = float(loss_of(case, **plain).loss_sum)
    # 4 r (1 - r) |u|^2 by the paper's formula; ours is that times sigma^2 / beta, mean over elements
    assert best == pytest.approx(float(4 * r * (1 - r) * (u**2).mean() * sigma**2 / beta), rel=1e-6, abs=1e-12)
    for direction in (u, torch.ones_like(u)):
        assert float(loss_of({**case, "velocity": case["velocity"] + 0.1 * direction}, **plain).loss_sum) > best


@pytest.mark.parametrize("adaptive_weight", [True, False])
def test_an_average_sample_has_no_gradient_at_the_old_policy(adaptive_weight: bool) -> None:
    case = random_case()
    case["velocity"], case["optimality_B"] = case["velocity_old"], torch.full((8,), 0.5).double()
    assert float(gradient_of(case, beta=0.7, scale=5.0, adaptive_weight=adaptive_weight).abs().max()) < 1e-15


@pytest.mark.parametrize(("beta", "high"), [(1.0, 5.0), (0.1, 5.0), (0.4, 2.0)])
def test_the_first_gradient_is_that_of_advantage_weighted_matching(beta: float, high: float) -> None:
    case = random_case()
    advantage = torch.linspace(-2, 2, 8, dtype=torch.float64)
    case["velocity"], case["optimality_B"] = case["velocity_old"], optimality(advantage, -high, high)
    velocity = case["velocity_old"].clone().requires_grad_()
    wide = case["sigma_B"].reshape(-1, 1, 1, 1)
    target = (case["noised"] - case["clean"]) / wide
    matching = (advantage * ((velocity - target) ** 2).flatten(1).mean(1)).sum()
    (expected,) = torch.autograd.grad(matching, velocity)
    # the paper's loss is ours without sigma^2 and scale / beta, and its gradient is (beta / high) of matching's
    ours = gradient_of(case, beta=beta, scale=high, adaptive_weight=False) / wide**2 * beta / high
    torch.testing.assert_close(ours, beta / high * expected, rtol=1e-6, atol=1e-12)
    # with weighting: -2 sigma A (prediction - clean) / w per element, whatever beta and the bound
    error = case["noised"] - wide * case["velocity_old"] - case["clean"]
    size = error.abs().flatten(1).mean(1).reshape(-1, 1, 1, 1)
    by_hand = -2 * wide * advantage.reshape(-1, 1, 1, 1) * error / size / error[0].numel()
    torch.testing.assert_close(gradient_of(case, beta=beta, scale=high), by_hand, rtol=1e-6, atol=1e-12)


def test_the_gradient_is_that_of_finite_differences_with_the_weight_held() -> None:
    case = random_case(rows=2, shape=(3, 2))
    beta, scale = 0.6, 5.0
    v, old, clean, noised = (case[name].numpy() for name in ROWS[:4])
    sigma, r = case["sigma_B"].numpy()[:, None, None], case["optimality_B"].numpy()

    def errors(velocity: np.ndarray) -> list[np.ndarray]:
        good, bad = (1 - beta) * old + beta * velocity, (1 + beta) * old - beta * velocity
        return [noised - sigma * branch - clean for branch in (good, bad)]

    held = [np.abs(error).mean((1, 2), keepdims=True) for error in errors(v)]

    def loss(velocity: np.ndarray) -> float:
        good, bad = (((e**2) / w).mean((1, 2)) for e, w in zip(errors(velocity), held, strict=True))
        return float(scale * ((r * good + (1 - r) * bad) / beta).sum())

    assert float(loss_of(case, beta=beta, scale=scale).loss_sum) == pytest.approx(loss(v), rel=1e-12)
    numeric, step = np.zeros_like(v), 1e-5
    for place in np.ndindex(v.shape):
        nudge = np.zeros_like(v)
        nudge[place] = step
        numeric[place] = (loss(v + nudge) - loss(v - nudge)) / (2 * step)
    np.testing.assert_allclose(gradient_of(case, beta=beta, scale=scale).numpy(), numeric, rtol=1e-4, atol=1e-7)


def test_a_perfect_prediction_is_weighted_by_the_floor() -> None:
    case = golden_case()
    case["velocity"] = case["velocity_old"] = (case["noised"] - case["clean"]) / case["sigma_B"][:, None]
    shifted = {**case, "velocity_old": case["velocity_old"] + 1e-7, "velocity": case["velocity"] + 1e-7}
    assert float(loss_of(case, beta=1.0, scale=1.0).loss_sum) < 1e-20
    expected = sum((float(s) * 1e-7) ** 2 / 1e-5 for s in case["sigma_B"])
    assert float(loss_of(shifted, beta=1.0, scale=1.0).loss_sum) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_micro_batches_change_neither_gradient_nor_loss(size: int, dtype: torch.dtype) -> None:
    """The weights come from one small linear model, so that gradients add up over rows."""
    case = {name: value.to(dtype) for name, value in random_case(rows=8).items()}
    reference = torch.zeros_like(case["velocity"])
    row_weight = torch.tensor([1, 1, 0, 1, 1, 0.5, 1, 1], dtype=dtype)

    def train(step: int) -> tuple[Tensor, float]:
        model = torch.nn.Linear(4, 4, dtype=dtype)
        torch.nn.init.eye_(model.weight)
        torch.nn.init.constant_(model.bias, 0.1)
        total, weight = 0.0, 0.0
        for start in range(0, 8, step):
            rows = slice(start, start + step)
            part = {name: value[rows] for name, value in case.items()}
            part["velocity"] = model(part["velocity"])
            terms = loss_of(part, beta=0.5, scale=5.0, weight_B=row_weight[rows])
            kl = (velocity_kl(part["velocity"], reference[rows]) * row_weight[rows]).sum()
            (terms.loss_sum + 0.1 * kl).backward()
            total, weight = total + float(terms.loss_sum.detach()), weight + float(terms.weight)
        assert model.weight.grad is not None
        assert weight == 6.5
        return model.weight.grad / weight, total / weight

    whole, split = train(8), train(size)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(split[0], whole[0], rtol=tolerance, atol=tolerance)
    assert split[1] == pytest.approx(whole[1], rel=tolerance)


def test_rows_of_weight_0_count_nothing_even_without_a_reward() -> None:
    case = random_case(rows=3)
    case["optimality_B"][1] = torch.nan
    weight = doubles([1.0, 0.0, 2.0])
    terms = loss_of(case, beta=0.5, scale=5.0, weight_B=weight)
    there = loss_of({name: value[[0, 2]] for name, value in case.items()}, beta=0.5, scale=5.0, weight_B=weight[[0, 2]])
    assert float(terms.weight) == float(there.weight) == 3.0
    assert float(terms.loss_sum) == pytest.approx(float(there.loss_sum), rel=1e-12)
    gradient = gradient_of(case, beta=0.5, scale=5.0, weight_B=weight)
    assert gradient.isfinite().all()
    assert float(gradient[1].abs().max()) == 0.0


@pytest.mark.parametrize("adaptive_weight", [True, False])
def test_a_mask_counts_only_its_elements(adaptive_weight: bool) -> None:
    case = random_case(rows=2, shape=(3, 4, 5))
    mask = torch.zeros(2, 1, 4, 1)
    mask[:, :, 1:] = 1  # the first row of each image does not count
    case["clean"][:, :, 0] = 100.0
    inside = {name: value[:, :, 1:] if value.ndim == 4 else value for name, value in case.items()}
    options: dict[str, Any] = {"beta": 0.5, "scale": 5.0, "adaptive_weight": adaptive_weight}
    masked, cut = vars(loss_of(case, element_mask=mask, **options)), vars(loss_of(inside, **options))
    for name, value in cut.items():
        torch.testing.assert_close(masked[name], value, rtol=1e-12, atol=1e-12)
    assert float(gradient_of(case, element_mask=mask, **options)[:, :, 0].abs().max()) == 0.0
    v, old = case["velocity"], case["velocity_old"]
    torch.testing.assert_close(velocity_kl(v, old, mask), velocity_kl(v[:, :, 1:], old[:, :, 1:]), rtol=1e-12, atol=0)


def test_half_precision_is_computed_in_float32() -> None:
    case = {name: value.to(torch.bfloat16) for name, value in random_case().items()}
    case["sigma_B"], case["optimality_B"] = case["sigma_B"].float(), case["optimality_B"].float()
    terms = loss_of(case, beta=0.5, scale=5.0)
    exact = loss_of({name: value.double() for name, value in case.items()}, beta=0.5, scale=5.0)
    assert {value.dtype for value in (terms.loss_sum, *terms.terms.values())} == {torch.float32}
    assert velocity_kl(case["velocity"], case["velocity_old"]).dtype == torch.float32
    np.testing.assert_allclose(terms.terms["policy_loss"].numpy(), exact.terms["policy_loss"].numpy(), rtol=1e-5)


@pytest.mark.parametrize("name", ["sigma_B", "optimality_B", "weight_B"])
@pytest.mark.parametrize("shape", [(8, 1), (1,), (1, 8), ()])
def test_values_per_row_are_never_broadcast(name: str, shape: tuple[int, ...]) -> None:
    options: dict[str, Any] = {"beta": 1.0, "scale": 5.0}
    case = random_case()
    (options if name == "weight_B" else case)[name] = torch.full(shape, 0.5).double()
    with pytest.raises(ValueError, match=r"one value per row, \[8\], found"):
        loss_of(case, **options)


@pytest.mark.parametrize("name", ROWS[1:4])
def test_tensors_of_another_shape_are_refused(name: str) -> None:
    case = random_case()
    case[name] = case[name][:1]
    with pytest.raises(ValueError, match=r"all of one shape \[B, C, \.\.\.\], found \["):
        loss_of(case, beta=1.0, scale=5.0)
    with pytest.raises(ValueError, match=r"all of one shape"):
        velocity_kl(case["velocity"], case["velocity"][:1])


MEANS = doubles([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
STD, PEAK = 0.5, doubles([1.6, 1.6])


def posterior(x: Tensor, t: float) -> tuple[Tensor, Tensor, float]:
    """Clean samples of a mixture of four Gaussians given the noised one ``x`` ``[2]``.

    Returns the four weights, their means ``[4, 2]`` and the variance per axis.
    """
    variance = (1 - t) ** 2 * STD**2 + t**2
    d = x - (1 - t) * MEANS
    weights = torch.softmax(-(d**2).sum(1) / (2 * variance), 0)
    return weights, MEANS + (1 - t) * STD**2 / variance * d, STD**2 * t**2 / variance


def correction(x: Tensor, t: float) -> Tensor:
    """``Cov(r, v)`` given ``x`` for ``r = exp(-|clean - PEAK|^2 / 2)``; it is -Cov(r, clean) / t."""
    weights, means, variance = posterior(x, t)
    reward = torch.exp(-((means - PEAK) ** 2).sum(1) / (2 * (1 + variance))) / (1 + variance)
    tilted = (means + variance * PEAK) / (1 + variance)
    joint = (weights * reward)[:, None] * tilted
    return -(joint.sum(0) - (weights * reward).sum() * (weights[:, None] * means).sum(0)) / t


def best_change(x: Tensor, t: float, beta: float, draws: int, generator: torch.Generator) -> Tensor:
    """``v - v_old`` with the least loss over samples that lead to ``x`` and their rewards."""
    weights, means, variance = posterior(x, t)
    which = torch.multinomial(weights, draws, replacement=True, generator=generator)
    clean = means[which] + math.sqrt(variance) * torch.randn(draws, 2, generator=generator, dtype=torch.float64)
    old = (x - (weights[:, None] * means).sum(0)) / t
    case = {
        "velocity_old": old.expand(draws, 2),
        "clean": clean,
        "noised": x.expand(draws, 2),
        "sigma_B": torch.full((draws,), t).double(),
        "optimality_B": torch.exp(-((clean - PEAK) ** 2).sum(1) / 2),
    }
    change = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([change], line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def loss() -> Tensor:
        optimiser.zero_grad()
        terms = loss_of(
            {**case, "velocity": old + change.expand(draws, 2)}, beta=beta, scale=1.0, adaptive_weight=False
        )
        mean = terms.loss_sum / terms.weight
        mean.backward()
        return mean.detach()

    optimiser.step(loss)
    return change.detach()


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_the_loss_is_minimal_at_the_promised_velocity(beta: float) -> None:
    """In function space ``v = v_old + (2 / beta) Cov(r, v)``, the covariance over all samples that lead to ``x``."""
    generator = torch.Generator().manual_seed(1)
    places = [(doubles(x), t) for x, t in (([1.0, 1.0], 0.5), ([0.3, 1.2], 0.7), ([1.5, 0.4], 0.3), ([-0.2, 0.9], 0.9))]
    expected = torch.stack([2 / beta * correction(x, t) for x, t in places])
    found = torch.stack([best_change(x, t, beta, 400_000, generator) for x, t in places])
    assert float((found - expected).norm() / expected.norm()) < 0.02  # 0.6 % is the spread of 400,000 draws


def test_decay_of_the_old_policy() -> None:
    assert [old_policy_decay(0, k) for k in (1, 1000)] == [0.0, 0.0]
    assert [old_policy_decay(1, k) for k in (1, 100, 499, 500, 501, 9000)] == pytest.approx(
        [0.001, 0.1, 0.499, 0.5, 0.5, 0.5], abs=1e-12
    )
    assert [old_policy_decay(2, k) for k in (1, 74, 75, 76, 100, 208, 209, 5000)] == pytest.approx(
        [0.0, 0.0, 0.0, 0.0075, 0.1875, 0.9975, 0.999, 0.999], abs=1e-12
    )
    with pytest.raises(ValueError, match=r"decay kind: found 3; allowed: 0, 1, 2"):
        old_policy_decay(3, 1)
