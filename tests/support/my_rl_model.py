"""The documents' "Add new models" class with its four methods of SFT and its two of RL filled in."""

import inspect

import torch
from diffusers import SanaPipeline

from cosmos_rl.policy.config import DiffusersConfig
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.model.diffusers.weight_mapper import DiffuserModelWeightMapper

INSTRUCTION = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default


@ModelRegistry.register(DiffuserModelWeightMapper)
class MyRlModel(DiffuserModel):
    @staticmethod
    def supported_model_types():
        return ["SanaPipeline"]

    def __init__(self, config: DiffusersConfig, **kwargs):
        super().__init__(config, **kwargs)
        self.set_scheduler_timestep(self.train_sampling_steps)
        self.text_encoders = [self.text_encoder]
        self.tokenizers = [self.tokenizer]

    def text_embedding(self, prompt_list, device, max_sequence_length):
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            prompt_list,
            do_classifier_free_guidance=False,
            device=device,
            max_sequence_length=max_sequence_length,
            complex_human_instruction=INSTRUCTION,
        )
        return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}

    def visual_embedding(self, visual_list, height, width, device):
        latents = self.vae.encode(torch.stack(visual_list).to(device)).latent
        return latents * self.vae.config.scaling_factor

    def set_scheduler_timestep(self, num_steps):
        self.scheduler.set_timesteps(num_steps)
        self.timestep_map = self.scheduler.timesteps.flip(0)

    def add_noise(self, clean_latents, timestep=None, noise=None):
        timesteps = self.timestep_map[timestep]
        return self.scheduler.add_noise(clean_latents, noise, timesteps), noise, timesteps

    def pipeline_with_logprob(
        self, *, prompt_embeds, prompt_attention_mask, height, width, generator, num_inference_steps, **kwargs
    ):
        shape = self.latent_shape(height, width)
        latents = torch.stack([torch.randn(shape, generator=one) for one in generator]).to(self.device)
        self.scheduler.set_timesteps(num_inference_steps)
        sigmas, all_latents = self.scheduler.sigmas, [latents]
        for index, timestep in enumerate(self.scheduler.timesteps):
            inputs = self.nft_prepare_transformer_input(
                latents, prompt_embeds, prompt_attention_mask, None, timestep.expand(len(latents)), 1, height, width
            )
            velocity = self.transformer(**inputs)[0]
            latents = latents + (sigmas[index + 1] - sigmas[index]) * velocity
            all_latents.append(latents)
        return self.decode(latents), all_latents, None

    def nft_prepare_transformer_input(
        self,
        latents,
        prompt_embeds,
        prompt_attention_mask,
        pooled_prompt_embeds,
        timestep,
        num_frames,
        height,
        width,
    ):
        return {
            "hidden_states": latents,
            "encoder_hidden_states": prompt_embeds,
            "encoder_attention_mask": prompt_attention_mask,
            "timestep": timestep,
            "return_dict": False,
        }
