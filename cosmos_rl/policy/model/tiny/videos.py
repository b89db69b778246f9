"""Tiny text-to-video pipelines: one function each, the real classes, random weights."""

# pyright: reportArgumentType=false
# diffusers' hints name one scheduler, one tokenizer and tuples of one length where several are meant

from typing import Any

import diffusers as d
import torch
from transformers import CLIPImageProcessor

from cosmos_rl.policy.model.tiny import more_text as text
from cosmos_rl.policy.model.tiny.images import CLIP_WIDTH, clip_encoder, clip_image_encoder
from cosmos_rl.policy.model.tiny.parts import load_trained_wan_vae, randomise_zeros, wan_vae
from cosmos_rl.policy.model.tiny.text import clip_tokenizer, t5_tokenizer


def _wan_transformer(given: int = 0, **changes: Any) -> d.WanTransformer3DModel:
    """``given``: channels that an image fills."""
    transformer = d.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16 + given,
        out_channels=16,
        text_dim=text.WIDTH,
        freq_dim=256,
        ffn_dim=64,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
        **changes,
    )
    return randomise_zeros(transformer)


def _unipc(shift: float) -> d.UniPCMultistepScheduler:
    return d.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def wan() -> d.WanPipeline:
    """Wan 2.1."""
    return _wan(d.WanPipeline, _unipc(3.0))


def wan_shapes() -> d.WanPipeline:
    """Wan 2.1 that can learn moving shapes: a trained autoencoder, and gates at zero as before a real training."""
    tokenizer, vae = t5_tokenizer(), load_trained_wan_vae()
    transformer = d.WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=vae.config["z_dim"],
        out_channels=vae.config["z_dim"],
        text_dim=text.WIDTH,
        freq_dim=256,
        ffn_dim=384,
        num_layers=4,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return d.WanPipeline(tokenizer, text.umt5_encoder(tokenizer), vae, _unipc(1.0), transformer)


def wan22() -> d.WanPipeline:
    """Wan 2.2 with an expert for high and one for low noise."""
    return _wan(d.WanPipeline, _unipc(3.0), transformer_2=_wan_transformer(), boundary_ratio=0.875)


def wan22_5b() -> d.WanPipeline:
    """Wan 2.2 with one transformer that takes a time per token."""
    return _wan(d.WanPipeline, _unipc(5.0), expand_timesteps=True)


def wan22_i2v() -> d.WanImageToVideoPipeline:
    """Wan 2.2 from an image, with an expert for high and one for low noise."""
    second = _wan_transformer(given=20)
    return _wan(d.WanImageToVideoPipeline, _unipc(3.0), given=20, transformer_2=second, boundary_ratio=0.875)


def wan22_5b_i2v() -> d.WanImageToVideoPipeline:
    """Wan 2.2 with one transformer that takes a time per token, from an image."""
    return _wan(d.WanImageToVideoPipeline, _unipc(5.0), expand_timesteps=True)


def _wan(pipeline_class: Any, scheduler: Any, *, given: int = 0, **parts: Any) -> Any:
    """``given``: channels of the transformer that an image fills."""
    tokenizer = t5_tokenizer()
    return pipeline_class(
        tokenizer=tokenizer,
        text_encoder=text.umt5_encoder(tokenizer),
        vae=wan_vae(),
        scheduler=scheduler,
        transformer=_wan_transformer(given=given),
        **parts,
    )


def wan_i2v() -> d.WanImageToVideoPipeline:
    """Wan 2.1 from an image, which its CLIP encoder sees too."""
    tokenizer = t5_tokenizer()
    return d.WanImageToVideoPipeline(
        tokenizer,
        text.umt5_encoder(tokenizer),
        wan_vae(),
        _unipc(3.0),
        CLIPImageProcessor(size=32, crop_size=32),
        clip_image_encoder(),
        _wan_transformer(given=20, image_dim=CLIP_WIDTH),
    )


def sana_video() -> d.SanaVideoPipeline:
    return _sana_video(d.SanaVideoPipeline)


def sana_video_i2v() -> d.SanaImageToVideoPipeline:
    """SANA-Video from an image."""
    return _sana_video(d.SanaImageToVideoPipeline)


def _sana_video(pipeline_class: Any) -> Any:
    tokenizer = text.gemma_tokenizer()
    transformer = d.SanaVideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=text.WIDTH,
        mlp_ratio=2.5,
        sample_size=8,
        patch_size=(1, 2, 2),
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    scheduler = d.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    return pipeline_class(tokenizer, text.gemma_encoder(tokenizer), wan_vae(), randomise_zeros(transformer), scheduler)


