"""`[model]` of the older configuration, without `[model.rl]`."""

import math
from typing import Literal

from pydantic import Field

from cosmos_rl.policy.config.base import AnyTable, Table
from cosmos_rl.policy.config.wfm import Count, PositiveNumber, RLConfig


class TokenizerConfig(Table):
    """`[model.tokenizer]`: the Wan2.1 VAE."""

    chunk_duration: int = 81
    load_mean_std: bool = False
    compile_encode: bool = False
    temporal_window: int = 16


class ConditionerConfig(Table):
    """`[[model.conditioner]]`: one of the inputs of the transformer next to the noised video."""

    name: str
    type: Literal["remap_key", "text_attr", "boolean_flag"] = "remap_key"
    output_key: str | None = None
    input_key: str | tuple[str, ...] | None = None
    dropout_rate: float = 0.0
    """Share of samples that are trained without this input."""


class SacConfig(Table):
    """`[model.net.sac_config]`: which activations are computed again in the backward pass."""

    mode: Literal["block_wise", "mm_only", "none"] = "block_wise"
    every_n_blocks: int = 1


class NetConfig(Table):
    """`[model.net]`: the transformer."""

    max_img_h: int = 240
    max_img_w: int = 240
    max_frames: int = 128
    in_channels: int = 16
    out_channels: int = 16
    patch_spatial: int = 2
    patch_temporal: int = 1
    model_channels: int = 2048
    num_blocks: int = 28
    num_heads: int = 16
    concat_padding_mask: bool = True
    pos_emb_cls: str = "rope3d"
    pos_emb_learnable: bool = True
    pos_emb_interpolation: str = "crop"
    use_adaln_lora: bool = True
    adaln_lora_dim: int = 256
    atten_backend: str = "minimal_a2a"
    extra_per_block_abs_pos_emb: bool = False
    rope_h_extrapolation_ratio: float = 3.0
    rope_w_extrapolation_ratio: float = 3.0
    rope_t_extrapolation_ratio: float = 1.0
    rope_enable_fps_modulation: bool = False
    sac_config: SacConfig = SacConfig()
    use_crossattn_projection: bool = False
    crossattn_proj_in_channels: int = 100352
    crossattn_emb_channels: int = 1024


class EmaConfig(Table):
    """`[model.ema]`: the average of the trained weights."""

    enabled: bool = True
    rate: float = 0.1
    iteration_shift: int = 0


class SdeConfig(Table):
    """`[model.sde]`: noise levels of fine-tuning, and the range of sampling."""

    p_mean: float = math.log(4.0)
    p_std: float = 1.2
    sigma_max: float = 200.0
    sigma_min: float = 0.01


class TextEncoderConfig(Table):
    """`[model.text_encoder_config]`: the encoder of prompts."""

    compute_online: bool = False
    embedding_concat_strategy: Literal["mean_pooling", "full_concat", "pool_every_n_layers_and_concat"] = "mean_pooling"
    n_layers_per_group: int = 5
    ckpt_path: str = "nvidia/Cosmos-Reason1-7B"
    tokenizer_type: str = "Qwen/Qwen2-VL-2B-Instruct"
    encoder_model_config: AnyTable = Field(default_factory=dict)
    """Fields of a Qwen2.5-VL configuration."""


class ModelConfig(Table):
    """`[model]`: transformer, encoders, noise levels, and reinforcement learning."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    conditioner: tuple[ConditionerConfig, ...] = ()
    text_encoder_class: str = "T5"
    text_encoder_config: TextEncoderConfig | None = None
    net: NetConfig = NetConfig()
    ema: EmaConfig = EmaConfig()
    sde: SdeConfig = SdeConfig()
    fsdp_shard_size: Count = 8
    dp_replicate_size: Count = 1
    context_parallel_size: Count | None = None
    """An older place of `model_parallel.context_parallel_size`."""
    sigma_data: float = 1.0
    precision: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    input_data_key: str = "video"
    input_image_key: str = "images"
    input_caption_key: str = "ai_caption"
    loss_reduce: Literal["mean", "sum"] = "mean"
    loss_scale: PositiveNumber = 10.0
    use_torch_compile: bool = False
    adjust_video_noise: bool = True
    state_ch: int = 16
    state_t: Count = 24
    resolution: str = "480"
    scaling: Literal["rectified_flow", "edm"] = "rectified_flow"
    rectified_flow_t_scaling_factor: float = 1.0
    rectified_flow_loss_weight_uniform: bool = True
    resize_online: bool = True
    rl: RLConfig = RLConfig()
    min_num_conditional_frames: int = 1
    max_num_conditional_frames: int = 2
    sigma_conditional: float = 1e-4
    conditioning_strategy: Literal["frame_replace", "channel_concat"] = "frame_replace"
    denoise_replace_gt_frames: bool = True
    high_sigma_strategy: str = "LOGUNIFORM200_100000"
    high_sigma_ratio: float = 0.05
    low_sigma_ratio: float = 0.05
    use_rf_ckpts: bool = False

    @property
    def text_dropout(self) -> float:
        """Share of samples that are trained without their text."""
        return next((one.dropout_rate for one in self.conditioner if one.name == "text"), 0.0)
