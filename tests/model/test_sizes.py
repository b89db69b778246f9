"""A model that changes between sizes is the one that was built for the size."""

from pathlib import Path

import pytest
import torch

from cosmos_rl.policy.config import DiffusersConfig
from cosmos_rl.policy.config.policy import BucketsConfig
from cosmos_rl.policy.model import tiny
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.driver.model import DrivenModel

SIZES = ((32, 32), (32, 64), (64, 32))


def build(folder: Path, family: str, size: tuple[int, int], **options: object) -> PipelineModel:
    torch.set_num_threads(1)
    config = DiffusersConfig.model_validate({"inference_size": size, "max_prompt_length": 16, **options})
    return DrivenModel(config, model_str=str(folder))


@pytest.mark.parametrize("family", ["flux", pytest.param("qwen-image", marks=pytest.mark.zoo)])
def test_at_a_size_a_driven_pipeline_is_the_one_built_for_it(tmp_path: Path, family: str) -> None:
    folder = tiny.build(family, tmp_path / family, "unit", seed=0)
    several = build(folder, family, SIZES[0], buckets=BucketsConfig(sizes=SIZES))
    shapes = {several.latent_shape(*SIZES[0])}
    for size in SIZES[1:]:
        alone = build(folder, family, size)
        noise = torch.randn(2, *alone.latent_shape(*size), generator=torch.Generator().manual_seed(1))
        shapes.add(tuple(noise.shape[1:]))
        images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(2)) * 2 - 1
        with several.at_size(size), torch.no_grad():
            assert several.media_size == size
            assert torch.equal(several.sigma_map, alone.sigma_map)
            assert torch.equal(several.timestep_map, alone.timestep_map)
            found = [_use(model, images, noise, size) for model in (several, alone)]
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
        assert several.media_size == SIZES[0]
    assert len(shapes) == len(SIZES)


def _use(model: PipelineModel, images: torch.Tensor, noise: torch.Tensor, size: tuple[int, int]) -> list[torch.Tensor]:
    """Latents, a loss, and a sample with its pixels."""
    cond = model.encode_prompts(["a cat", "a dog"])
    clean = model.encode_visuals(list(images), *size)
    start = model.start_state(noise)
    loss, _ = model.training_sft_step(clean, cond, timestep=torch.tensor([100, 900]), noise=start.float())
    sampled = model.sample_latents(cond, start, num_steps=2, guidance=1.0)  # pyright: ignore[reportCallIssue]
    return [clean, loss, sampled, model.decode(sampled)]
