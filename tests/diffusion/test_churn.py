"""EDM's sampler as transitions, against its own formulas in coordinates of exploding variance."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from cosmos_rl.diffusion.churn import Churn, build_churn, build_transitions, karras_sigmas
from cosmos_rl.diffusion.kernels import cps, euler, read_sigmas, step_with_log_prob
from cosmos_rl.diffusion.sampling import Sampled, hold_given, run_sampling

TEN = [200, 115.3, 63.38, 32.95, 16.01, 7.162, 2.885, 1.0145, 0.2968, 0.0668, 0.01]
TWENTY = [200, 152.7, 115.3, 86.02, 63.38, 46.05, 32.95, 23.19, 16.01, 10.83, 7.162, 4.614, 2.885, 1.745, 1.0145]
TWENTY += [0.5637, 0.2968, 0.1465, 0.0668, 0.02755, 0.01]


def exploding(sigmas: Tensor) -> np.ndarray:
    return (sigmas / (1 - sigmas)).numpy()


def test_the_grids_of_ten_and_twenty_intervals_are_the_published_ones() -> None:
    sigmas = karras_sigmas(11)
    assert sigmas[-1] == 0.0
    np.testing.assert_allclose(exploding(sigmas[:-1]), TEN, rtol=6e-4)
    np.testing.assert_allclose(exploding(karras_sigmas(21)[:-1]), TWENTY, rtol=6e-4)
    torch.testing.assert_close(karras_sigmas(21)[:-1][::2], sigmas[:-1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("steps", [2, 11, 35])
def test_the_grid_is_that_of_diffusers(steps: int) -> None:
    scheduler = UniPCMultistepScheduler(
        use_karras_sigmas=True,
        use_flow_sigmas=True,
        prediction_type="flow_prediction",
        sigma_min=0.01,
        sigma_max=200.0,  # pyright: ignore[reportArgumentType]  (diffusers says bool)
        final_sigmas_type="zero",
    )
    torch.testing.assert_close(karras_sigmas(steps).float(), read_sigmas(scheduler, steps), rtol=1e-6, atol=0)


def exploding_run(
    solver: str, steps: int, strength: float, churn: Churn, start: np.ndarray, noise: Sequence[np.ndarray]
) -> np.ndarray:
    """EDM's loop as it is written: states are data plus sigma times noise; the velocity is a function of the test."""
    levels = exploding(karras_sigmas(steps)[:-1])
    growth = min(strength / steps, math.sqrt(1.2) - 1)
    x, previous = levels[0] * start, None
    for i in range(steps - 1):
        s, t = levels[i], levels[i + 1]
        if churn.above < s < churn.below:
            raised = (1 + growth) * s
            x = x + churn.noise_scale * math.sqrt(raised**2 - s**2) * noise[i]
            s = raised
        d = exploding_clean(x, s)
        h = math.log(s / t)
        if solver == "1euler" or previous is None:
            x = (1 - t / s) * d + t / s * x
        else:
            c = (math.log(previous[1]) - math.log(s)) / -h
            phi_1 = (1 - math.exp(-h)) / h
            phi_2 = (1 - phi_1) / h
            x = math.exp(-h) * x + h * ((phi_1 - phi_2 / c) * d + phi_2 / c * previous[0])
        previous = (d, s)
    return exploding_clean(x, levels[-1])


def bent(z: np.ndarray, t: float) -> np.ndarray:
    """A velocity that is no straight line in the state."""
    return np.sin(3 * z) + t * z


def exploding_clean(x: np.ndarray, sigma: float) -> np.ndarray:
    z, t = x / (1 + sigma), sigma / (1 + sigma)
    return z - t * bent(z, t)


@pytest.mark.parametrize("solver", ["1euler", "2ab"])
@pytest.mark.parametrize(
    ("strength", "churn"),
    [(1.0, Churn()), (0.0, Churn()), (40.0, Churn()), (0.7, Churn(noise_scale=1.1, above=0.05, below=50.0))],
    ids=["default", "none", "most", "bounded"],
)
@pytest.mark.parametrize("steps", [3, 11])
def test_a_run_is_edms(solver: str, strength: float, churn: Churn, steps: int) -> None:
    generator = np.random.default_rng(0)
    start, *noise = generator.standard_normal((steps + 1, 64))
    grid, kernel = build_churn(solver, karras_sigmas(steps), strength, churn)
    levels = exploding(karras_sigmas(steps)[:-1])
    # the noise that is added at the first sigma is part of the start here
    s, raised = levels[0], float(exploding(grid[:1])[0])
    first = s * start + churn.noise_scale * math.sqrt(max(raised**2 - s**2, 0.0)) * noise[0]
    found = run_sampling(
        lambda z, sigma: torch.from_numpy(bent(z.numpy(), float(grid[(grid.float() == sigma[0]).nonzero()[0, 0]]))),
        torch.from_numpy(first / (1 + raised))[None],
        grid,
        kernel=kernel,
        noise_fn=lambda index: torch.from_numpy(noise[index + 1])[None],
    )
    expected = exploding_run(solver, steps, strength, churn, start, noise)
    np.testing.assert_allclose(found.latents[0].numpy(), expected, rtol=0, atol=1e-10)


