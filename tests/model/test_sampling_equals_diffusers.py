"""Our sampling loop against the stock pipeline, bit for bit on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from cosmos_rl.policy.config import DiffusersConfig
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model

PROMPTS = ["a cat", "seven small dogs in the rain, oil on canvas", "x"]


@pytest.fixture(scope="module")
def model(tiny_sd3: Path) -> SD3Model:
    return SD3Model(DiffusersConfig(max_prompt_length=19, inference_size=(32, 32)), model_str=str(tiny_sd3))


@pytest.fixture(scope="module")
def pipeline(tiny_sd3: Path) -> StableDiffusion3Pipeline:
    pipe = StableDiffusion3Pipeline.from_pretrained(tiny_sd3)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("kernel", ["euler", "stock"])
@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize(
    "prompts", [PROMPTS[:1], PROMPTS, ["a cat", "a cat", "a dog"]], ids=["one", "three", "repeated"]
)
def test_latents_are_bit_equal_to_the_stock_pipeline(
    model: SD3Model, pipeline: Any, prompts: list[str], guidance: float, kernel: str
) -> None:
    noise = torch.randn(len(prompts), *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(3))
    stock = pipeline(
        prompts,
        height=32,
        width=32,
        num_inference_steps=5,
        guidance_scale=guidance,
        latents=noise,
        max_sequence_length=19,
        output_type="latent",
    ).images
    cond = model.encode_prompts(prompts, "" if guidance > 1 else None, each=True)
    ours = model.sample_latents(cond, noise, num_steps=5, guidance=guidance, solver=kernel)
    assert torch.equal(ours, stock)


def test_images_are_bit_equal_to_the_stock_pipeline(model: SD3Model, pipeline: Any) -> None:
    noise = torch.randn(2, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(4))
    stock = pipeline(
        PROMPTS[:2],
        height=32,
        width=32,
        num_inference_steps=3,
        guidance_scale=4.5,
        latents=noise,
        max_sequence_length=19,
        output_type="pt",
    ).images
    assert torch.equal(model.sample(PROMPTS[:2], noise, num_steps=3, guidance=4.5), stock)


def test_timesteps_from_sigmas_are_the_schedulers(model: SD3Model) -> None:
    for steps in (1, 4, 28, 1000):
        scheduler = type(model.scheduler).from_config(model.scheduler.config)
        scheduler.set_timesteps(steps)
        assert torch.equal(model.timestep_from_sigma(scheduler.sigmas[:-1]), scheduler.timesteps)


def test_sampling_leaves_the_training_grid_alone(model: SD3Model) -> None:
    before = model.scheduler.timesteps.clone()
    cond = model.encode_prompts(["a cat"])
    model.sample_latents(cond, torch.randn(1, *model.latent_shape(32, 32)), num_steps=2, guidance=1.0)
    assert torch.equal(model.scheduler.timesteps, before)
    assert len(model.timestep_map) == 1000
    assert torch.equal(model.timestep_map, model.timestep_map.sort().values)


def test_many_samples_are_decoded_in_parts(model: SD3Model, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = torch.randn(5, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    whole = model.decode(latents)
    sizes, decode = [], model.vae.decode

    def counted(part: torch.Tensor, **keywords: bool) -> tuple[torch.Tensor]:
        sizes.append(len(part))
        return decode(part, **keywords)

    monkeypatch.setattr(model.vae, "decode", counted)
    monkeypatch.setattr("cosmos_rl.policy.model.diffusers.diffuser_model.DECODED_PIXELS", 2 * 32 * 32)
    torch.testing.assert_close(model.decode(latents), whole)
    assert sizes == [2, 2, 1]
