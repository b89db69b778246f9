"""Transition kernels against an independent NumPy computation, closed forms and known marginals."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from cosmos_rl.diffusion.kernels import (
    Kernel,
    Transition,
    apply_transition,
    build_kernel,
    cps,
    dance,
    ddim,
    dpm2,
    euler,
    flow,
    flow_linear,
    log_ratio,
    predict_clean,
    read_sigmas,
    stock_step,
    transition_kl,
    transition_log_prob,
)
from cosmos_rl.diffusion.sampling import Sampled, run_sampling
from tests.support.kernels import HARD, QUARTERS, noisy, noisy_kernel, seeded


def reference(
    name: str, levels: list[float], i: int, eta: float, x: np.ndarray, v: np.ndarray, before: np.ndarray
) -> tuple[np.ndarray, float]:
    """Mean and deviation of a step by the formulas in terms of the clean prediction, the score and the log-SNR."""
    s, u = levels[i], levels[i + 1]
    dt, clean = u - s, x - s * v
    if i == len(levels) - 2:  # first order, no noise: what is left of the noise goes
        return (1 - u) * clean + u * (x + (1 - s) * v), 0.0
    if name == "flow":
        q = eta * math.sqrt(s / (1 - (levels[1] if s == 1 else s)))
        return x * (1 + q**2 / (2 * s) * dt) + v * (1 + q**2 * (1 - s) / (2 * s)) * dt, q * math.sqrt(-dt)
    if name in ("dance", "flow_linear"):
        score = -(x - (1 - s) * clean) / s**2
        q = eta if name == "dance" else eta * (levels[-1] + (levels[1] - levels[-1]) * s)
        return x + dt * v - q**2 / 2 * score * dt, q * math.sqrt(s - u)
    if name == "cps":
        rho = u * math.sin(eta * math.pi / 2)
        return (1 - u) * clean + math.sqrt(u**2 - rho**2) * (x + (1 - s) * v), rho
    if name == "ddim":
        rho = eta * u * math.sqrt(1 - u**2 * (1 - s) ** 2 / (s**2 * (1 - u) ** 2))
        return (1 - u) * clean + math.sqrt(u**2 - rho**2) * (x - (1 - s) * clean) / s, rho
    if s == 1:  # the log-SNR is minus infinity
        return u * x + (1 - u) * clean, 0.0
    h = math.log((1 - u) / u) - math.log((1 - s) / s)
    target = clean
    if name == "dpm2" and i > 0 and levels[i - 1] < 1:
        h_before = math.log((1 - s) / s) - math.log((1 - levels[i - 1]) / levels[i - 1])
        target = clean + 0.5 * (clean - before) / (h_before / h)
    return u / s * x - (1 - u) * (math.exp(-h) - 1) * target, 0.0


@pytest.mark.parametrize("name", ["flow", "flow_linear", "dance", "ddim", "cps", "dpm1", "dpm2"])
@pytest.mark.parametrize("levels", [QUARTERS, HARD, [0.97, 0.8, 0.55, 0.3, 0.12, 0.04, 0.0]], ids=len)
@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
def test_a_step_equals_an_independent_computation(name: str, levels: list[float], eta: float) -> None:
    kernel = build_kernel(name, noise_level=eta, deterministic=name.startswith("dpm"))
    for index in range(len(levels) - 1):
        x, v, before = (seeded(2, 3, 4, seed=10 * index + k) for k in range(3))
        mean, deviation = reference(name, levels, index, eta, x.numpy(), v.numpy(), before.numpy())
        transition = kernel(index, levels)
        assert transition is not None
        np.testing.assert_allclose(transition.mean(x, v, before).numpy(), mean, rtol=0, atol=1e-12)
        assert transition.s == pytest.approx(deviation, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "states"),
    [
        *(
            (n, [0.359375, -1.9375, 0.189453, -1.820312, 0.103271, -1.655273])
            for n in ("flow", "flow_linear", "ddim", "cps", "dpm1", "euler")
        ),
        ("dpm2", [0.359375, -1.9375, 0.237305, -1.792969, 0.145142, -1.631348]),
    ],
)
def test_deterministic_states_are_the_golden_ones(name: str, states: list[float]) -> None:
    kernel = build_kernel(name, noise_level=0.7, deterministic=True)
    sampled = run_sampling(
        lambda x, sigma: 0.5 * x + sigma[:, None],
        torch.tensor([[1.0, -2.0]]),
        torch.tensor(QUARTERS),
        kernel=kernel,
        keep_trajectory=True,
    )
    found = torch.cat([state.flatten() for state in sampled.trajectory])
    np.testing.assert_allclose(found.numpy(), [1.0, -2.0, 0.625, -2.0, *states], rtol=0, atol=6e-7)
    assert sampled.log_probs == (None,) * 4


@pytest.mark.parametrize(
    ("kernel", "golden"),
    # the second is its squares, -0.124845, plus the constants of a Gaussian with deviation 0.7 / 2
    [
        (noisy_kernel("flow", 0.7), -0.445975),
        (noisy_kernel("dance", 0.7), -0.124845 - math.log(0.35) - 0.5 * math.log(2 * math.pi)),
        (noisy_kernel("ddim", 0.7), 0.136551),
    ],
)
def test_log_probabilities_are_the_golden_ones(kernel: Kernel, golden: float) -> None:
    x, v, following = (torch.tensor([p]).double() for p in ([1.0, -2.0], [0.5, -1.0], [0.6, -1.4]))
    found = transition_log_prob(following, x, v, kernel(1, QUARTERS))
    assert found.shape == (1,)
    assert float(found) == pytest.approx(golden, abs=1e-6)


@noisy
def test_noise_level_0_is_the_euler_step_exactly(solver: str) -> None:
    x, v = seeded(3, 4, 5, dtype=torch.float32), seeded(3, 4, 5, seed=1, dtype=torch.float32)
    for levels in (QUARTERS, HARD):
        for index in range(4):
            assert noisy_kernel(solver, 0.0)(index, levels) == euler(index, levels)
            moved = apply_transition(noisy_kernel(solver, 0.0)(index, levels), x, v)
            assert torch.equal(moved, x + (levels[index + 1] - levels[index]) * v)
            assert torch.equal(moved, apply_transition(euler(index, levels), x, v))


def test_euler_in_bfloat16_is_the_schedulers_step() -> None:
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    levels = read_sigmas(scheduler, 6).double().tolist()
    x, v = seeded(2, 3, dtype=torch.bfloat16), seeded(2, 3, seed=1, dtype=torch.bfloat16)
    for index, timestep in enumerate(scheduler.timesteps):
        stock = scheduler.step(v, timestep, x, return_dict=False)[0]
        assert torch.equal(apply_transition(euler(index, levels), x, v), stock)


def test_the_euler_step_keeps_float64() -> None:
    x, v = torch.tensor([[1.0 + 1e-12]], dtype=torch.float64), torch.tensor([[1e-9]], dtype=torch.float64)
    moved = apply_transition(euler(0, [0.5, 0.25]), x, v)
    assert moved.item() == pytest.approx(1.0 + 1e-12 - 0.25e-9, rel=1e-15)


def sample(kernel: Kernel, levels: list[float], dtype: torch.dtype = torch.float32) -> tuple[Sampled, list[Tensor]]:
    """A run with random velocities, and these velocities."""
    velocities = [seeded(2, 3, 8, seed=100 + k, dtype=dtype) for k in range(len(levels) - 1)]
    calls = iter(velocities)
    sampled = run_sampling(
        lambda x, sigma: next(calls),
        seeded(2, 3, 8, dtype=dtype),
        torch.tensor(levels),
        kernel=kernel,
        noise_fn=lambda index: seeded(2, 3, 8, seed=200 + index, dtype=torch.float32),
        keep_trajectory=True,
    )
    return sampled, velocities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eta", [0.0, 0.7, 1.0])
@noisy
def test_a_start_at_sigma_1_and_an_end_at_0_stay_finite(solver: str, eta: float, dtype: torch.dtype) -> None:
    kernel = noisy_kernel(solver, eta)
    sampled, velocities = sample(kernel, HARD, dtype)
    assert len(sampled.trajectory) == 5
    assert all(state.dtype == dtype and state.isfinite().all() for state in sampled.trajectory)
    assert all(math.isfinite(c) for i in range(4) for c in vars(kernel(i, HARD)).values())
    if eta == 0.0:
        assert sampled.log_probs == (None,) * 4
        return
    assert sampled.log_probs[3] is None  # the last step has no noise
    levels = torch.tensor(HARD).double().tolist()
    for index, log_prob in enumerate(sampled.log_probs[:3]):
        transition = kernel(index, levels)
        z, following = sampled.trajectory[index], sampled.trajectory[index + 1]
        # one deviation for the draw, the log-probability and the KL; the state that is scored is a rounded one
        xi = (following.double() - transition.mean(z.double(), velocities[index].double())) / transition.s
        rounding = 2 * torch.finfo(dtype).eps * float(following.abs().max()) / transition.s
        assert float((xi - seeded(2, 3, 8, seed=200 + index)).abs().max()) < rounding
        density = (-0.5 * xi**2 - math.log(transition.s) - 0.5 * math.log(2 * math.pi)).flatten(1).mean(1)
        assert log_prob is not None
        np.testing.assert_allclose(log_prob.numpy(), density.numpy(), atol=1e-5)
        kl = transition_kl(velocities[index], torch.zeros_like(z), transition)
        means = transition.g * velocities[index].double() / transition.s
        np.testing.assert_allclose(kl.numpy(), (means**2 / 2).flatten(1).mean(1).numpy(), rtol=1e-5)


def test_the_first_step_of_the_hard_list_takes_the_next_sigma_for_1() -> None:
    transition = noisy_kernel("flow", 0.7)(0, HARD)
    assert transition.s == pytest.approx(0.7 * math.sqrt(1 / 0.1) * math.sqrt(0.1))
    assert noisy_kernel("flow", 0.7)(1, HARD).s == pytest.approx(2.1 * math.sqrt(0.4))


@pytest.mark.parametrize("start", [1.0, 0.9998, 0.99999])
def test_a_start_next_to_1_does_not_explode(start: float) -> None:
    transition = noisy_kernel("flow", 1.0)(0, [start, 0.98, 0.5, 0.0])
    assert 0.0 < transition.a < 1.0
    assert transition.s < 1.0


@pytest.mark.parametrize("name", ["flow", "flow_linear", "dance", "ddim", "cps", "dpm1", "dpm2"])
def test_a_step_between_equal_sigmas_does_not_move(name: str) -> None:
    kernel = build_kernel(name, noise_level=0.9, deterministic=name.startswith("dpm"))
    levels = [1.0, 1.0, 0.6, 0.6, 0.6, 0.2, 0.0]
    transitions = [kernel(index, levels) for index in range(6)]
    assert [transitions[i] for i in (0, 2, 3)] == [Transition(1.0, 0.0)] * 3
    assert all(math.isfinite(c) for t in transitions if t for c in vars(t).values())


def gaussian_velocity(x: Tensor, t: float, variance: float = 0.25) -> Tensor:
    """The exact velocity for data N(0, variance)."""
    return x * (t - (1 - t) * variance) / gaussian_variance(t, variance)


def gaussian_variance(t: float, variance: float = 0.25) -> float:
    return (1 - t) ** 2 * variance + t**2


@pytest.mark.parametrize("solver", ["flow", "flow_linear", "dance", "ddim"])  # cps has others, see below
def test_marginals_are_those_of_the_noised_data(solver: str) -> None:
    generator = torch.Generator().manual_seed(0)
    found = {}

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        t = float(sigma[0])
        found[round(400 * t)] = float(x.var()) / gaussian_variance(t)
        return gaussian_velocity(x, t)

    run_sampling(
        velocity,
        torch.randn(1, 200_000, generator=generator),
        torch.linspace(1, 0, 401),
        kernel=noisy_kernel(solver, 0.7),
        noise_fn=lambda _: torch.randn(1, 200_000, generator=generator),
    )
    # 2 %: 400 steps (1 % off by themselves), and a standard error of 0.3 % in 200,000 draws
    assert [found[400], found[100], found[10], found[1]] == pytest.approx([1.0] * 4, abs=0.02)


def test_cps_keeps_the_coefficients_of_data_and_noise() -> None:
    clean, noise = seeded(2, 3), seeded(2, 3, seed=1)
    for index in range(3):
        sigma, following = HARD[index : index + 2]
        transition = noisy_kernel("cps", 0.8)(index, HARD)
        mean = transition.mean((1 - sigma) * clean + sigma * noise, noise - clean)
        kept = (mean - (1 - following) * clean) / noise
        torch.testing.assert_close(kept, torch.full_like(kept, following * math.cos(0.4 * math.pi)), rtol=1e-12, atol=0)
        assert math.hypot(float(kept[0, 0]), transition.s) == pytest.approx(following, rel=1e-12)


@pytest.mark.parametrize(
    ("noise_level", "shift", "steps", "std", "published"),
    [
        (0.3, 1.0, 10, 0.4440, 0.443),
        (0.3, 1.0, 40, 0.4862, 0.486),
        (0.3, 1.0, 100, 0.4950, 0.496),
        (0.7, 1.0, 10, 0.4796, 0.474),
        (0.7, 1.0, 40, 0.4974, 0.498),
        (0.7, 1.0, 100, 0.5004, 0.500),
        (0.7, 3.0, 10, 0.4188, 0.373),
        (0.7, 3.0, 40, 0.4793, 0.476),
        (0.7, 3.0, 100, 0.4923, 0.492),
    ],
)
def test_the_std_of_samples_by_few_steps_is_the_known_one(
    noise_level: float, shift: float, steps: int, std: float, published: float
) -> None:
    """Data N(1.5, 0.5^2); the recursion of mean and variance in closed form gives these. The published numbers were
    measured on 4e5 samples of a sampler whose last step has no noise and yet the drift of a noisy one; ours is Euler's
    there, and nearer to the data."""
    kernel, linear = noisy_kernel("flow", noise_level), torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    sigmas = shift * linear / (1 + (shift - 1) * linear)
    assert exact_moments(kernel, sigmas) == pytest.approx((1.5, std), abs=1e-4)

    def drifting(index: int, levels: Sequence[float]) -> Transition:
        t, found = levels[index], kernel(index, levels)
        if index + 1 < steps:
            return found
        variance = noise_level**2 * t / (1 - t)
        return replace(found, a=1 - variance / 2, g=-t - variance * (1 - t) / 2)

    assert exact_moments(drifting, sigmas) == pytest.approx((1.5, published), abs=4e-3)


def exact_moments(kernel: Kernel, sigmas: Tensor, start: float = 1.0) -> tuple[float, float]:
    """Mean and standard deviation of samples by the exact velocity for data N(1.5, 0.25), which is affine in the state.

    So a sample is a constant plus a sum of its draws, each with a weight: row 0 is made of no draw, row k of one.
    """
    rows = torch.zeros(len(sigmas) + 1, 1, dtype=torch.float64)
    rows[1] = start

    def noise(index: int) -> Tensor:
        return torch.eye(len(rows), dtype=torch.float64)[:, index + 2 : index + 3]

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        t = float(sigma[0])
        return gaussian_velocity(x - 1.5 * (1 - t), t) - 1.5

    weights = run_sampling(velocity, rows, sigmas, kernel=kernel, noise_fn=noise).latents[:, 0]
    return float(weights[0]), float((weights[1:] - weights[0]).norm())


@pytest.mark.parametrize(("kernel", "order"), [(euler, 1.0), (dpm2, 2.0)])
@pytest.mark.parametrize("variance", [0.25, 4.0])
def test_order_of_convergence_on_a_gaussian(kernel: Kernel, order: float, variance: float) -> None:
    """Steps equal in log-SNR from 0.95 to 0.05; the ODE keeps x / sqrt(its variance)."""

    def error(steps: int) -> float:
        log_snr = torch.linspace(math.log(0.05 / 0.95), math.log(0.95 / 0.05), steps + 1).double()
        end = run_sampling(
            lambda x, sigma: gaussian_velocity(x, float(sigma[0]), variance),
            torch.ones(1, 1).double(),
            torch.sigmoid(-log_snr),
            kernel=kernel,
        ).latents
        return abs(float(end) - math.sqrt(gaussian_variance(0.05, variance) / gaussian_variance(0.95, variance)))

    orders = [math.log2(error(steps) / error(2 * steps)) for steps in (32, 64)]
    assert orders == pytest.approx([order] * 2, abs=0.15)  # reached in the limit only


def test_dpm2_is_nearer_than_euler_from_noise_to_data() -> None:
    ends = [
        run_sampling(
            lambda x, sigma: gaussian_velocity(x, float(sigma[0])),
            torch.ones(1, 1).double(),
            torch.linspace(1, 0, 17),
            kernel=kernel,
        ).latents
        for kernel in (dpm2, euler)
    ]
    assert abs(float(ends[0]) - 0.5) < abs(float(ends[1]) - 0.5) / 5


def test_history_is_the_clean_prediction_of_the_step_before() -> None:
    kernel, levels = dpm2, [0.9, 0.7, 0.5, 0.3, 0.0]
    sampled, velocities = sample(kernel, levels)
    states, levels = sampled.trajectory, torch.tensor(levels).double().tolist()
    for index in range(1, 4):
        before = predict_clean(states[index - 1], velocities[index - 1], levels[index - 1])
        expected = kernel(index, levels).mean(states[index], velocities[index], before)
        assert torch.equal(states[index + 1], expected)
    with pytest.raises(ValueError, match=r"needs the previous step's clean prediction"):
        apply_transition(kernel(1, levels), states[1], velocities[1])


def noisy_multistep(index: int, sigmas: Sequence[float]) -> Transition:
    """A stochastic kernel with history, in coefficients of no meaning."""
    return Transition(0.9, -0.2, h=0.1 if index else 0.0, s=0.3)


def test_the_log_probability_of_a_multistep_kernel_counts_its_history() -> None:
    sampled, velocities = sample(noisy_multistep, HARD)
    states, levels = sampled.trajectory, torch.tensor(HARD).double().tolist()
    for index, log_prob in enumerate(sampled.log_probs):
        mean = 0.9 * states[index] - 0.2 * velocities[index]
        if index:
            mean = mean + 0.1 * (states[index - 1] - levels[index - 1] * velocities[index - 1])
        density = torch.distributions.Normal(mean, 0.3).log_prob(states[index + 1])
        assert log_prob is not None
        torch.testing.assert_close(log_prob, density.flatten(1).mean(1), rtol=1e-5, atol=1e-6)  # float32


def test_noise_is_drawn_where_it_is_needed_and_required_before_the_first_forward() -> None:
    asked = []

    def noise(index: int) -> Tensor:
        asked.append(index)
        return torch.zeros(1, 2)

    def never(x: Tensor, sigma: Tensor) -> Tensor:
        raise AssertionError("called")

    start, sigmas = torch.ones(1, 2), torch.tensor(HARD)
    run_sampling(lambda x, sigma: x, start, sigmas, kernel=noisy_kernel("flow", 0.5), noise_fn=noise)
    assert asked == [0, 1, 2]
    run_sampling(lambda x, sigma: x, start, sigmas, kernel=dpm2, noise_fn=noise)
    assert asked == [0, 1, 2]
    with pytest.raises(ValueError, match=r"the kernel draws noise between the steps: run_sampling needs noise_fn"):
        run_sampling(never, start, sigmas, kernel=noisy_kernel("flow", 0.5))
    with pytest.raises(ValueError, match=r"noise of the latents' shape \[1, 2\]: \[1, 1\]"):
        run_sampling(
            lambda x, sigma: x,
            start,
            sigmas,
            kernel=noisy_kernel("flow", 0.5),
            noise_fn=lambda _: torch.zeros(1, 1),
        )


def test_a_noise_free_step_has_no_log_probability() -> None:
    x = torch.zeros(1, 2)
    for scored in (
        lambda t: transition_log_prob(x, x, x, t),
        lambda t: log_ratio(x, x, x, t),
        lambda t: transition_kl(x, x, t),
    ):
        with pytest.raises(ValueError, match=r"a noise-free transition has no log-probability"):
            scored(noisy_kernel("flow", 0.7)(3, HARD))


@pytest.mark.parametrize(
    ("solver", "deterministic", "kernel"),
    [
        ("flow", False, functools.partial(flow, noise_level=0.6)),
        ("flow", True, euler),
        ("dance", False, functools.partial(dance, noise_level=0.6)),
        ("ddim", False, functools.partial(ddim, noise_level=0.6)),
        ("ddim", True, euler),
        ("flow_linear", False, functools.partial(flow_linear, noise_level=0.6)),
        ("flow_linear", True, euler),
        ("cps", False, functools.partial(cps, noise_level=0.6)),
        ("cps", True, euler),
        ("euler", True, euler),
        ("dpm1", True, euler),
        ("dpm2", True, dpm2),
    ],
)
def test_every_solver_has_its_kernel(solver: str, deterministic: bool, kernel: Kernel) -> None:
    found = build_kernel(solver, noise_level=0.6, deterministic=deterministic)
    for index in range(len(HARD) - 1):
        assert found(index, HARD) == kernel(index, HARD)


def test_stock_is_the_schedulers_own_step() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    sigmas = read_sigmas(scheduler, 4)
    runs = [
        run_sampling(lambda x, s: x - s[:, None], seeded(2, 3).float(), sigmas, step_fn=step_fn)
        for step_fn in (stock_step(scheduler), None)
    ]
    assert torch.equal(runs[0].latents, runs[1].latents)
    assert runs[0].log_probs == (None,) * 4


@pytest.mark.parametrize(
    ("solver", "deterministic", "level", "message"),
    [
        (
            "heun",
            True,
            0.7,
            'solver: found "heun"; allowed: flow, flow_linear, dance, ddim, cps, euler, dpm1, dpm2, stock',
        ),
        ("dpm2", False, 0.7, 'deterministic with solver "dpm2": found false; allowed: true'),
        ("dance", True, 0.7, 'deterministic with solver "dance": found true; allowed: false'),
        ("ddim", False, 1.2, 'noise_level of solver "ddim": found 1.2; allowed: 0 to 1'),
        ("cps", False, 1.2, 'noise_level of solver "cps": found 1.2; allowed: 0 to 1'),
    ],
)
def test_what_no_kernel_can_do_is_refused(solver: str, deterministic: bool, level: float, message: str) -> None:
    with pytest.raises(ValueError, match="found") as caught:
        build_kernel(solver, noise_level=level, deterministic=deterministic)
    assert str(caught.value) == message


def test_a_recomputed_log_probability_is_the_recorded_one() -> None:
    sampled, velocities = sample(noisy_kernel("flow", 0.7), HARD)
    levels = torch.tensor(HARD).double().tolist()
    for index in range(3):
        transition = noisy_kernel("flow", 0.7)(index, levels)
        states = sampled.trajectory[index : index + 2]
        again = transition_log_prob(states[1], states[0], velocities[index].clone(), transition)
        recorded = sampled.log_probs[index]
        assert recorded is not None
        assert torch.equal(again, recorded)
