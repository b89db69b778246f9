"""Sampler, ratio and KL term of a translated configuration are those of the older trainer, written as it had them."""

import math

import pytest
import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_grpo import StepRows, TrustRegion, flow_grpo_loss, step_divergence, step_scales
from cosmos_rl.diffusion.churn import build_transitions, karras_sigmas
from cosmos_rl.diffusion.sampling import run_sampling
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.rollout.sampler import RolloutSpec
from tests.support.paths import ROOT

RECIPE = ROOT / "configs/wfm/cosmos_predict2-5_2b_480_grpo_mock_data.toml"
STEPS, CHURN = 10, 1.0
"""`sample_steps` and `s_churn` of the recipe: the older defaults."""


def velocity(z: Tensor, t: float, change: float) -> Tensor:
    """Of a policy; ``change`` is how far it was trained."""
    return torch.sin(3 * z) + t * z + change * torch.cos(z)


def older_mean(x: Tensor, sigma: float, following: float, clean: Tensor, before: tuple[Tensor, float] | None) -> Tensor:
    """The exponential Adams-Bashforth step from ``sigma`` to ``following`` for states ``data + sigma noise``."""
    h = math.log(sigma / following)
    phi_1 = (1 - math.exp(-h)) / h
    if before is None:
        return math.exp(-h) * x + h * phi_1 * clean
    c = (math.log(sigma) - math.log(before[1])) / h
    b_2 = (1 - phi_1) / h / c
    return math.exp(-h) * x + h * ((phi_1 - b_2) * clean + b_2 * before[0])


@pytest.mark.parametrize(
    ("s_noise", "s_t_min", "s_t_max"), [(1.0, 0.0, math.inf), (1.3, 0.0, math.inf), (1.1, 0.05, 50.0)]
)
def test_sampler_ratio_and_distance_are_the_older_ones(s_noise: float, s_t_min: float, s_t_max: float) -> None:
    keys = {"noise_scale": s_noise, "noise_above": s_t_min, "noise_below": "none" if s_t_max == math.inf else s_t_max}
    config = load_config(RECIPE, [f"policy.diffusers.sample.{key}={value}" for key, value in keys.items()])
    sample, job = config.policy.diffusers.sample, online_table(config)
    own = karras_sigmas(sample.num_steps)  # the grid of the Cosmos pipeline: tests/diffusion/test_churn.py
    deterministic, churn = sample.deterministic_sampling, RolloutSpec.training(config.policy.diffusers).churn
    grid, kernel = build_transitions(
        sample.solver, own, noise_level=sample.noise_level, deterministic=deterministic, churn=churn
    )
    generator, noises = torch.Generator().manual_seed(0), dict[int, Tensor]()
    start = torch.randn(1, 64, generator=generator, dtype=torch.float64)

    def draw(index: int) -> Tensor:
        noises[index] = torch.randn(1, 64, generator=generator, dtype=torch.float64)
        return noises[index]

    levels = grid.tolist()
    sampled = run_sampling(
        lambda z, t: velocity(z, float(t[0]), 0.0),
        grid[0] * start,
        grid,
        kernel=kernel,
        noise_fn=draw,
        keep_trajectory=True,
    )

    karras = [(200 ** (1 / 7) + i / STEPS * (0.01 ** (1 / 7) - 200 ** (1 / 7))) ** 7 for i in range(STEPS + 1)]
    most = min(CHURN / (STEPS + 1), math.sqrt(1.2) - 1)
    growth = [most if s_t_min < level < s_t_max else 0.0 for level in karras]
    x, before = (1 + growth[0]) * karras[0] * start, None
    for index in range(STEPS):
        sigma, following = (1 + growth[index]) * karras[index], karras[index + 1]
        t = sigma / (1 + sigma)
        torch.testing.assert_close(x / (1 + sigma), sampled.trajectory[index], rtol=1e-5, atol=1e-6)
        means = []
        for change in (0.0, 0.02):
            clean = x / (1 + sigma) - t * velocity(x / (1 + sigma), t, change)
            means.append(older_mean(x, sigma, following, clean, before))
        before = x / (1 + sigma) - t * velocity(x / (1 + sigma), t, 0.0), sigma
        if index == STEPS - 1:
            x = means[0]
            continue
        x = means[0]
        if growth[index + 1] == 0.0:  # no density
            assert index not in noises
            continue
        x = x + s_noise * math.sqrt((1 + growth[index + 1]) ** 2 - 1) * following * noises[index]
        older_ratio = -((x - means[1]) ** 2 - (x - means[0]) ** 2).mean()
        older_distance = ((means[1] - means[0]) ** 2).mean()

        step = kernel(index, levels)
        rows = StepRows(*(torch.tensor([one]) for one in (step.g, step.s, levels[index], levels[index + 1])))
        state = sampled.trajectory[index]
        old, new = (velocity(state, levels[index], change) for change in (0.0, 0.02))
        region = TrustRegion(scale=job.logprob_weight)
        _, terms = flow_grpo_loss(new, old, noises[index], rows, torch.ones(1), region=region)
        torch.testing.assert_close(terms["log_ratio"].double(), older_ratio[None], rtol=1e-3, atol=1e-9)
        distance = step_divergence(new, old, rows) * step_scales(job.logprob_weight, rows).kl_B
        torch.testing.assert_close(distance.double(), older_distance[None], rtol=1e-4, atol=1e-12)
    smallest = karras[-1] / (1 + karras[-1])
    z = x / (1 + karras[-1])
    torch.testing.assert_close(z - smallest * velocity(z, smallest, 0.0), sampled.latents, rtol=1e-5, atol=1e-6)
    assert max(job.steps.indices) < STEPS - 1
