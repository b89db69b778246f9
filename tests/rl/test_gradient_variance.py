"""The benchmark of noisy gradients: its estimator against closed forms, and what it counts."""

import itertools
import math

import pytest
import torch

from benchmarks.gradient_variance import ALGORITHMS, estimate_moments, measure, relative_variance


def test_both_moments_are_unbiased() -> None:
    """Over all 64 draws of 3 from 4 gradients, of which each is as likely: their own covariance and mean, exactly."""
    values = torch.tensor([[1.0, 0.0], [2.0, -1.0], [4.0, 3.0], [-3.0, 1.0]], dtype=torch.float64)
    mean = values.mean(0)
    trace = float(((values - mean) ** 2).sum(1).mean())
    found = [estimate_moments(values[list(drawn)]) for drawn in itertools.product(range(4), repeat=3)]
    assert sum(one for one, _ in found) / 64 == pytest.approx(trace, rel=1e-12)
    assert sum(one for _, one in found) / 64 == pytest.approx(float((mean**2).sum()), rel=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_the_variance_of_gaussian_gradients_is_their_closed_form(scale: float) -> None:
    """Means (1, -2, 2), deviations (3, 0.5, 1): 10.25 / 9, whatever the scale. 40,000 draws leave an error of 1 %."""
    mean, deviation = torch.tensor([1.0, -2.0, 2.0]), torch.tensor([3.0, 0.5, 1.0])
    drawn = mean + deviation * torch.randn(40_000, 3, generator=torch.Generator().manual_seed(0))
    assert relative_variance(scale * drawn) == pytest.approx(10.25 / 9, rel=0.04)


def test_a_mean_that_is_not_seen_is_no_number() -> None:
    assert relative_variance(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])) == math.inf


@pytest.mark.parametrize("name", ALGORITHMS)
def test_evaluations_are_those_of_sampling_and_three_for_each_trained_level(name: str) -> None:
    """10 steps of the sampler; no reference, and the old policy is the trained one."""
    levels = {"9": 9, "1": 1, "4": 4, "2": 2}[next(part for part in name.replace(",", "").split() if part.isdigit())]
    assert measure(ALGORITHMS[name], seed=0, steps=2).evaluations == 10 + 3 * levels


def test_noise_of_a_mean_falls_with_its_samples_so_levels_are_cheaper_than_samples() -> None:
    """Four levels of a sample: at least twice the signal of one, for less than twice the evaluations."""
    one, four = (measure(ALGORITHMS[f"NFT, {levels}"], 0, 40) for levels in ("1 noise level", "4 noise levels"))
    assert four.variance < 0.5 * one.variance
    assert four.product < one.product
