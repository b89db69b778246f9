"""Tiny text-to-image pipelines other than SD3: one function each, the real classes, random weights."""

# pyright: reportArgumentType=false
# diffusers' hints name one scheduler, one tokenizer and tuples of one length where several are meant

from typing import Any

import diffusers as d
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, CLIPVisionConfig, CLIPVisionModel

from cosmos_rl.policy.model.tiny import more_text as text
from cosmos_rl.policy.model.tiny.parts import build_random_kl, deep_compression, load_trained_kl, randomise_zeros
from cosmos_rl.policy.model.tiny.text import clip_tokenizer, t5_tokenizer

CLIP_WIDTH = 32


def clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """CLIP without the projection."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModel(config).eval()


def clip_image_encoder() -> CLIPVisionModel:
    """CLIP of images, 32 x 32 pixels."""
    config = CLIPVisionConfig(
        hidden_size=CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * CLIP_WIDTH,
        image_size=32,
        patch_size=8,
    )
    return CLIPVisionModel(config).eval()


def sana() -> d.SanaPipeline:
    tokenizer = text.gemma_tokenizer()
    transformer = d.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=text.WIDTH,
        mlp_ratio=2.5,
        sample_size=16,
        patch_size=1,
    )
    scheduler = d.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return d.SanaPipeline(
        tokenizer, text.gemma_encoder(tokenizer), deep_compression(), randomise_zeros(transformer), scheduler
    )


def flux() -> d.FluxPipeline:
    return _flux(d.FluxPipeline)


def flux_kontext() -> d.FluxKontextPipeline:
    """FLUX.1 Kontext, which edits an image."""
    return _flux(d.FluxKontextPipeline)


def _flux(pipeline_class: Any) -> Any:
    clip, t5 = clip_tokenizer(77), t5_tokenizer()
    transformer = d.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=text.WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    return pipeline_class(
        d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        load_trained_kl(),
        clip_encoder(clip),
        clip,
        text.t5_encoder(t5),
        t5,
        randomise_zeros(transformer),
    )


def flux2_klein() -> d.Flux2KleinPipeline:
    tokenizer = text.qwen_tokenizer()
    transformer = d.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * text.WIDTH,
        timestep_guidance_channels=256,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    vae = d.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=32,
    ).eval()
    vae.bn.register_buffer("running_mean", torch.rand(16) - 0.5)  # as after training
    vae.bn.register_buffer("running_var", 0.5 + torch.rand(16))
    scheduler = d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    return d.Flux2KleinPipeline(
        scheduler, vae, text.deep_qwen3_encoder(tokenizer), tokenizer, randomise_zeros(transformer), is_distilled=False
    )


def qwen_image() -> d.QwenImagePipeline:
    tokenizer = text.qwen_tokenizer()
    transformer = d.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=text.WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    vae = d.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 1.5, 0.7, 2.0],
    ).eval()
    scheduler = d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02)
    return d.QwenImagePipeline(scheduler, vae, text.qwen_vl_encoder(tokenizer), tokenizer, randomise_zeros(transformer))


def z_image() -> d.ZImagePipeline:
    tokenizer = text.qwen_tokenizer()
    transformer = d.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=text.WIDTH,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 64, 64],
    )
    scheduler = d.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return d.ZImagePipeline(
        scheduler, load_trained_kl(), text.qwen3_encoder(tokenizer), tokenizer, randomise_zeros(transformer)
    )


def cogview4() -> d.CogView4Pipeline:
    tokenizer = text.gemma_tokenizer()  # like GLM's own, it never gives an empty prompt no token at all
    transformer = d.CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=text.WIDTH,
        time_embed_dim=8,
        condition_dim=4,
        sample_size=8,
    )
    scheduler = d.FlowMatchEulerDiscreteScheduler(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    return d.CogView4Pipeline(
        tokenizer, text.glm_encoder(tokenizer), load_trained_kl(), randomise_zeros(transformer), scheduler
    )


def lumina2() -> d.Lumina2Pipeline:
    tokenizer = text.gemma_tokenizer()
    transformer = d.Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(8, 4, 4),
        axes_lens=(512, 64, 64),
        cap_feat_dim=text.WIDTH,
    )
    scheduler = d.FlowMatchEulerDiscreteScheduler(shift=6.0)
    return d.Lumina2Pipeline(
        randomise_zeros(transformer), scheduler, build_random_kl(), text.gemma_encoder(tokenizer), tokenizer
    )


def chroma() -> d.ChromaPipeline:
    tokenizer = t5_tokenizer()
    transformer = d.ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=text.WIDTH,
        axes_dims_rope=(4, 4, 8),
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    scheduler = d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    return d.ChromaPipeline(
        scheduler, load_trained_kl(), text.t5_encoder(tokenizer), tokenizer, randomise_zeros(transformer)
    )


def aura_flow() -> d.AuraFlowPipeline:
    tokenizer = t5_tokenizer()
    transformer = d.AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=text.WIDTH,
        pos_embed_max_size=256,
    )
    scheduler = d.FlowMatchEulerDiscreteScheduler(shift=1.73)
    return d.AuraFlowPipeline(
        tokenizer, text.umt5_encoder(tokenizer), load_trained_kl(), randomise_zeros(transformer), scheduler
    )