def cosmos2_5() -> d.Cosmos2_5_PredictBasePipeline:
    """Cosmos-Predict 2.5 without its safety checker, which needs a package and weights of its own."""
    from cosmos_rl.policy.model.driver.loading import NothingChecked

    tokenizer = text.qwen_tokenizer()
    transformer = d.CosmosTransformer3DModel(
        in_channels=16 + 1,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=32,
        adaln_lora_dim=4,
        max_size=(8, 32, 32),
        patch_size=(1, 2, 2),
        rope_scale=(1.0, 3.0, 3.0),
        concat_padding_mask=True,
        extra_pos_embed_type=None,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=2 * text.WIDTH,
        encoder_hidden_states_channels=32,
    )
    scheduler = d.UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        use_karras_sigmas=True,
        sigma_max=200.0,
        sigma_min=0.01,
    )
    return d.Cosmos2_5_PredictBasePipeline(
        text.qwen_vl_encoder(tokenizer), tokenizer, randomise_zeros(transformer), wan_vae(), scheduler, NothingChecked()
    )


def cosmos2() -> d.Cosmos2TextToImagePipeline:
    """Cosmos-Predict 2, whose states are x0 + sigma * noise, without its safety checker."""
    from cosmos_rl.policy.model.driver.loading import NothingChecked

    tokenizer = t5_tokenizer()
    transformer = d.CosmosTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=text.WIDTH,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        rope_scale=(1.0, 4.0, 4.0),
        concat_padding_mask=True,
        extra_pos_embed_type=None,
    )
    scheduler = d.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    return d.Cosmos2TextToImagePipeline(
        text.t5_encoder(tokenizer), tokenizer, randomise_zeros(transformer), wan_vae(), scheduler, NothingChecked()
    )


def hunyuan_video() -> d.HunyuanVideoPipeline:
    tokenizer, clip = text.llama_tokenizer(), clip_tokenizer(77)
    return d.HunyuanVideoPipeline(
        text.llama_encoder(tokenizer),
        tokenizer,
        _hunyuan_transformer(),
        _hunyuan_vae(),
        d.FlowMatchEulerDiscreteScheduler(shift=7.0),
        clip_encoder(clip),
        clip,
    )


def hunyuan_video_i2v() -> d.HunyuanVideoImageToVideoPipeline:
    """HunyuanVideo from an image, whose frame is no part of the state."""
    tokenizer, clip = text.llava_tokenizer(), clip_tokenizer(77)
    return d.HunyuanVideoImageToVideoPipeline(
        text.llava_encoder(tokenizer),
        tokenizer,
        _hunyuan_transformer(image_condition_type="token_replace"),
        _hunyuan_vae(),
        d.FlowMatchEulerDiscreteScheduler(shift=7.0),
        clip_encoder(clip),
        clip,
        CLIPImageProcessor(size=text.LLAVA_SIDE, crop_size=text.LLAVA_SIDE),
    )


def _hunyuan_transformer(**changes: Any) -> d.HunyuanVideoTransformer3DModel:
    transformer = d.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=text.WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        rope_axes_dim=(2, 4, 4),
        **changes,
    )
    return randomise_zeros(transformer)


def _hunyuan_vae() -> d.AutoencoderKLHunyuanVideo:
    return d.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=0.476986,
    ).eval()


def ltx() -> d.LTXPipeline:
    return _ltx(d.LTXPipeline)


def ltx_i2v() -> d.LTXImageToVideoPipeline:
    """LTX from an image."""
    return _ltx(d.LTXImageToVideoPipeline)


def _ltx(pipeline_class: Any) -> Any:
    tokenizer = t5_tokenizer()
    transformer = d.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=text.WIDTH,
    )
    vae = d.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_residual=(False, False, False, False),
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    ).eval()
    scheduler = d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1)
    return pipeline_class(scheduler, vae, text.t5_encoder(tokenizer), tokenizer, randomise_zeros(transformer))


def mochi() -> d.MochiPipeline:
    tokenizer = t5_tokenizer()
    transformer = d.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        qk_norm="rms_norm",
        text_embed_dim=text.WIDTH,
        time_embed_dim=4,
        activation_fn="swiglu",
        max_sequence_length=16,
    )
    with torch.no_grad():
        transformer.pos_frequencies.normal_(std=0.1)  # the constructor leaves memory as it was found
    vae = d.AutoencoderKLMochi(
        latent_channels=12,
        out_channels=3,
        encoder_block_out_channels=(32, 32, 32, 32),  # its norms have 32 groups
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    ).eval()
    scheduler = d.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    return d.MochiPipeline(scheduler, vae, text.t5_encoder(tokenizer), tokenizer, randomise_zeros(transformer))