def test_raised_sigmas_and_noise_are_the_published_ones() -> None:
    """Ten intervals, by the table of each transition."""
    grid, kernel = build_churn("2ab", karras_sigmas(11), 1.0)
    raised = [218.2, 125.7, 69.1, 35.9, 17.5, 7.81, 3.15, 1.107, 0.324, 0.0728]
    np.testing.assert_allclose(exploding(grid[:10]), raised, rtol=4e-3)
    levels = grid.tolist()
    std = [kernel(index, levels).s for index in range(11)]
    np.testing.assert_allclose(std[:9], [0.3965, 0.394, 0.389, 0.378, 0.354, 0.303, 0.210, 0.0978, 0.0271], rtol=2e-3)
    assert std[9:] == [0.0, 0.0]


def test_first_order_with_noise_is_coefficients_preserving_sampling() -> None:
    for steps, published in ((11, 0.262), (21, 0.193)):
        grid, kernel = build_churn("1euler", karras_sigmas(steps), 1.0)
        noise_level = 2 / math.pi * math.acos(1 / (1 + 1 / steps))
        assert noise_level == pytest.approx(published, abs=1e-3)
        levels = grid.tolist()
        for index in range(steps - 2):
            ours, theirs = kernel(index, levels), cps(index, levels, noise_level=noise_level)
            assert (ours.a, ours.g, ours.h, ours.s) == pytest.approx((theirs.a, theirs.g, 0.0, theirs.s), abs=1e-12)


@pytest.mark.parametrize("solver", ["1euler", "2ab"])
def test_without_strength_the_grid_is_untouched_and_nothing_is_drawn(solver: str) -> None:
    sigmas = torch.tensor([1.0, 0.9, 0.5, 0.1, 0.0])
    grid, kernel = build_churn(solver, sigmas, 0.0)
    assert grid.tolist() == sigmas.double().tolist()
    steps = [kernel(index, grid.tolist()) for index in range(4)]
    assert all(step.s == 0.0 and math.isfinite(step.g) for step in steps)
    firsts = (0, 1, 3) if solver == "2ab" else range(4)
    assert all(steps[index] == euler(index, grid.tolist()) for index in firsts)
    assert [index for index, step in enumerate(steps) if step.h] == ([2] if solver == "2ab" else [])


@pytest.mark.parametrize(
    ("solver", "steps", "std"),
    [
        *(("1euler", n + 1, std) for n, std in ((10, 0.357), (20, 0.421), (40, 0.459), (100, 0.484))),
        *(("2ab", n + 1, std) for n, std in ((10, 0.651), (20, 0.560), (40, 0.514), (100, 0.504))),
    ],
)
def test_the_std_of_samples_is_the_published_one(solver: str, steps: int, std: float) -> None:
    """Data N(1.5, 0.5^2): its velocity is affine, so a sample is a constant plus a weight times each draw."""
    grid, kernel = build_churn(solver, karras_sigmas(steps), 1.0)
    rows = torch.zeros(steps + 1, 1, dtype=torch.float64)
    rows[1] = grid[0]

    def velocity(z: Tensor, sigma: Tensor) -> Tensor:
        t = float(sigma[0])
        return (z - 1.5 * (1 - t)) * (t - (1 - t) * 0.25) / ((1 - t) ** 2 * 0.25 + t**2) - 1.5

    def noise(index: int) -> Tensor:
        return torch.eye(len(rows), dtype=torch.float64)[:, index + 2 : index + 3]

    weights = run_sampling(velocity, rows, grid, kernel=kernel, noise_fn=noise).latents[:, 0]
    assert float(weights[0]) == pytest.approx(1.5, abs=5e-3)
    assert float((weights[1:] - weights[0]).norm()) == pytest.approx(std, abs=4e-3)


@pytest.mark.parametrize("solver", ["2mid", "2mid_stable", "2heun_edm", "2heun_naive", "3kutta_naive"])
def test_solvers_of_several_calls_are_refused_with_the_reason(solver: str) -> None:
    with pytest.raises(ValueError, match=rf'found "{solver}"; "{solver}" calls the model {solver[0]} times in a step'):
        build_transitions(solver, karras_sigmas(4), noise_level=1.0, deterministic=False)


