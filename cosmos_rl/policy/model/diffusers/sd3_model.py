"""Stable Diffusion 3 and 3.5."""

from typing import Any

import torch
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import DiffusersConfig
from cosmos_rl.policy.config.model_rules import size_problems
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.diffusers.diffuser_model import DiffuserModel
from cosmos_rl.policy.model.diffusers.weight_mapper import DiffuserModelWeightMapper


@ModelRegistry.register(DiffuserModelWeightMapper)
class SD3Model(DiffuserModel):
    """``StableDiffusion3Pipeline``: three text encoders, a shifted and scaled VAE, timesteps ``1000 * sigma``."""

    @staticmethod
    def supported_model_types() -> list[str]:
        return ["StableDiffusion3Pipeline"]

    def __init__(self, config: DiffusersConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        factor = self.pipeline.vae_scale_factor * self.transformer.config.patch_size
        for problem in size_problems(config, self.model_str, factor):
            raise UserError(problem)
        self.set_scheduler_timestep(self.train_sampling_steps)
        self.text_encoders = [self.text_encoder, self.pipeline.text_encoder_2, self.pipeline.text_encoder_3]
        self.tokenizers = [self.tokenizer, self.pipeline.tokenizer_2, self.pipeline.tokenizer_3]

    def text_embedding(
        self, prompt_list: list[str], device: torch.device, *, max_sequence_length: int = 256
    ) -> dict[str, Tensor | None]:
        """``encoder_hidden_states`` ``[B, 77 + max_sequence_length, D]`` and ``pooled_projections`` ``[B, P]``."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompt_list,
            prompt_2=None,
            prompt_3=None,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    def visual_embedding(self, visual_list: list[Tensor], height: int, width: int, device: torch.device) -> Tensor:
        """Latents ``(mean - shift_factor) * scaling_factor``, ``[B, C, H/8, W/8]`` float32 (the posterior's mean)."""
        images = torch.stack(visual_list).to(device, self.vae.dtype)
        if images.shape[-2:] != (height, width):
            raise UserError(
                f"the data set gives images of {tuple(images.shape[-2:])} pixels, policy.diffusers.inference_size "
                f"is ({height}, {width})"
            )
        mean = self.vae.encode(images).latent_dist.mode()
        shift = self.vae.config.shift_factor or 0.0
        return ((mean - shift) * self.vae.config.scaling_factor).float()
