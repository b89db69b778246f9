"""What is known of the noise of the sampling steps before a pipeline is loaded."""

from typing import Any

import pytest
import torch

from cosmos_rl.diffusion.churn import Churn, build_transitions
from cosmos_rl.launcher.check.rl_lines import rl_lines
from cosmos_rl.policy.config.plan import noisy_steps
from cosmos_rl.policy.config.policy import SampleConfig
from tests.config.test_presets import job_of

SAMPLE = "policy.diffusers.sample"


def draw_levels(num_steps: int, first: float, seed: int) -> torch.Tensor:
    """Levels that descend from ``first`` to 0, at any distances."""
    steps = torch.rand(num_steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
    left = steps.flip(0).cumsum(0).flip(0)
    return torch.cat([first * left / left[0], torch.zeros(1, dtype=torch.float64)])


@pytest.mark.parametrize("first", [1.0, 0.9998, 0.7])
@pytest.mark.parametrize("solver", ["flow", "flow_linear", "dance", "ddim", "cps", "1euler", "2ab"])
def test_without_bounds_the_same_steps_have_noise_at_all_levels(solver: str, first: float) -> None:
    for seed in range(20):
        num_steps = 3 + seed
        sample = SampleConfig.model_validate({"solver": solver, "num_steps": num_steps, "noise_level": 0.3})
        levels = draw_levels(num_steps, first, seed)
        raised, kernel = build_transitions(solver, levels, noise_level=0.3, deterministic=False)
        noisy = [index for index in range(num_steps) if kernel(index, raised.tolist()).s > 0.0]
        assert noisy == list(range(noisy_steps(sample))), (seed, levels)


def test_with_bounds_it_depends_on_the_levels() -> None:
    """The noise after step 0 raises the second level, 3 / 4 or 4 / 5: 3 and 4 of EDM."""
    for second, noisy in ((0.75, True), (0.8, False)):
        levels = torch.tensor([1.0, second, 0.5, 0.2, 0.0], dtype=torch.float64)
        raised, kernel = build_transitions(
            "1euler", levels, noise_level=0.3, deterministic=False, churn=Churn(below=3.5)
        )
        assert (kernel(0, raised.tolist()).s > 0.0) == noisy


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        ({"noise_above": 0.1}, "noise_above at"),
        ({"noise_below": 4.0}, "noise_below at"),
        ({"noise_above": 0.1, "noise_below": 4.0}, "noise_above and noise_below at"),
        ({}, None),
    ],
)
def test_check_says_what_only_the_loaded_pipeline_knows(bounds: dict[str, Any], named: str | None) -> None:
    config = job_of("mix_grpo")
    sample = config.policy.diffusers.sample.model_copy(update={"solver": "1euler", **bounds})
    diffusers = config.policy.diffusers.model_copy(update={"sample": sample})
    policy = config.policy.model_copy(update={"diffusers": diffusers})
    lines = [line for line in rl_lines(config.model_copy(update={"policy": policy}), None) if "have noise" in line]
    assert [f"{SAMPLE}.{named}" in line for line in lines] == [True] * (named is not None)
