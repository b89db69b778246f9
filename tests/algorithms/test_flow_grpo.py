"""The loss of Flow-GRPO and its relatives: golden numbers, the first gradient, what the trust regions stop."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_grpo import (
    MaskDirection,
    StepRows,
    TrustRegion,
    flow_grpo_loss,
    is_masked,
    step_divergence,
)
from cosmos_rl.diffusion.kernels import Transition, build_kernel, log_ratio, transition_kl
from tests.algorithms.fixture import NEW, OLD, REFERENCE, XI, doubles

STEP = (0.6, 0.5)
WIDE = TrustRegion(10.0, 10.0)


def transition_of(solver: str, step: tuple[float, float] = STEP) -> Transition:
    noise_level = {"flow": 0.7, "cps": 0.8}[solver]
    return build_kernel(solver, noise_level=noise_level, deterministic=False)(0, [*step, 0.0])


def steps_of(transitions: list[Transition], step: tuple[float, float] = STEP) -> StepRows:
    rows = len(transitions)
    g_B, s_B = (doubles([getattr(one, name) for one in transitions]) for name in ("g", "s"))
    return StepRows(g_B, s_B, doubles([step[0]] * rows), doubles([step[1]] * rows))


def golden_terms(solver: str, advantage: float, region: TrustRegion) -> dict[str, float]:
    """The first row's, from the old to the new velocity."""
    new, old = (doubles(value[:1]) for value in (NEW, OLD))
    steps = steps_of([transition_of(solver)])
    _, terms = flow_grpo_loss(new, old, doubles(XI), steps, doubles([advantage]), region=region)
    return {name: float(value) for name, value in terms.items()}


def test_the_transitions_of_the_golden_numbers() -> None:
    flow, cps = transition_of("flow"), transition_of("cps")
    assert (flow.s, flow.g) == pytest.approx((0.2711088342, -0.1245), abs=1e-10)
    assert (cps.s, cps.g) == pytest.approx((0.4755282581, -0.2381966011), abs=1e-10)


@pytest.mark.parametrize(
    ("solver", "divergence", "ratio"),
    [("flow", 7.486515306e-4, -6.603772425e-3), ("cps", 8.907315052e-4, -7.277327070e-3)],
)
def test_golden_ratio_and_divergence(solver: str, divergence: float, ratio: float) -> None:
    terms = golden_terms(solver, 0.8, WIDE)
    assert terms["step_kl"] == pytest.approx(divergence, abs=1e-12)
    assert terms["step_kl_nats"] == pytest.approx(4 * divergence, abs=1e-12)
    assert terms["log_ratio"] == pytest.approx(ratio, abs=1e-12)
    assert terms["policy_loss"] == pytest.approx(-0.8 * math.exp(ratio), abs=1e-12)
    assert terms["ratio_deviation"] == pytest.approx(1 - math.exp(ratio), abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "threshold", "loss"),
    [(0.8, 1e-9, -0.7947343877), (-0.8, 1e-3, 0.7947343877), (-0.8, 1e-5, 0.0)],
)
def test_golden_mask_is_one_sided(advantage: float, threshold: float, loss: float) -> None:
    terms = golden_terms("flow", advantage, TrustRegion(mask_threshold=threshold))
    assert terms["policy_loss"] == pytest.approx(loss, abs=1e-10)
    assert terms["masked_negative"] == float(loss == 0.0)
    assert terms["masked_positive"] == 0.0


def test_golden_guard() -> None:
    flow = golden_terms("flow", 0.8, TrustRegion(2e-6, 2e-6, scale="guard"))
    assert flow["log_ratio"] == pytest.approx(-1.587375e-3, abs=1e-9)
    assert flow["policy_loss"] == pytest.approx(-7.9873110737, abs=1e-9)
    assert golden_terms("cps", 0.8, TrustRegion(scale="guard"))["log_ratio"] == pytest.approx(
        -3.037006664e-3, abs=1e-11
    )


