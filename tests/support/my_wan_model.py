"""The documents' "Add new models" class for videos, over a pipeline that we do not ship a class for."""

import torch

from cosmos_rl.policy.config import DiffusersConfig
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.model.diffusers.weight_mapper import DiffuserModelWeightMapper


@ModelRegistry.register(DiffuserModelWeightMapper)
class MyVideoModel(DiffuserModel):
    @staticmethod
    def supported_model_types():
        return ["WanPipeline"]

    def __init__(self, config: DiffusersConfig, **kwargs):
        super().__init__(config, **kwargs)
        self.set_scheduler_timestep(self.train_sampling_steps)
        self.text_encoders = [self.text_encoder]
        self.tokenizers = [self.tokenizer]

    def text_embedding(self, prompt_list, device):
        embeds, _ = self.pipeline.encode_prompt(
            prompt_list, do_classifier_free_guidance=False, device=device, max_sequence_length=16
        )
        return {"encoder_hidden_states": embeds}

    def visual_embedding(self, visual_list, height, width, device):
        latents = self.vae.encode(torch.stack(visual_list).to(device)).latent_dist.mode()
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return (latents - mean) / std

    def set_scheduler_timestep(self, num_steps):
        self.scheduler.set_timesteps(num_steps)
        self.timestep_map = self.scheduler.timesteps.flip(0)

    def add_noise(self, clean_latents, timestep=None, noise=None):
        timesteps = self.timestep_map[timestep]
        return self.scheduler.add_noise(clean_latents, noise, timesteps), noise, timesteps
