"""A tiny `StableDiffusion3Pipeline`: the real classes, a trained autoencoder, everything else random from a seed."""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)

from cosmos_rl.policy.model.quiet import quiet_libraries
from cosmos_rl.policy.model.tiny.text import (
    CLIP_WIDTH,
    T5_WIDTH,
    clip_encoder,
    clip_tokenizer,
    t5_encoder,
    t5_tokenizer,
)

VAE_FOLDER = Path(__file__).parent / "vae"


@dataclass(frozen=True)
class Preset:
    """Sizes of one tiny pipeline. `sample_size` is the latent edge: 4 pixels each."""

    layers: int
    heads: int
    head_dim: int
    sample_size: int = 8
    patch_size: int = 2
    clip_length: int = 16
    shift: float = 3.0
    gates_at_zero: bool = False


PRESETS = {
    "unit": Preset(layers=2, heads=4, head_dim=16),
    "digits": Preset(layers=3, heads=4, head_dim=24, clip_length=12, shift=1.0, gates_at_zero=True),
}


def build_sd3(out: Path, *, size: str, seed: int) -> None:
    """Writes a whole pipeline folder for the preset `size` into `out`. The same seed gives the same bytes."""
    with torch.random.fork_rng(devices=[]), quiet_libraries():
        torch.manual_seed(seed)
        sd3_pipeline(PRESETS[size]).save_pretrained(out)


def sd3_pipeline(preset: Preset) -> StableDiffusion3Pipeline:
    """Returns the pipeline in memory; random weights come from torch's current CPU generator."""
    clip, t5 = clip_tokenizer(preset.clip_length), t5_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=_transformer(preset),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=preset.shift),
        vae=AutoencoderKL.from_pretrained(VAE_FOLDER).eval(),
        text_encoder=clip_encoder(clip),
        tokenizer=clip,
        text_encoder_2=clip_encoder(clip),
        tokenizer_2=clip_tokenizer(preset.clip_length),
        text_encoder_3=t5_encoder(t5),
        tokenizer_3=t5,
    )


def _transformer(preset: Preset) -> SD3Transformer2DModel:
    width = preset.heads * preset.head_dim
    transformer = SD3Transformer2DModel(
        sample_size=preset.sample_size,
        patch_size=preset.patch_size,
        in_channels=4,
        out_channels=4,
        num_layers=preset.layers,
        attention_head_dim=preset.head_dim,
        num_attention_heads=preset.heads,
        caption_projection_dim=width,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=4 * preset.sample_size // preset.patch_size,
        qk_norm="rms_norm",
    ).eval()
    if preset.gates_at_zero:
        _close_gates(transformer)
    return transformer


def _close_gates(transformer: SD3Transformer2DModel) -> None:
    """Starts every block as the identity and the output at zero, as diffusion transformers are usually trained."""
    for name, parameter in transformer.named_parameters():
        if ".norm1" in name or name.startswith(("norm_out.", "proj_out.")):
            torch.nn.init.zeros_(parameter)
