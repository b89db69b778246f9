"""Autoencoders and initialisation that several tiny families share."""

# pyright: reportArgumentType=false
# diffusers' hints name one scheduler, one tokenizer and tuples of one length where several are meant

from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderKLWan
from torch import nn

Module = TypeVar("Module", bound=nn.Module)

VAE_FOLDER = Path(__file__).parent / "vae"
WAN_VAE_FOLDER = Path(__file__).parent / "wan_vae"


def randomise_zeros(module: Module) -> Module:
    """The module with small random numbers where its constructor leaves zeros or memory as it was found.

    Diffusion transformers start with gates and outputs of zero: such a model would answer everything alike.
    """
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("pad_token") or not weight.any():
                weight.normal_(std=0.02)
    return module.eval()


def load_trained_kl() -> AutoencoderKL:
    """The trained autoencoder of the tiny SD3: 3 x 32 x 32 pixels -> 4 x 8 x 8."""
    return AutoencoderKL.from_pretrained(VAE_FOLDER).eval()


def load_trained_wan_vae() -> AutoencoderKLWan:
    """The trained video autoencoder: 3 x (4 k + 1) x 32 x 32 pixels -> 8 x (k + 1) x 4 x 4."""
    return AutoencoderKLWan.from_pretrained(WAN_VAE_FOLDER).eval()


def build_random_kl() -> AutoencoderKL:
    """3 x 32 x 32 pixels -> 4 x 4 x 4, for pipelines that take the factor 8 for granted."""
    return AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        sample_size=32,
    ).eval()


def deep_compression() -> AutoencoderDC:
    """3 x 32 x 32 pixels -> 4 x 16 x 16, without a distribution."""
    return AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    ).eval()


def wan_vae(**changes: Any) -> AutoencoderKLWan:
    """3 x (4 k + 1) x 32 x 32 pixels -> 16 x (k + 1) x 4 x 4."""
    sizes = {
        "base_dim": 4,
        "z_dim": 16,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
    }
    return AutoencoderKLWan(**{**sizes, **changes}).eval()
