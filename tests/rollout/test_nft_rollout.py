"""Rollouts are the stock pipeline's images, whatever the size of a call; a family's own methods are used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from cosmos_rl.distributed import randomness
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.rollout.sampler import RolloutSampler, RolloutSpec, Sample
from tests.support.nft_runs import nft_toml, nft_trainer

TEXTS = ("a red square", "a lost cat", "a red square")


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("solver", ["euler", "stock"])
def test_a_rollout_is_the_stock_pipelines(tmp_path: Path, tiny_sd3: Path, solver: str, guidance: float) -> None:
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), start=False)
    model = trainer.model
    spec = RolloutSpec(5, guidance, solver, 0.0, deterministic=True, height=32, width=32)
    negative = "" if guidance > 1.0 else None
    sampler = RolloutSampler(model, spec, seed=3)
    samples = [Sample(10 + i, i, text, {}) for i, text in enumerate(TEXTS)]
    with trainer.policies.using("old"), model.eval_mode():
        ours = sampler.sample(samples, lambda texts, _: model.encode_prompts(texts, negative, each=True), "rollout", 2)

    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(tiny_sd3)
    pipeline.set_progress_bar_config(disable=True)
    shape = model.latent_shape(32, 32)
    noise = [torch.randn(shape, generator=randomness.generator(3, "rollout", 2, 10 + i)) for i in range(3)]
    call: dict[str, Any] = {"num_inference_steps": 5, "guidance_scale": guidance, "height": 32, "width": 32}
    with torch.no_grad():
        theirs = pipeline(
            list(TEXTS), latents=torch.stack(noise), max_sequence_length=12, output_type="latent", **call
        ).images
    if solver == "stock":
        assert torch.equal(ours.latents, theirs)
    else:
        torch.testing.assert_close(ours.latents, theirs, rtol=0, atol=1e-5)
    assert ours.media.shape == (3, 32, 32, 3)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_size_of_a_call_changes_no_sample(
    tmp_path: Path, tiny_sd3: Path, use_model: Callable[[type], type], guidance: float
) -> None:
    calls = 0

    @use_model
    class Counting(SD3Model):
        def pipeline_with_logprob(self, *, latents: Tensor, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            return super().pipeline_with_logprob(latents=latents, **keywords)

    options = (f"--policy.diffusers.sample.guidance_scale={guidance}", "--policy.diffusers.sample.solver=flow")
    options += ("--policy.diffusers.sample.deterministic_sampling=false",)
    config = nft_toml(tmp_path, tiny_sd3)
    found: list[Tensor] = []
    default = "--rollout.n_generation=4"  # one call, as the images are small
    for size in ("--rollout.batch_size=1", default, "--rollout.n_generation_mini_batch=3"):
        trainer = nft_trainer(config, *options, size, start=False)
        calls = 0
        rollouts, futures = trainer._roll_out(0, trainer._new_conditions())
        assert [sample.prompt for sample in rollouts.samples] == [sample.prompt for sample in trainer._samples(0)]
        assert calls == len(futures) == {"1": 4, "4": 1, "3": 6}[size[-1]]
        found.append(rollouts.latents)
    assert len({row.numpy().tobytes() for row in found[0]}) == 16
    for latents in found[1:]:
        torch.testing.assert_close(latents, found[0], rtol=0, atol=1e-5)
    other, _ = trainer._roll_out(1, trainer._new_conditions())
    assert not any(torch.equal(one, two) for one, two in zip(found[2], other.latents, strict=True))


class _MyModel(SD3Model):
    """A family with the three methods of its own, the first one in the documents' form."""

    calls: dict[str, int]

    def pipeline_with_logprob(
        self, prompt_embeds: Tensor, pooled_prompt_embeds: Tensor, generator: Any, **_: Any
    ) -> Any:  # type: ignore[override]
        self.calls["pipeline_with_logprob"] += 1
        return super().pipeline_with_logprob(
            prompt_embeds=prompt_embeds,
            pooled_prompt_embeds=pooled_prompt_embeds,
            generator=generator,
            height=32,
            width=32,
            num_inference_steps=2,
            solver="flow",
        )

    def nft_prepare_transformer_input(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.calls["nft_prepare_transformer_input"] += 1
        return super().nft_prepare_transformer_input(*args, **kwargs)

    def sde_step_with_logprob(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["sde_step_with_logprob"] += 1
        moved, log_prob = super().sde_step_with_logprob(*args, **kwargs)
        assert (log_prob is None) == (args[2] == 1)  # the last step has no noise
        return torch.zeros_like(moved), log_prob


def test_a_familys_own_methods_are_used(tmp_path: Path, tiny_sd3: Path, use_model: Callable[[type], type]) -> None:
    use_model(_MyModel)
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), "--train.train_policy.kl_beta=0.0", start=False)
    model: Any = trainer.model
    names = ("pipeline_with_logprob", "nft_prepare_transformer_input", "sde_step_with_logprob")
    model.calls = dict.fromkeys(names, 0)
    rollouts, _ = trainer._roll_out(0, trainer._new_conditions())
    assert model.calls == dict(zip(names, (1, 2, 2), strict=True))
    assert not rollouts.latents.any()  # what the own step gave
    trainer.train_step(0)
    assert model.calls["nft_prepare_transformer_input"] == 2 * 2 + 16 * 2 // 4
