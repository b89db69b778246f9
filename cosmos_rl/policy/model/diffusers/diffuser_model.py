"""The base of families that are written by hand: prompts to embeddings, and the inputs of the transformer.

A family gives ``text_embedding`` and ``visual_embedding``, and where its scheduler or its transformer differ from
flow matching in the SD3 manner, ``set_scheduler_timestep``, ``add_noise`` and ``timestep_from_sigma``. Everything else
(``velocity``, the SFT step, sampling) is built from these.
"""

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_matching import combine_weights, flow_matching_loss
from cosmos_rl.data.text_lengths import find_refusal
from cosmos_rl.data.texts import printable
from cosmos_rl.diffusion.schedule import loss_weight
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.plan import DECODED_PIXELS
from cosmos_rl.policy.model.diffusers.cond import Cond, Negative, negatives
from cosmos_rl.policy.model.diffusers.flow_model import TEXT_KEYWORDS
from cosmos_rl.policy.model.diffusers.pipeline_model import PipelineModel, filter_keywords
from cosmos_rl.policy.model.quiet import quiet_warnings


class DiffuserModel(PipelineModel):
    """A family whose conditions and transformer calls are written out; what a user's own class derives from."""

    # ---- what a family gives -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def text_embedding(self, prompt_list: list[str], device: torch.device, **kwargs: Any) -> dict[str, Tensor | None]:
        """Prompts -> keyword arguments of the transformer's forward, each ``[B, ...]`` (None entries are dropped).

        ``max_sequence_length`` arrives as a keyword. Negative embeddings: call it with the negative prompts.
        """

    def nft_prepare_transformer_input(
        self,
        latents: Tensor,
        prompt_embeds: Tensor,
        prompt_attention_mask: Tensor | None,
        pooled_prompt_embeds: Tensor | None,
        timestep: Tensor,
        num_frames: int,
        height: int,
        width: int,
    ) -> dict[str, Any]:
        """Keyword arguments of one call of the transformer, for every forward pass: training, rollout and loss.

        Args:
            latents: ``[B, C, ...]``.
            prompt_embeds, prompt_attention_mask, pooled_prompt_embeds: what ``text_embedding`` gave under
                ``encoder_hidden_states``, ``encoder_attention_mask`` and ``pooled_projections``.
            timestep: ``[B]`` float32, from ``timestep_from_sigma``.
            num_frames, height, width: of the media, in pixels.
        """
        text = zip(TEXT_KEYWORDS.values(), (prompt_embeds, prompt_attention_mask, pooled_prompt_embeds), strict=True)
        given = {keyword: value for keyword, value in text if value is not None}
        return {"hidden_states": latents, "timestep": timestep, **given, "return_dict": False}

    def transformer_input(self, latents: Tensor, timestep: Tensor, text: dict[str, Tensor]) -> dict[str, Any]:
        """Keyword arguments of one call of the transformer; a family whose text has other parts overrides this."""
        foreign = sorted(set(text) - set(TEXT_KEYWORDS.values()))
        if foreign:
            raise NotImplementedError(
                f"{type(self).__name__}.text_embedding gives {', '.join(foreign)}: override transformer_input, which "
                "knows only the three usual parts"
            )
        height, width = self.media_size
        return self.nft_prepare_transformer_input(
            latents,
            **{name: text.get(keyword) for name, keyword in TEXT_KEYWORDS.items()},  # pyright: ignore[reportArgumentType]
            timestep=timestep,
            num_frames=self.config.train_frames if self.config.is_video else 1,
            height=height,
            width=width,
        )

    def decode(self, latents: Tensor) -> Tensor:
        """Latents ``[N, C, h, w]`` -> images ``[N, 3, H, W]`` float32 in [0, 1]."""
        scale = self.vae.config.scaling_factor
        shift = getattr(self.vae.config, "shift_factor", None) or 0.0
        parts = (latents.to(self.vae.dtype) / scale + shift).split(self.count_decoded_at_once(latents))
        with torch.no_grad(), self.on_device(self.vae):
            images = torch.cat([self.vae.decode(part, return_dict=False)[0] for part in parts])
        images = images.masked_fill_(images.isinf(), torch.nan)  # else its pixel would be a plain white or black
        return self.output_process.postprocess(images, output_type="pt").float()

    def count_decoded_at_once(self, latents: Tensor) -> int:
        """See ``FlowModel``."""
        return max(DECODED_PIXELS // (latents[0, 0].numel() * self.pipeline.vae_scale_factor**2), 1)

    # ---- conditions and velocity -------------------------------------------------------------------------------

    def encode_prompts(self, prompts: Sequence[str], negative: Negative = None, *, each: bool = False) -> Cond:
        """See ``FlowModel``."""
        with torch.no_grad(), self.encoding_texts():
            text = self._encode(list(prompts), each)
            away = negatives(negative, len(prompts))
            return Cond(text=text, negative=None if away is None else self._encode(away, each))

    def predict(self, latents: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
        """One call of the transformer at its own ``timestep``; the result has the dtype of ``latents``."""
        inputs = self.transformer_input(latents, timestep.to(latents.device), dict(cond.text))
        with self._autocast():
            return self.transformer(**inputs)[0].to(latents.dtype)

    def training_sft_step(
        self,
        clean_latents: Tensor,
        cond: Cond,
        *,
        timestep: Tensor,
        noise: Tensor,
        sample_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Flow-matching loss of a micro-batch, see ``PipelineModel``."""
        noised, noise, timesteps = self.add_noise(clean_latents, timestep=timestep, noise=noise)
        self.num_evaluations += len(clean_latents)
        velocity = self.predict(noised, timesteps, cond)
        sigma = timesteps.float().to(clean_latents.device) / self.scheduler.config.num_train_timesteps
        weight = combine_weights(loss_weight(sigma, self.config.weighting_scheme), sample_weight)
        return flow_matching_loss(velocity, clean_latents, noise, element_mask=cond.element_mask, weight_B=weight)

    # ---- sampling ----------------------------------------------------------------------------------------------

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's latents for an image of that size."""
        factor = self.pipeline.vae_scale_factor
        return (self.transformer.config.in_channels, height // factor, width // factor)

    def sample_stock(
        self, pipeline: Any, prompt: str, generator: torch.Generator, *, num_steps: int, guidance: float
    ) -> Tensor:
        """See ``PipelineModel``."""
        height, width = self.media_size
        return pipeline(
            prompt,
            height=height,
            width=width,
            num_inference_steps=num_steps,
            guidance_scale=guidance,
            max_sequence_length=self.config.max_prompt_length,
            generator=[generator],
            output_type="latent",
        ).images

    # ---- inside ------------------------------------------------------------------------------------------------

    def _encode(self, prompts: list[str], each: bool) -> dict[str, Tensor]:
        distinct = prompts
        if not each:
            distinct = list(dict.fromkeys(prompts))
        if self.warns_of_cuts:
            self.warn_about_truncation(
                [(repr(printable(prompt[:40])), prompt) for prompt in distinct], "prompts (so far)"
            )
        keywords = {"device": self.device, "max_sequence_length": self.config.max_prompt_length}
        try:
            with quiet_warnings():
                encoded = self.text_embedding(distinct, **filter_keywords(self.text_embedding, keywords))
        except Exception:
            self._check_readable(distinct)
            raise
        compute = self.param_dtype
        given = {k: v.to(compute) if v.is_floating_point() else v for k, v in encoded.items() if v is not None}
        if len(distinct) == len(prompts):
            return given
        rows = torch.tensor([distinct.index(prompt) for prompt in prompts], device=self.device)
        return {k: v[rows] for k, v in given.items()}

    def _check_readable(self, prompts: Sequence[str]) -> None:
        """Raise `UserError` for the first prompt that a tokenizer does not take."""
        for prompt in prompts:
            why = find_refusal(prompt, self.build_token_counters())
            if why is not None:
                raise UserError(f"prompt {printable(prompt[:80])!r}: {why}")
