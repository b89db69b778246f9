"""Real samples that are mixed with the start noise of the rollouts of their step."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl.data.streams import Batch
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, DiffusersConfig
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.driver.model import DrivenModel
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding
from cosmos_rl.policy.trainer.rl import build
from cosmos_rl.policy.trainer.rl.algorithm import Draws
from tests.support.family_runs import folder_of
from tests.support.nft_runs import nft_toml, nft_trainer


@pytest.mark.parametrize("same", [False, True], ids=["each its own", "one for a prompt"])
def test_real_samples_have_the_start_noise_of_the_rollouts(
    tmp_path: Path, tiny_sd3: Path, image_folder: Path, use_model: Callable[[type], type], same: bool
) -> None:
    """On one rank and on two, at each level and in each optimiser step of a training step."""
    noises: list[Tensor] = []
    starts: list[Tensor] = []

    class Recording(SD3Model):
        def training_sft_step(self, *args: Any, noise: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
            noises.extend(noise.clone())
            return super().training_sft_step(*args, noise=noise, **kwargs)

        def rollout(self, *args: Any, latents: Tensor, **kwargs: Any) -> Any:
            starts.extend(latents.clone())
            return super().rollout(*args, latents=latents, **kwargs)

    use_model(Recording)
    term = f'{{beta = 0.5, local_dir = "{image_folder}", batch_size = 4, noise = "rollout", per_step = true}}'
    options = (f"--train.train_policy.data_term={term}", "--train.train_policy.batch_size_per_optimize=8")
    options += (f"--policy.diffusers.sample.same_initial_noise={str(same).lower()}", "--train.ema_enable=false")
    options += ("--policy.diffusers.sample.num_steps=2", "--train.train_policy.mini_batch=2")
    options += ("--policy.diffusers.sample.solver=flow", "--policy.diffusers.sample.deterministic_sampling=false")
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), *options)
    model = trainer.model
    assert isinstance(model, PipelineModel)
    for step in range(2):
        noises.clear()
        starts.clear()
        trainer.train_step(step)
        times = len(trainer._sampler.trained_levels().sigma)
        expected = starts[:4] * times * 2  # the rollouts come before the guard's
        assert len({row.numpy().tobytes() for row in starts[:4]}) == (1 if same else 4)
        assert torch.equal(torch.stack(noises), torch.stack(expected))
        start, levels = (
            functools.partial(trainer._draw_start, Draws(42, step), trainer._samples(step)),
            trainer._sampler.trained_levels(),
        )
        assert torch.equal(start([1, 15, 17]), torch.stack([starts[1], starts[15], starts[1]]))
        for rank in range(2):
            noises.clear()
            context = Context(torch.device("cpu"), rank, 2)
            loss = build._data_loss(trainer._config, trainer._job, context, model, Encoding(model, trainer._config))
            assert loss is not None
            assert len(list(loss(step, 1, levels, start))) == times
            assert torch.equal(torch.stack(noises), torch.stack([starts[rank], starts[rank + 2]] * times))


@pytest.mark.parametrize("alone", [False, True])
def test_a_share_without_real_samples_has_no_micro_batches(alone: bool) -> None:
    config = Config.from_dict({"train": {"rank_invariant": alone, "train_policy": {"type": "grpo"}}})
    noising: Any = None  # nothing is encoded
    assert list(build._prepare_parts(noising, Batch((), ()), config)) == []


def test_start_noise_that_a_sampler_draws_itself_is_refused(
    tmp_path: Path, tiny_sd3: Path, image_folder: Path, use_model: Callable[[type], type]
) -> None:
    class Drawing(SD3Model):
        def pipeline_with_logprob(self, **kwargs: Any) -> Any:
            return super().pipeline_with_logprob(**kwargs)

    use_model(Drawing)
    term = f'{{beta = 0.5, local_dir = "{image_folder}", batch_size = 4, noise = "rollout"}}'
    with pytest.raises(UserError, match='data_term.noise: found "rollout"; allowed: "fresh" with Drawing, whose'):
        nft_trainer(nft_toml(tmp_path, tiny_sd3), f"--train.train_policy.data_term={term}")


def test_start_noise_of_another_shape_than_the_real_samples_is_refused(
    tmp_path: Path, tiny_sd3: Path, image_folder: Path, use_model: Callable[[type], type]
) -> None:
    class Packing(SD3Model):
        """Encodes images to tokens, and says nothing of how its sampler packs noise."""

        def visual_embedding(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().visual_embedding(*args, **kwargs).flatten(2).mT

    use_model(Packing)
    term = f'{{beta = 0.5, local_dir = "{image_folder}", batch_size = 4, noise = "rollout"}}'
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), f"--train.train_policy.data_term={term}")
    channels, height, width = trainer.model.latent_shape(*trainer._config.policy.diffusers.inference_size)
    text = (
        f'train.train_policy.data_term.noise: found "rollout"; allowed: "fresh", as latents of real samples are '
        f"{(height * width, channels)} and the noise of rollouts is {(channels, height, width)}"
    )
    with pytest.raises(UserError, match=f"^{re.escape(text)}$"):
        trainer.train_step(0)


@pytest.mark.zoo
@pytest.mark.parametrize("family", ["flux", "cosmos-predict2.5"])
def test_the_start_of_a_rollout_is_its_packed_noise(family: str) -> None:
    video = {"is_video": True, "train_frames": 9, "inference_frames": 9} if family != "flux" else {}
    sizes = {"inference_size": (32, 32), "max_prompt_length": 48, **video}
    model = DrivenModel(DiffusersConfig.model_validate(sizes), model_str=str(folder_of(family)))
    noise = torch.randn(2, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(1))
    packed = model.pack_noise(noise)
    for row, whole in zip(packed.float(), noise, strict=True):
        assert torch.equal(row.flatten().sort().values, whole.flatten().sort().values)
    clean_share = 1.0 - float(model.sampling_levels(4).sigma[0])  # some pipelines start with it missing
    torch.testing.assert_close(model.start_state(noise).float(), packed.float(), rtol=clean_share + 1e-4, atol=1e-6)
