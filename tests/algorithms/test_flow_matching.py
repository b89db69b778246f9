"""The SFT loss against closed forms and an independent NumPy computation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_rl.algorithms.flow_matching import flow_matching_loss
from cosmos_rl.diffusion.elements import element_mean
from cosmos_rl.diffusion.schedule import density, index_from_density, mix
from cosmos_rl.distributed import randomness
from cosmos_rl.policy.config import DiffusersConfig
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model


def test_the_true_velocity_has_loss_zero() -> None:
    clean, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    total, weight = flow_matching_loss(noise - clean, clean, noise)
    assert (float(total), float(weight)) == (0.0, 2.0)


def test_a_zero_predictor_has_the_variance_of_the_target() -> None:
    generator = torch.Generator().manual_seed(0)
    clean = 0.5 * torch.randn(64, 4, 16, 16, generator=generator)
    noise = torch.randn(64, 4, 16, 16, generator=generator)
    total, weight = flow_matching_loss(torch.zeros_like(clean), clean, noise)
    # mean of x^2 with x ~ N(0, 1.25): standard error 1.25 * sqrt(2 / n)
    assert float(total / weight) == pytest.approx(1.25, abs=3 * 1.25 * (2 / clean.numel()) ** 0.5)


def test_a_mask_counts_only_its_elements() -> None:
    value = torch.arange(8.0).reshape(2, 1, 2, 2)
    mask = torch.tensor([[[[1, 0], [0, 1]]], [[[0, 0], [0, 0]]]])
    assert element_mean(value, mask).tolist() == [1.5, 0.0]
    assert element_mean(value).tolist() == [1.5, 5.5]


def test_sums_of_micro_batches_are_the_sum_of_the_batch() -> None:
    parts = [torch.randn(6, 2, 4, 4) for _ in range(3)]
    whole, weight = flow_matching_loss(*parts)
    for size in (1, 2, 4):
        chunks = [flow_matching_loss(*(p[i : i + size] for p in parts)) for i in range(0, 6, size)]
        assert float(sum(c[0] for c in chunks)) == pytest.approx(float(whole), rel=1e-6)  # float32 summation order
        assert float(sum(c[1] for c in chunks)) == float(weight) == 6.0


def test_density_is_the_logit_normal_and_stays_inside_the_grid() -> None:
    z = torch.tensor([-100.0, -1.0, 0.0, 2.0, 100.0])
    u = density(z, "logit_normal", logit_mean=0.3, logit_std=0.5)
    np.testing.assert_allclose(u.numpy(), 1 / (1 + np.exp(-(0.3 + 0.5 * z.double().numpy()))), rtol=1e-12)
    assert index_from_density(u, 1000).tolist()[::4] == [0, 999]
    assert index_from_density(density(torch.tensor([0.0, 0.5, 0.9999]), "none"), 10).tolist() == [0, 5, 9]


def test_sigmas_by_frame_broadcast_over_space() -> None:
    clean, noise = torch.zeros(1, 2, 3, 4, 4), torch.ones(1, 2, 3, 4, 4)
    mixed = mix(clean, noise, torch.tensor([[0.0, 0.5, 1.0]]))
    assert mixed[0, 0, :, 0, 0].tolist() == [0.0, 0.5, 1.0]


def test_noised_latents_are_the_schedulers(tiny_sd3: Path) -> None:
    model = SD3Model(DiffusersConfig(max_prompt_length=16, inference_size=(32, 32)), model_str=str(tiny_sd3))
    clean, noise = torch.randn(3, 4, 8, 8), torch.randn(3, 4, 8, 8)
    index = torch.tensor([0, 500, 999])
    noised, _, timesteps = model.add_noise(clean, timestep=index, noise=noise)
    assert torch.equal(timesteps, model.scheduler.timesteps.flip(0)[index])
    torch.testing.assert_close(noised, model.scheduler.scale_noise(clean, timesteps, noise), rtol=1e-6, atol=1e-6)


def test_sft_loss_equals_a_numpy_computation(tiny_sd3: Path) -> None:
    """Everything around the transformer is computed again in NumPy float64; only its output is taken from torch."""
    config = DiffusersConfig(max_prompt_length=16, inference_size=(32, 32), logit_mean=0.2, logit_std=0.8)
    model = SD3Model(config, model_str=str(tiny_sd3))
    images = [torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(i)) * 2 - 1 for i in range(3)]
    clean = model.encode_visuals(images, 32, 32)
    cond = model.encode_prompts(["a cat", "a dog", "a cat"])
    noise = randomness.normal(clean.shape[1:], 7, "noise", 0, [0, 1, 2])
    z = randomness.scalar_normal(7, "level", 0, [0, 1, 2])
    index = index_from_density(density(z, "logit_normal", 0.2, 0.8), 1000)
    total, weight = model.training_sft_step(clean, cond, timestep=index, noise=noise)

    with torch.no_grad():
        mean = model.vae.encode(torch.stack(images)).latent_dist.mean.double().numpy()
    x0 = (mean - model.vae.config.shift_factor) * model.vae.config.scaling_factor
    u = 1 / (1 + np.exp(-(0.2 + 0.8 * z.double().numpy())))
    shift = model.scheduler.config.shift
    low = shift / 1000 / (1 + (shift - 1) / 1000)  # the scheduler stores its smallest level already shifted
    grid = np.linspace(1.0, low, 1000)
    sigma = np.sort(shift * grid / (1 + (shift - 1) * grid))[np.floor(u * 1000).astype(int)]
    eps = noise.double().numpy()
    x = (1 - sigma[:, None, None, None]) * x0 + sigma[:, None, None, None] * eps
    with torch.no_grad():
        v = model.transformer(
            hidden_states=torch.from_numpy(x).float(),
            timestep=torch.from_numpy(1000 * sigma).float(),
            encoder_hidden_states=cond.text["encoder_hidden_states"],
            pooled_projections=cond.text["pooled_projections"],
            return_dict=False,
        )[0]
    expected = ((v.double().numpy() - (eps - x0)) ** 2).mean(axis=(1, 2, 3)).sum()
    assert float(weight) == 3.0
    assert float(total) == pytest.approx(expected, rel=1e-5)  # float32 transformer on float32-rounded inputs