def test_given_elements_move_straight_and_the_others_as_if_they_were_alone() -> None:
    """As with frames that a medium gives: only the others are drawn, and only they count in the log-probability."""
    grid, kernel = build_transitions("2ab", karras_sigmas(6), noise_level=1.0, deterministic=False)
    start = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 6)))
    noise = torch.from_numpy(np.random.default_rng(1).standard_normal((6, 2, 6)))
    mask = torch.tensor([[True, True, False, True, False, True]])

    def run(columns: Tensor, *, hold: bool) -> Sampled:
        def step(
            velocity: Tensor,
            latents: Tensor,
            index: int,
            sigmas: Sequence[float],
            *,
            history: Tensor | None,
            noise: Tensor | None,
        ) -> tuple[Tensor, Tensor | None]:
            return step_with_log_prob(kernel(index, sigmas), latents, velocity, history, noise)

        return run_sampling(
            lambda z, sigma: torch.sin(3 * z) + float(sigma[0]) * z,
            start[:, columns],
            grid,
            kernel=kernel,
            step_fn=hold_given(step, kernel, mask) if hold else step,
            noise_fn=lambda index: noise[index][:, columns],
        )

    held, alone = run(torch.arange(6), hold=True), run(mask[0].nonzero()[:, 0], hold=False)
    torch.testing.assert_close(held.latents[:, mask[0]], alone.latents, rtol=1e-12, atol=0)
    for ours, theirs in zip(held.log_probs, alone.log_probs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
    assert [log_prob is None for log_prob in held.log_probs] == [False] * 4 + [True] * 2
    given = start[:, ~mask[0]]
    first = torch.sin(3 * given) + float(grid[:1].float()) * given
    torch.testing.assert_close(held.latents[:, ~mask[0]], given - grid[0] * first, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("solver", "noise_level", "deterministic"), [("2ab", 1.0, True), ("1euler", 0.0, False)])
def test_without_noise_the_pipelines_own_grid_stays(solver: str, noise_level: float, deterministic: bool) -> None:
    sigmas = karras_sigmas(5).float()
    grid, kernel = build_transitions(solver, sigmas, noise_level=noise_level, deterministic=deterministic)
    assert grid is sigmas
    assert all(kernel(index, sigmas.tolist()).s == 0.0 for index in range(5))


def test_a_solver_of_the_pipelines_grid_is_itself() -> None:
    sigmas = karras_sigmas(5).float()
    grid, kernel = build_transitions("cps", sigmas, noise_level=0.8, deterministic=False)
    assert grid is sigmas
    assert kernel(1, sigmas.tolist()) == cps(1, sigmas.tolist(), noise_level=0.8)


@pytest.mark.parametrize(("solver", "order"), [("1euler", 1.0), ("2ab", 2.0)])
def test_order_of_convergence_on_a_gaussian(solver: str, order: float) -> None:
    """Steps equal in log-SNR from 0.95 to 0.05, data N(0, 4); the ODE keeps x / sqrt(its variance)."""

    def velocity(z: Tensor, sigma: Tensor) -> Tensor:
        t = float(sigma[0])
        return z * (t - (1 - t) * 4) / ((1 - t) ** 2 * 4 + t**2)

    def error(steps: int) -> float:
        end = math.log(0.95 / 0.05)
        sigmas = torch.sigmoid(torch.linspace(end, -end, steps + 1, dtype=torch.float64))
        grid, kernel = build_transitions(solver, sigmas, noise_level=0.0, deterministic=True)
        found = run_sampling(velocity, torch.ones(1, 1, dtype=torch.float64), grid, kernel=kernel).latents
        exact = math.sqrt((0.95**2 * 4 + 0.05**2) / (0.05**2 * 4 + 0.95**2))
        return abs(float(found) - exact)

    orders = [math.log2(error(steps) / error(2 * steps)) for steps in (32, 64)]
    assert orders == pytest.approx([order] * 2, abs=0.15)  # reached in the limit only


def test_more_about_the_noise_is_of_this_sampler_alone() -> None:
    churn = Churn(1.3, above=0.1, below=50.0)
    with pytest.raises(ValueError, match=r'churn of solver "cps": found Churn\(noise_scale=1.3, above=0.1, below=50.0'):
        build_transitions("cps", karras_sigmas(4), noise_level=0.5, deterministic=False, churn=churn)
    for solver in ("1euler", "2ab"):
        grid, kernel = build_transitions(solver, karras_sigmas(11), noise_level=1.0, deterministic=False, churn=churn)
        expected, own = build_churn(solver, karras_sigmas(11), 1.0, churn)
        assert torch.equal(grid, expected)
        assert [kernel(i, grid.tolist()) for i in range(11)] == [own(i, grid.tolist()) for i in range(11)]


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r'solver: found "4rk"; allowed: 1euler, 2ab'):
        build_churn("4rk", karras_sigmas(4), 1.0)