def test_golden_distance_to_a_teacher() -> None:
    steps = steps_of([transition_of("flow")])
    found = step_divergence(doubles(NEW[:1]), doubles(REFERENCE[:1]), steps)
    assert float(found) == pytest.approx(3.664174745e-4, abs=1e-13)
    std = 0.7 * math.sqrt(STEP[0] / (1 - STEP[0]))  # of the noise in the time 1
    factor = (std * (1 - STEP[0]) / (2 * STEP[0]) + 1 / std) ** 2 / 2
    by_hand = (STEP[0] - STEP[1]) * factor * ((NEW - REFERENCE)[0] ** 2).mean()
    assert float(found) == pytest.approx(by_hand, rel=1e-12)
    assert float(found) * (STEP[0] - STEP[1]) == pytest.approx(3.664174745e-5, abs=1e-14)  # codes without the length
    student = doubles(OLD[:1]).requires_grad_()
    (gradient,) = torch.autograd.grad(step_divergence(student, doubles(REFERENCE[:1]), steps).sum(), student)
    expected = [-0.0026360969, 0.0052721939, -0.0052721939, 0.0052721939]
    np.testing.assert_allclose(gradient[0].numpy(), expected, atol=1e-10)


def first_gradient(region: TrustRegion, transition: Transition, step: tuple[float, float] = STEP) -> Tensor:
    old = doubles(OLD[:1])
    velocity = old.clone().requires_grad_()
    loss, terms = flow_grpo_loss(
        velocity, old, doubles(XI), steps_of([transition], step), doubles([0.8]), region=region
    )
    assert float(terms["log_ratio"]) == 0.0
    return torch.autograd.grad(loss, velocity)[0][0]


@pytest.mark.parametrize(
    "region", [TrustRegion(), WIDE, TrustRegion(mask_threshold=1e-7), TrustRegion(mask_threshold=0.0)]
)
def test_the_first_gradient_is_that_of_reinforce(region: TrustRegion) -> None:
    """Whatever bounds the update, from ``v = v_old``: ``A (1 + a^2 / 2) sqrt(dt (1 - t) / t) / a xi / N``."""
    found = first_gradient(region, transition_of("flow"))
    np.testing.assert_allclose(found.numpy(), [0.0275535101, -0.101029537, 0.0642915236, 0.0183690067], atol=1e-10)
    assert torch.equal(found, first_gradient(WIDE, transition_of("flow")))


@pytest.mark.parametrize("step", [(0.9, 0.8), (0.6, 0.5), (0.4, 0.1)])
def test_the_first_gradient_of_guard_is_the_same_at_every_step(step: tuple[float, float]) -> None:
    """``A (1 + a^2 / 2) xi / N``."""
    found = first_gradient(TrustRegion(scale="guard"), transition_of("flow", step), step)
    np.testing.assert_allclose(found.numpy(), [0.0747, -0.2739, 0.1743, 0.0498], atol=1e-12)


