"""Pairs -> what flow matching trains on: latents, conditions, sigmas and noise, all draws keyed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_matching import flow_matching_loss
from cosmos_rl.data.given import GivenPrompt, PromptKey, choose_own, count_clean
from cosmos_rl.data.items import Item
from cosmos_rl.diffusion.schedule import density, index_from_density, mix
from cosmos_rl.distributed import randomness
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.diffusers.cond import Cond
from cosmos_rl.policy.model.diffusers.pipeline_model import filter_keywords
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding


@dataclass(frozen=True)
class NoisedSamples:
    """Encoded samples with everything that was drawn for them."""

    clean: Tensor
    """Latents ``[B, C, ...]`` float32."""
    cond: Cond
    noise: Tensor
    """Like ``clean``."""
    index: Tensor
    """int64 ``[B]`` on the CPU: indices in the ascending training grid."""
    weight: Tensor | None = field(default=None, kw_only=True)
    """``[B]``, factors on the losses of the samples; None: 1."""

    def rows(self, which: slice) -> "NoisedSamples":
        """Some of the samples, as a view."""
        weight = None if self.weight is None else self.weight[which]
        parts = self.clean[which], self.cond.rows(which), self.noise[which], self.index[which]
        return NoisedSamples(*parts, weight=weight)

    def loss(self, model: PipelineModel) -> tuple[Tensor, Tensor]:
        """Flow-matching ``(sum, weight)``."""
        draws: dict[str, Tensor] = {"timestep": self.index, "noise": self.noise}
        if self.weight is not None:
            draws["sample_weight"] = self.weight
            if filter_keywords(model.training_sft_step, draws).keys() != draws.keys():
                raise UserError(
                    f"train.train_policy.dataset.folders: {type(model).__name__}.training_sft_step takes no "
                    "sample_weight, which a weight other than 1 needs"
                )
        return model.training_sft_step(self.clean, self.cond, **draws)

    def loss_at(self, model: PipelineModel, level: Level) -> tuple[Tensor, Tensor]:
        """Flow-matching ``(sum, weight)`` at levels ``[B]`` of the sampler."""
        level = level.to(self.clean.device)
        velocity = model.velocity(mix(self.clean, self.noise, level.sigma), level, self.cond)
        return flow_matching_loss(velocity, self.clean, self.noise, element_mask=self.cond.element_mask)


class Noising:
    """Encodes items and draws their sigmas and noise."""

    def __init__(self, model: PipelineModel, encoding: Encoding, config: Config) -> None:
        self._model = model
        self.encoding = encoding
        self._config = config.policy.diffusers
        self._seed = config.train.seed

    def prepare(
        self, purpose: str, step: int, ids: Sequence[int], items: Sequence[Item], dropout: float
    ) -> NoisedSamples:
        """All draws are keyed by (seed, purpose, step, id); ``dropout`` is the share of captions that become empty."""
        clean = self.encoding.latents(items)
        prompts = [item.prompt for item in items]
        if dropout > 0.0:
            drawn = randomness.uniform(self._seed, f"{purpose}/caption", step, ids)
            prompts = ["" if u < dropout else p for u, p in zip(drawn.tolist(), prompts, strict=True)]
        cond = self.encoding.conditions(self._give(purpose, step, ids, items, prompts))
        noise, index = self._draw(purpose, step, ids, clean)
        weight = None
        if any(item.weight != 1.0 for item in items):
            weight = torch.tensor([item.weight for item in items], device=clean.device)
        return NoisedSamples(clean, cond, noise, index, weight=weight)

    def redraw(self, samples: NoisedSamples, purpose: str, step: int, ids: Sequence[int]) -> NoisedSamples:
        """The same samples with other sigmas and noise."""
        noise, index = self._draw(purpose, step, ids, samples.clean)
        return replace(samples, noise=noise, index=index)

    def _draw(self, purpose: str, step: int, ids: Sequence[int], clean: Tensor) -> tuple[Tensor, Tensor]:
        config = self._config
        noise = randomness.normal(clean.shape[1:], self._seed, f"{purpose}/noise", step, ids).to(clean.device)
        if config.weighting_scheme == "logit_normal":
            draw = randomness.scalar_normal(self._seed, f"{purpose}/level", step, ids)
        else:
            draw = randomness.uniform(self._seed, f"{purpose}/level", step, ids)
        u = density(draw, config.weighting_scheme, config.logit_mean, config.logit_std, config.mode_scale)
        return noise, index_from_density(u, self._model.train_sampling_steps)

    def _give(
        self, purpose: str, step: int, ids: Sequence[int], items: Sequence[Item], prompts: Sequence[str]
    ) -> list[PromptKey]:
        """The prompts, each with the first frames of its own video where the model is conditioned on some."""
        frames = self._model.conditional_frames
        if frames[1] == 0:
            return list(prompts)
        drawn = randomness.uniform(self._seed, f"{purpose}/conditional_frames", step, ids).tolist()
        keys: list[PromptKey] = []
        for number, item, prompt, u in zip(ids, items, prompts, drawn, strict=True):
            clean = count_clean(frames, u)
            given = choose_own(item, f"{number}", clean, self._model.count_given(clean))
            keys.append(GivenPrompt(prompt, given))
        return keys
