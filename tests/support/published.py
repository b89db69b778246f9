"""The models of the recipes as their files would describe them: shapes of the real classes, built without memory."""

import functools
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers as d
from accelerate import init_empty_weights

from cosmos_rl.launcher.acceptance.accept import ModelFiles
from cosmos_rl.launcher.acceptance.selection import select
from cosmos_rl.launcher.pipeline_files import PipelineFiles, Shapes
from cosmos_rl.policy.config import Config


@dataclass(frozen=True)
class Encoder:
    """A frozen encoder: all its weights, and of them those of its tables of tokens; the layers share the rest."""

    weights: int
    layers: int
    table: tuple[int, int]
    tables: int = 1

    @property
    def shapes(self) -> Shapes:
        """One tensor for each table and each layer."""
        rest = self.weights - self.tables * math.prod(self.table)
        sizes = [rest // self.layers] * (self.layers - 1)
        found: dict[str, tuple[int, ...]] = {f"table_{number}": self.table for number in range(self.tables)}
        return found | {f"layers.{i}.all": (size,) for i, size in enumerate([*sizes, rest - sum(sizes)])}


@dataclass(frozen=True)
class Published:
    """What decides the memory of one model."""

    pipeline: str
    transformer: type
    settings: Mapping[str, Any]
    """Of the transformer, where they are not its class's defaults."""
    vae: Mapping[str, Any]
    vae_weights: int
    encoders: Mapping[str, "Encoder"]
    experts: tuple[str, ...] = ("transformer",)


_KL = {"_class_name": "AutoencoderKL", "block_out_channels": [128, 256, 512, 512], "latent_channels": 16}
_SDXL = {**_KL, "latent_channels": 4}
_FLUX2 = {**_KL, "_class_name": "AutoencoderKLFlux2", "latent_channels": 32, "patch_size": [2, 2]}
_WAN = {"_class_name": "AutoencoderKLWan", "base_dim": 96, "temperal_downsample": [False, True, True], "z_dim": 16}
_QWEN = {**_WAN, "_class_name": "AutoencoderKLQwenImage"}
_WAN_2_2 = {**_WAN, "base_dim": 160, "z_dim": 48, "patch_size": 2, "scale_factor_spatial": 16}
_HUNYUAN = {**_KL, "_class_name": "AutoencoderKLHunyuanVideo", "spatial_compression_ratio": 8}
_HUNYUAN |= {"temporal_compression_ratio": 4}
_LTX = {"_class_name": "AutoencoderKLLTXVideo", "block_out_channels": [128, 256, 512, 512], "latent_channels": 128}
_LTX |= {"patch_size": 4, "patch_size_t": 1, "spatio_temporal_scaling": [True, True, True, False]}
_MOCHI = {"_class_name": "AutoencoderKLMochi", "encoder_block_out_channels": [64, 128, 256, 384], "latent_channels": 12}
_MOCHI |= {"temporal_expansions": [1, 2, 3], "spatial_expansions": [2, 2, 2]}
_DC = {"_class_name": "AutoencoderDC", "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024]}
_DC |= {"latent_channels": 32}

# counted in the classes of transformers and diffusers with the published settings
_T5, _UMT5 = Encoder(4_762_310_656, 24, (32_128, 4096)), Encoder(5_680_910_336, 24, (256_384, 4096))
_PILE_T5, _T5_11B = Encoder(1_223_550_976, 24, (32_128, 2048)), Encoder(4_864_791_552, 24, (32_128, 1024))
_QWEN_VL = Encoder(8_292_166_656, 28, (152_064, 3584), tables=2)
_QWEN_3, _GEMMA_2 = Encoder(4_022_468_096, 36, (151_936, 2560)), Encoder(2_614_341_888, 26, (256_000, 2304))
_GLM_4, _LLAMA_3 = Encoder(8_779_194_368, 40, (151_552, 4096)), Encoder(7_505_186_816, 32, (128_320, 4096))
_CLIP_L, _CLIP_L_PROJECTED = Encoder(123_060_480, 12, (49_408, 768)), Encoder(123_650_304, 12, (49_408, 768))
_CLIP_G, _CLIP_H = Encoder(694_659_840, 32, (49_408, 1280)), Encoder(630_766_080, 32, (257, 1280))
_KL_WEIGHTS, _WAN_WEIGHTS = 83_819_683, 126_892_531

_FLUX = {"guidance_embeds": True}
_KLEIN = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
_WAN_14B = {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
_WAN_5B = {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48}
_COGVIEW4 = {"num_layers": 28, "attention_head_dim": 128, "num_attention_heads": 32, "text_embed_dim": 4096}
_SD35 = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384}
_SD35 |= {"dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm", "joint_attention_dim": 4096}
_COSMOS = {"in_channels": 17, "num_attention_heads": 16, "num_layers": 28, "rope_scale": (1.0, 3.0, 3.0)}
_COSMOS |= {"extra_pos_embed_type": None, "use_crossattn_projection": True, "crossattn_proj_in_channels": 100352}
_COSMOS_TEXT = {"encoder_hidden_states_channels": 1024}
_COSMOS_2 = {"in_channels": 16, "num_attention_heads": 16, "num_layers": 28, "rope_scale": (1.0, 4.0, 4.0)}
_COSMOS_2 |= {"extra_pos_embed_type": None}
_WAN_PARTS = {"text_encoder": _UMT5}
_EXPERTS = ("transformer", "transformer_2")

PUBLISHED = {
    "stabilityai/stable-diffusion-3.5-medium": Published(
        "StableDiffusion3Pipeline",
        d.SD3Transformer2DModel,
        {**_SD35, "pooled_projection_dim": 2048},
        _KL,
        _KL_WEIGHTS,
        {"text_encoder": _CLIP_L_PROJECTED, "text_encoder_2": _CLIP_G, "text_encoder_3": _T5},
    ),
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": Published(
        "SanaPipeline",
        d.SanaTransformer2DModel,
        {"qk_norm": "rms_norm_across_heads"},
        _DC,
        312_250_275,
        {"text_encoder": _GEMMA_2},
    ),
    "Efficient-Large-Model/SANA-Video_2B_480p_diffusers": Published(
        "SanaVideoPipeline", d.SanaVideoTransformer3DModel, {}, _WAN, _WAN_WEIGHTS, {"text_encoder": _GEMMA_2}
    ),
    "nvidia/Cosmos-Predict2.5-2B": Published(
        "Cosmos2_5_PredictBasePipeline",
        d.CosmosTransformer3DModel,
        {**_COSMOS, **_COSMOS_TEXT},
        _WAN,
        _WAN_WEIGHTS,
        {"text_encoder": _QWEN_VL},
    ),
    "nvidia/Cosmos-Predict2-2B-Text2Image": Published(
        "Cosmos2TextToImagePipeline",
        d.CosmosTransformer3DModel,
        _COSMOS_2,
        _WAN,
        _WAN_WEIGHTS,
        {"text_encoder": _T5_11B},
    ),
    "black-forest-labs/FLUX.1-dev": Published(
        "FluxPipeline",
        d.FluxTransformer2DModel,
        _FLUX,
        _KL,
        _KL_WEIGHTS,
        {"text_encoder": _CLIP_L, "text_encoder_2": _T5},
    ),
    "black-forest-labs/FLUX.2-klein-base-4B": Published(
        "Flux2KleinPipeline",
        d.Flux2Transformer2DModel,
        {**_KLEIN, "guidance_embeds": False},
        _FLUX2,
        84_046_115,
        {"text_encoder": _QWEN_3},
    ),
    "Qwen/Qwen-Image": Published(
        "QwenImagePipeline", d.QwenImageTransformer2DModel, {}, _QWEN, _WAN_WEIGHTS, {"text_encoder": _QWEN_VL}
    ),
    "Tongyi-MAI/Z-Image": Published(
        "ZImagePipeline", d.ZImageTransformer2DModel, {}, _KL, _KL_WEIGHTS, {"text_encoder": _QWEN_3}
    ),
    "zai-org/CogView4-6B": Published(
        "CogView4Pipeline", d.CogView4Transformer2DModel, _COGVIEW4, _KL, _KL_WEIGHTS, {"text_encoder": _GLM_4}
    ),
    "Alpha-VLLM/Lumina-Image-2.0": Published(
        "Lumina2Pipeline",
        d.Lumina2Transformer2DModel,
        {"cap_feat_dim": 2304},
        _KL,
        _KL_WEIGHTS,
        {"text_encoder": _GEMMA_2},
    ),
    "lodestones/Chroma1-HD": Published(
        "ChromaPipeline", d.ChromaTransformer2DModel, {}, _KL, _KL_WEIGHTS, {"text_encoder": _T5}
    ),
    "fal/AuraFlow-v0.3": Published(
        "AuraFlowPipeline",
        d.AuraFlowTransformer2DModel,
        {"pos_embed_max_size": 9216},
        _SDXL,
        83_653_863,
        {"text_encoder": _PILE_T5},
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Published(
        "WanPipeline",
        d.WanTransformer3DModel,
        {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
        _WAN,
        _WAN_WEIGHTS,
        _WAN_PARTS,
    ),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": Published(
        "WanPipeline", d.WanTransformer3DModel, _WAN_14B, _WAN, _WAN_WEIGHTS, _WAN_PARTS
    ),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Published(
        "WanPipeline", d.WanTransformer3DModel, _WAN_5B, _WAN_2_2, 704_688_668, _WAN_PARTS
    ),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Published(
        "WanPipeline", d.WanTransformer3DModel, _WAN_14B, _WAN, _WAN_WEIGHTS, _WAN_PARTS, _EXPERTS
    ),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": Published(
        "WanImageToVideoPipeline",
        d.WanTransformer3DModel,
        {**_WAN_14B, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
        _WAN,
        _WAN_WEIGHTS,
        {**_WAN_PARTS, "image_encoder": _CLIP_H},
    ),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Published(
        "WanImageToVideoPipeline",
        d.WanTransformer3DModel,
        {**_WAN_14B, "in_channels": 36},
        _WAN,
        _WAN_WEIGHTS,
        _WAN_PARTS,
        _EXPERTS,
    ),
    "hunyuanvideo-community/HunyuanVideo": Published(
        "HunyuanVideoPipeline",
        d.HunyuanVideoTransformer3DModel,
        {},
        _HUNYUAN,
        246_478_803,
        {"text_encoder": _LLAMA_3, "text_encoder_2": _CLIP_L},
    ),
    "Lightricks/LTX-Video": Published(
        "LTXPipeline", d.LTXVideoTransformer3DModel, {}, _LTX, 419_193_649, {"text_encoder": _T5}
    ),
    "genmo/mochi-1-preview": Published(
        "MochiPipeline", d.MochiTransformer3DModel, {}, _MOCHI, 459_748_611, {"text_encoder": _T5}
    ),
}


@functools.cache
def _shapes(name: str) -> tuple[Shapes, Mapping[str, Any]]:
    model = PUBLISHED[name]
    with init_empty_weights():
        module = model.transformer(**model.settings)
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}, dict(module.config)


def files_of(config: Config) -> ModelFiles:
    """What `check` would read from the files of the model that a recipe names."""
    name = config.policy.model_name_or_path
    model = PUBLISHED[name]
    shapes, settings = _shapes(name)
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    parts = {**dict.fromkeys(model.experts, shapes), "vae": {"all": (model.vae_weights,)}}
    parts |= {part: encoder.shapes for part, encoder in model.encoders.items()}
    configs = {**dict.fromkeys(model.experts, plain), "vae": model.vae}
    pipeline = PipelineFiles(Path(name), model.pipeline, parts, configs)
    return ModelFiles(pipeline, select(config, pipeline))


def write_sparse(folder: Path, name: str) -> Path:
    """A pipeline folder with the shapes of a published model, and weight files that take no room on the disk."""
    model = PUBLISHED[name]
    shapes, settings = _shapes(name)
    parts: dict[str, tuple[Shapes, Mapping[str, Any]]] = dict.fromkeys(model.experts, (shapes, settings))
    parts |= {part: (encoder.shapes, {}) for part, encoder in model.encoders.items()}
    parts["vae"] = ({"all": (model.vae_weights,)}, model.vae)
    for part, (tensors, config) in parts.items():
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(dict(config), default=list))
        end, header = 0, {}
        for key, shape in tensors.items():
            begin, end = end, end + 2 * math.prod(shape)
            header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (folder / part / "diffusion_pytorch_model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    index = {"_class_name": model.pipeline, **{part: ["diffusers", "Any"] for part in parts}}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