def random_rows(rows: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Transition]]:
    generator = torch.Generator().manual_seed(seed)
    new, old, xi = (torch.randn(rows, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    advantage = torch.randn(rows, generator=generator, dtype=torch.float64)
    solvers = ["flow", "cps"] * (rows // 2)
    return old + 0.3 * new, old, xi, advantage, [transition_of(solver) for solver in solvers]


def reference(scale: str, clip: tuple[float, float], mask: np.ndarray | None) -> np.ndarray:
    """The losses of ``random_rows`` in NumPy, from the densities of the next states themselves."""
    new, old, xi, advantage, transitions = random_rows()
    found = []
    for i, one in enumerate(transitions):
        kept = np.ones((3, 4), bool) if mask is None else np.broadcast_to(mask[i], (3, 4))
        moved = (one.g * (new[i] - old[i])).numpy()[kept]
        noise = xi[i].numpy()[kept]
        following = one.s * noise  # in coordinates where the old mean is 0
        squares = (following**2 - (following - moved) ** 2).mean()
        ratio = {
            "normalised": squares / (2 * one.s**2),
            "unit": squares,
            "ve": squares / (1 - STEP[1]) ** 2,
            "guard": (noise * moved).mean(),
        }[scale]
        a = float(advantage[i])
        loss = max(-a * math.exp(ratio), -a * min(max(math.exp(ratio), 1 - clip[0]), 1 + clip[1]))
        found.append(loss / (STEP[0] - STEP[1] if scale == "guard" else 1.0))
    return np.array(found)


@pytest.mark.parametrize("scale", ["normalised", "unit", "ve", "guard"])
@pytest.mark.parametrize("masked", [False, True])
def test_losses_equal_an_independent_computation(scale: str, masked: bool) -> None:
    new, old, xi, advantage, transitions = random_rows()
    mask = np.random.default_rng(0).random((64, 1, 4)) < 0.6 if masked else None
    if mask is not None:
        mask[:, :, 0] = True
    _, terms = flow_grpo_loss(
        new,
        old,
        xi,
        steps_of(transitions),
        advantage,
        region=replace(TrustRegion(0.02, 0.05), scale=scale),
        element_mask=None if mask is None else torch.from_numpy(mask),
    )
    expected = reference(scale, (0.02, 0.05), mask)
    np.testing.assert_allclose(terms["policy_loss"].numpy(), expected, rtol=1e-10)
    assert 0 < float(terms["clipped"].sum()) < 64


def test_each_row_has_its_own_step() -> None:
    new, old, xi, advantage, transitions = random_rows()
    _, terms = flow_grpo_loss(new, old, xi, steps_of(transitions), advantage, region=WIDE)
    for i in (0, 1):
        one = slice(i, i + 1)
        assert float(terms["log_ratio"][i]) == pytest.approx(
            float(log_ratio(new[one], old[one], xi[one], transitions[i]))
        )
        assert float(terms["step_kl"][i]) == pytest.approx(float(transition_kl(new[one], old[one], transitions[i])))


def test_a_clipped_row_has_no_gradient_and_one_that_moves_back_has() -> None:
    new, old, xi, advantage, transitions = random_rows()
    velocity = new.clone().requires_grad_()
    loss, terms = flow_grpo_loss(velocity, old, xi, steps_of(transitions), advantage, region=TrustRegion(1e-12, 1e-12))
    (gradient,) = torch.autograd.grad(loss, velocity)
    moving_away = terms["log_ratio"] * advantage > 0
    assert torch.equal(terms["clipped"].bool(), moving_away)
    assert torch.equal(gradient.flatten(1).abs().amax(1) == 0, moving_away)


def test_directions_of_the_mask() -> None:
    """Between 0 and ``D`` the two disagree: there the ratio has risen, and the means have come closer."""
    cross, divergence = doubles([3.0, 1.5, 0.5, 1.5]), doubles([1.0, 1.0, 1.0, 0.1])
    for sign in (1.0, -1.0):
        advantage = doubles([sign] * 4)
        by_ratio = is_masked(cross, divergence, advantage, 0.5, "ratio").tolist()
        first_order = is_masked(cross, divergence, advantage, 0.5, "first_order").tolist()
        assert by_ratio == [sign > 0, sign > 0, sign < 0, False]
        assert first_order == [sign > 0, sign < 0, sign < 0, False]


def test_the_first_order_direction_is_the_sign_of_the_change_of_the_divergence() -> None:
    new, old, xi, advantage, transitions = random_rows()
    steps = steps_of(transitions)
    velocity = new.clone().requires_grad_()
    loss, terms = flow_grpo_loss(velocity, old, xi, steps, advantage, region=TrustRegion(1e9, 1e9))
    (gradient,) = torch.autograd.grad(loss, velocity)
    before, after = (step_divergence(v, old, steps) for v in (new, new - 1e-6 * gradient))
    cross = terms["log_ratio"] + terms["step_kl"]
    found = is_masked(cross, terms["step_kl"], advantage, 0.0, "first_order")
    assert torch.equal(found, after > before)


def test_an_infinite_ratio_that_is_masked_has_a_finite_gradient() -> None:
    velocity, old = torch.full((1, 4), -1e3).requires_grad_(), torch.zeros(1, 4)
    steps = steps_of([Transition(1.0, -1.0, s=0.1)])
    region = TrustRegion(mask_threshold=1e-5)
    loss, terms = flow_grpo_loss(velocity, old, torch.full((1, 4), 1e5), steps, torch.ones(1), region=region)
    (gradient,) = torch.autograd.grad(loss, velocity)
    assert float(terms["log_ratio"]) > 1e6
    assert not gradient.any()
    assert float(loss.detach()) == 0.0


def test_padding_counts_for_nothing_even_without_a_reward() -> None:
    new, old, xi, advantage, transitions = random_rows()
    weight = torch.ones(64).double()
    weight[1], advantage[1] = 0.0, math.nan
    velocity = new.clone().requires_grad_()
    loss, _ = flow_grpo_loss(velocity, old, xi, steps_of(transitions), advantage, region=TrustRegion(), weight_B=weight)
    (gradient,) = torch.autograd.grad(loss, velocity)
    assert bool(loss.isfinite())
    assert not gradient[1].any()
    assert gradient[0].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    new, old, xi, advantage, transitions = random_rows()
    steps = steps_of(transitions)
    with pytest.raises(ValueError, match="one value per row"):
        flow_grpo_loss(new, old, xi, steps, advantage[:, None], region=WIDE)
    with pytest.raises(ValueError, match="of one shape"):
        flow_grpo_loss(new, old[:1], xi, steps, advantage, region=WIDE)


def test_the_policy_gradient_of_a_gaussian_is_the_analytic_one() -> None:
    """``z' ~ N(g v, s^2)``, reward ``z'``: the gradient of its mean in ``v`` is ``g``, within three standard errors."""
    rows, transition = 200_000, Transition(1.0, -0.4, s=0.5)
    xi = torch.randn(rows, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    velocity = torch.zeros(rows, 1, dtype=torch.float64, requires_grad=True)
    loss, _ = flow_grpo_loss(
        velocity, velocity.detach(), xi, steps_of([transition] * rows), transition.s * xi[:, 0], region=TrustRegion()
    )
    (gradient,) = torch.autograd.grad(-loss, velocity)
    assert float(gradient.mean()) == pytest.approx(-0.4, abs=3 * float(gradient.std()) / math.sqrt(rows))


@pytest.mark.parametrize("direction", ["ratio", "first_order"])
def test_a_mask_stops_near_its_threshold_and_lets_the_way_back_open(direction: MaskDirection) -> None:
    """Repeated steps on one batch: the divergence stops just above the threshold, and falls when advantages turn."""
    threshold, steps = 1e-3, steps_of([transition_of("flow")] * 4)
    xi = torch.randn(4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    old, advantage = torch.zeros(4, 16, dtype=torch.float64), doubles([1.0, 1.0, -1.0, -1.0])
    region = TrustRegion(mask_threshold=threshold, mask_direction=direction)
    velocity, seen = old.clone().requires_grad_(), []
    for number in range(200):
        signs = advantage if number < 100 else -advantage
        loss, terms = flow_grpo_loss(velocity, old, xi, steps, signs, region=region)
        (gradient,) = torch.autograd.grad(loss, velocity)
        velocity = (velocity - 0.05 * gradient).detach().requires_grad_()
        seen.append(terms["step_kl"])
    assert bool((seen[99] > threshold).all())
    assert bool((seen[99] < 1.3 * threshold).all())
    assert torch.equal(seen[99], seen[90])  # nothing moves any more
    assert bool((torch.stack(seen[100:]).amin(0) < 0.1 * threshold).all())


def test_the_gradient_is_that_of_the_expected_reward() -> None:
    """A linear policy ``v = w z + b`` keeps Gaussian noise Gaussian, so the expected reward and its gradient are known.
    The last step has no noise and so no gradient: its velocity is that of fixed w and b."""
    count, w, b = 40_000, -0.4, 0.3
    levels, generator = [1.0, 0.8, 0.5, 0.2, 0.0], torch.Generator().manual_seed(0)
    kernel = build_kernel("flow", noise_level=0.7, deterministic=False)
    transitions = [kernel(index, levels) for index in range(4)]

    def expected(w_and_b: Tensor) -> Tensor:
        mean, variance = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        for step, (slope, offset) in zip(transitions, [w_and_b] * 3 + [w_and_b.detach()], strict=True):
            mean, variance = (
                (step.a + step.g * slope) * mean + step.g * offset,
                (step.a + step.g * slope) ** 2 * variance,
            )
            variance = variance + step.s**2
        return -((mean - 1) ** 2) - variance

    point = torch.tensor([w, b], dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(expected(point), point)

    z = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    states, draws = [], []
    for step in transitions:
        xi = torch.randn(count, 1, generator=generator, dtype=torch.float64)
        states.append(z)
        draws.append(xi)
        z = step.a * z + step.g * (w * z + b) + step.s * xi
    reward = -((z[:, 0] - 1) ** 2)
    chance = 3 * float(reward.std()) / count**0.5
    assert float(reward.mean()) == pytest.approx(float(expected(point).detach()), abs=chance)
    found = torch.zeros(count, 2, dtype=torch.float64)  # of each sample
    for index in range(3):
        velocity = (w * states[index] + b).requires_grad_()
        steps = steps_of([transitions[index]] * count, (levels[index], levels[index + 1]))
        advantage = reward - reward.mean()
        loss, _ = flow_grpo_loss(velocity, velocity.detach(), draws[index], steps, advantage, region=TrustRegion())
        (of_velocity,) = torch.autograd.grad(loss, velocity)
        found -= of_velocity * torch.cat([states[index], torch.ones_like(z)], dim=1)
    errors = found.std(0) / count**0.5
    assert bool((exact.abs() > 20 * errors).all())
    assert bool(((found.mean(0) - exact).abs() <= 3 * errors).all())
