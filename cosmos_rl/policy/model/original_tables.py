"""Rows of data: what each class of transformers is called in the files of its authors.

diffusers has the way from these files to its own names (`loaders/single_file_utils.py`); a row is the way back. The
tests go both ways by diffusers' own converters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Names:
    """The original names of one class of transformers."""

    rules: Sequence[tuple[str, str]] = ()
    """Regular expression over diffusers' name of a layer -> the original one; all that match apply, in this order.
    Those that end in ``$`` say how the original name ends, the others only how it begins."""
    same: str = r"(?!)"
    """Layers, by diffusers' names, whose original names end in the same way. What neither this nor a rule that ends in
    ``$`` knows is refused."""
    prefix: str = ""
    """Of all names in a file."""
    swapped: str = r"(?!)"
    """Layers whose halves are in the other order, by diffusers' names; ``{last}`` is the last block's number."""
    scales: str = r"(?!)"
    """Layers whose weight is called ``scale``, by the ends of their original names."""
    unused: str = r"(?!)"
    """Tensors of an original file that diffusers' transformer does without."""
    lacking: str = ""
    """Tensors that readers of an original file need and diffusers' transformer has not; such a file is not written."""
    architecture: str = ""
    """What kohya's tools call it in a file's header; empty: they do not train it, or have a name for each size."""
    adapters: Literal["kohya", "PEFT", ""] = "kohya"
    """Names of an adapter for ComfyUI: of the forms that it reads one that diffusers reads too, where it reads any.
    Empty: ComfyUI has no such model."""


_SD3 = Names(
    same=r"context_embedder",
    architecture="stable-diffusion-3",
    prefix="model.diffusion_model.",
    rules=(
        (r"^pos_embed\.pos_embed$", "pos_embed"),
        (r"^pos_embed\.proj$", "x_embedder.proj"),
        (r"^time_text_embed\.timestep_embedder\.linear_1$", "t_embedder.mlp.0"),
        (r"^time_text_embed\.timestep_embedder\.linear_2$", "t_embedder.mlp.2"),
        (r"^time_text_embed\.text_embedder\.linear_1$", "y_embedder.mlp.0"),
        (r"^time_text_embed\.text_embedder\.linear_2$", "y_embedder.mlp.2"),
        (r"^norm_out\.linear$", "final_layer.adaLN_modulation.1"),
        (r"^proj_out$", "final_layer.linear"),
        (r"^transformer_blocks\.(\d+)\.", r"joint_blocks.\1."),
        (r"\.attn(2?)\.to_[qkv]$", r".x_block.attn\1.qkv"),
        (r"\.attn\.add_[qkv]_proj$", ".context_block.attn.qkv"),
        (r"\.attn(2?)\.norm_([qk])$", r".x_block.attn\1.ln_\2"),
        (r"\.attn\.norm_added_([qk])$", r".context_block.attn.ln_\1"),
        (r"\.attn(2?)\.to_out\.0$", r".x_block.attn\1.proj"),
        (r"\.attn\.to_add_out$", ".context_block.attn.proj"),
        (r"\.norm1\.linear$", ".x_block.adaLN_modulation.1"),
        (r"\.norm1_context\.linear$", ".context_block.adaLN_modulation.1"),
        (r"\.ff\.net\.0\.proj$", ".x_block.mlp.fc1"),
        (r"\.ff\.net\.2$", ".x_block.mlp.fc2"),
        (r"\.ff_context\.net\.0\.proj$", ".context_block.mlp.fc1"),
        (r"\.ff_context\.net\.2$", ".context_block.mlp.fc2"),
    ),
    swapped=r"norm_out\.linear|transformer_blocks\.{last}\.norm1_context\.linear",
)
_LTX = Names(
    same=(
        r"(transformer_blocks\.\d+\.)?scale_shift_table|time_embed\.(emb\.timestep_embedder\.linear_[12]|linear)|proj_out|"
        r"caption_projection\.linear_[12]|transformer_blocks\.\d+\.(attn[12]\.to_([qkv]|out\.0)|ff\.net\.(0\.proj|2))"
    ),
    prefix="model.diffusion_model.",
    rules=(
        (r"^proj_in$", "patchify_proj"),
        (r"^time_embed\.", "adaln_single."),
        (r"\.norm_([qk])$", r".\1_norm"),
    ),
    adapters="PEFT",
)
_WAN = Names(
    same=r"patch_embedding|blocks\.\d+\.attn[12]\.norm_[qk]",
    architecture="wan2.1",
    rules=(
        (r"^condition_embedder\.time_embedder\.linear_1$", "time_embedding.0"),
        (r"^condition_embedder\.time_embedder\.linear_2$", "time_embedding.2"),
        (r"^condition_embedder\.text_embedder\.linear_1$", "text_embedding.0"),
        (r"^condition_embedder\.text_embedder\.linear_2$", "text_embedding.2"),
        (r"^condition_embedder\.time_proj$", "time_projection.1"),
        (r"^condition_embedder\.image_embedder\.norm1$", "img_emb.proj.0"),
        (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj$", "img_emb.proj.1"),
        (r"^condition_embedder\.image_embedder\.ff\.net\.2$", "img_emb.proj.3"),
        (r"^condition_embedder\.image_embedder\.norm2$", "img_emb.proj.4"),
        (r"^condition_embedder\.image_embedder\.pos_embed$", "img_emb.emb_pos"),
        (r"^scale_shift_table$", "head.modulation"),
        (r"^proj_out$", "head.head"),
        (r"\.scale_shift_table$", ".modulation"),
        (r"\.attn1\.", ".self_attn."),
        (r"\.attn2\.", ".cross_attn."),
        (r"\.to_([qkv])$", r".\1"),
        (r"\.to_out\.0$", ".o"),
        (r"\.add_([kv])_proj$", r".\1_img"),
        (r"\.norm_added_k$", ".norm_k_img"),
        (r"\.ffn\.net\.0\.proj$", ".ffn.0"),
        (r"\.ffn\.net\.2$", ".ffn.2"),
        (r"^(blocks\.\d+)\.norm2$", r"\1.norm3"),
    ),
)
_FLUX_ATTENTION = (
    (r"^x_embedder$", "img_in"),
    (r"^context_embedder$", "txt_in"),
    (r"^norm_out\.linear$", "final_layer.adaLN_modulation.1"),
    (r"^proj_out$", "final_layer.linear"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_[qkv]$", r"double_blocks.\1.img_attn.qkv"),
    (r"\.attn\.add_[qkv]_proj$", ".txt_attn.qkv"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_out\.0$", r"double_blocks.\1.img_attn.proj"),
    (r"\.attn\.to_add_out$", ".txt_attn.proj"),
    (r"^transformer_blocks\.(\d+)\.attn\.norm_q$", r"double_blocks.\1.img_attn.norm.query_norm"),
    (r"^transformer_blocks\.(\d+)\.attn\.norm_k$", r"double_blocks.\1.img_attn.norm.key_norm"),
    (r"\.attn\.norm_added_q$", ".txt_attn.norm.query_norm"),
    (r"\.attn\.norm_added_k$", ".txt_attn.norm.key_norm"),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^single_transformer_blocks\.", "single_blocks."),
    (r"^(single_blocks\.\d+)\.attn\.norm_q$", r"\1.norm.query_norm"),
    (r"^(single_blocks\.\d+)\.attn\.norm_k$", r"\1.norm.key_norm"),
)
"""What all models of Black Forest Labs, and Chroma, have in common."""
_FLUX = Names(
    architecture="flux-1",
    rules=(
        *_FLUX_ATTENTION,
        (r"^time_text_embed\.timestep_embedder\.", "time_in."),
        (r"^time_text_embed\.guidance_embedder\.", "guidance_in."),
        (r"^time_text_embed\.text_embedder\.", "vector_in."),
        (r"\.linear_1$", ".in_layer"),
        (r"\.linear_2$", ".out_layer"),
        (r"\.norm1\.linear$", ".img_mod.lin"),
        (r"\.norm1_context\.linear$", ".txt_mod.lin"),
        (r"\.ff\.net\.0\.proj$", ".img_mlp.0"),
        (r"\.ff\.net\.2$", ".img_mlp.2"),
        (r"\.ff_context\.net\.0\.proj$", ".txt_mlp.0"),
        (r"\.ff_context\.net\.2$", ".txt_mlp.2"),
        (r"^(single_blocks\.\d+)\.norm\.linear$", r"\1.modulation.lin"),
        (r"^(single_blocks\.\d+)\.(attn\.to_[qkv]|proj_mlp)$", r"\1.linear1"),
        (r"^(single_blocks\.\d+)\.proj_out$", r"\1.linear2"),
    ),
    swapped=r"norm_out\.linear",
    scales=r"(query_norm|key_norm|distilled_guidance_layer\.norms\.\d+)",
)
_FLUX2 = Names(
    rules=(
        *_FLUX_ATTENTION,
        (r"^time_guidance_embed\.timestep_embedder\.", "time_in."),
        (r"^time_guidance_embed\.guidance_embedder\.", "guidance_in."),
        (r"\.linear_1$", ".in_layer"),
        (r"\.linear_2$", ".out_layer"),
        (r"(_stream_modulation\w*)\.linear$", r"\1.lin"),
        (r"\.ff\.linear_in$", ".img_mlp.0"),
        (r"\.ff\.linear_out$", ".img_mlp.2"),
        (r"\.ff_context\.linear_in$", ".txt_mlp.0"),
        (r"\.ff_context\.linear_out$", ".txt_mlp.2"),
        (r"\.attn\.to_qkv_mlp_proj$", ".linear1"),
        (r"\.attn\.to_out$", ".linear2"),
    ),
    swapped=r"norm_out\.linear",
    scales=r"(query_norm|key_norm)",
)
_HUNYUAN_VIDEO = Names(
    same=(
        r"x_embedder\.proj|context_embedder\.time_text_embed\.text_embedder\.linear_[12]|"
        r"context_embedder\.token_refiner\.refiner_blocks\.\d+\.norm[12]"
    ),
    architecture="hunyuan-video",
    rules=(
        (r"^x_embedder\.", "img_in."),
        (r"^context_embedder\.", "txt_in."),
        (r"^(txt_in)\.time_text_embed\.timestep_embedder\.linear_1$", r"\1.t_embedder.mlp.0"),
        (r"^(txt_in)\.time_text_embed\.timestep_embedder\.linear_2$", r"\1.t_embedder.mlp.2"),
        (r"^(txt_in)\.time_text_embed\.text_embedder\.", r"\1.c_embedder."),
        (r"^(txt_in)\.proj_in$", r"\1.input_embedder"),
        (r"^(txt_in)\.token_refiner\.refiner_blocks\.", r"\1.individual_token_refiner.blocks."),
        (r"^(txt_in\..*)\.attn\.to_[qkv]$", r"\1.self_attn_qkv"),
        (r"^(txt_in\..*)\.attn\.to_out\.0$", r"\1.self_attn_proj"),
        (r"^(txt_in\..*)\.ff\.net\.0\.proj$", r"\1.mlp.fc1"),
        (r"^(txt_in\..*)\.ff\.net\.2$", r"\1.mlp.fc2"),
        (r"^(txt_in\..*)\.norm_out\.linear$", r"\1.adaLN_modulation.1"),
        (r"^time_text_embed\.timestep_embedder\.linear_1$", "time_in.mlp.0"),
        (r"^time_text_embed\.timestep_embedder\.linear_2$", "time_in.mlp.2"),
        (r"^time_text_embed\.guidance_embedder\.linear_1$", "guidance_in.mlp.0"),
        (r"^time_text_embed\.guidance_embedder\.linear_2$", "guidance_in.mlp.2"),
        (r"^time_text_embed\.text_embedder\.linear_1$", "vector_in.in_layer"),
        (r"^time_text_embed\.text_embedder\.linear_2$", "vector_in.out_layer"),
        (r"^norm_out\.linear$", "final_layer.adaLN_modulation.1"),
        (r"^proj_out$", "final_layer.linear"),
        (r"^transformer_blocks\.(\d+)\.attn\.to_[qkv]$", r"double_blocks.\1.img_attn_qkv"),
        (r"\.attn\.add_[qkv]_proj$", ".txt_attn_qkv"),
        (r"^transformer_blocks\.(\d+)\.attn\.norm_([qk])$", r"double_blocks.\1.img_attn_\2_norm"),
        (r"\.attn\.norm_added_([qk])$", r".txt_attn_\1_norm"),
        (r"^transformer_blocks\.(\d+)\.attn\.to_out\.0$", r"double_blocks.\1.img_attn_proj"),
        (r"\.attn\.to_add_out$", ".txt_attn_proj"),
        (r"\.norm1\.linear$", ".img_mod.linear"),
        (r"\.norm1_context\.linear$", ".txt_mod.linear"),
        (r"\.ff\.net\.0\.proj$", ".img_mlp.fc1"),
        (r"\.ff\.net\.2$", ".img_mlp.fc2"),
        (r"\.ff_context\.net\.0\.proj$", ".txt_mlp.fc1"),
        (r"\.ff_context\.net\.2$", ".txt_mlp.fc2"),
        (r"^transformer_blocks\.", "double_blocks."),
        (r"^single_transformer_blocks\.", "single_blocks."),
        (r"^(single_blocks\.\d+)\.(attn\.to_[qkv]|proj_mlp)$", r"\1.linear1"),
        (r"^(single_blocks\.\d+)\.proj_out$", r"\1.linear2"),
        (r"^(single_blocks\.\d+)\.norm\.linear$", r"\1.modulation.linear"),
        (r"^(single_blocks\.\d+)\.attn\.norm_([qk])$", r"\1.\2_norm"),
    ),
    swapped=r"norm_out\.linear",
    adapters="PEFT",
)
_SANA = Names(
    same=r"transformer_blocks\.\d+\.scale_shift_table",
    rules=(
        (r"^patch_embed\.proj$", "x_embedder.proj"),
        (r"^time_embed\.emb\.timestep_embedder\.linear_1$", "t_embedder.mlp.0"),
        (r"^time_embed\.emb\.timestep_embedder\.linear_2$", "t_embedder.mlp.2"),
        (r"^time_embed\.linear$", "t_block.1"),
        (r"^caption_projection\.linear_([12])$", r"y_embedder.y_proj.fc\1"),
        (r"^caption_norm$", "attention_y_norm"),
        (r"^scale_shift_table$", "final_layer.scale_shift_table"),
        (r"^proj_out$", "final_layer.linear"),
        (r"^transformer_blocks\.", "blocks."),
        (r"\.attn1\.to_[qkv]$", ".attn.qkv"),
        (r"\.attn1\.to_out\.0$", ".attn.proj"),
        (r"\.attn1\.norm_([qk])$", r".attn.\1_norm"),
        (r"\.attn2\.norm_([qk])$", r".cross_attn.\1_norm"),
        (r"\.attn2\.to_q$", ".cross_attn.q_linear"),
        (r"\.attn2\.to_[kv]$", ".cross_attn.kv_linear"),
        (r"\.attn2\.to_out\.0$", ".cross_attn.proj"),
        (r"\.ff\.conv_(inverted|depth|point)$", r".mlp.\1_conv.conv"),
    ),
    unused=r"pos_embed|y_embedder\.y_embedding",
    lacking="pos_embed, y_embedder.y_embedding",
    adapters="",
)
_LUMINA2 = Names(
    same=(
        r"x_embedder|time_caption_embed\.caption_embedder\.[01]|(layers|noise_refiner|context_refiner)\.\d+\.ffn_norm[12]"
    ),
    architecture="lumina-2",
    rules=(
        (r"^time_caption_embed\.caption_embedder\.", "cap_embedder."),
        (r"^time_caption_embed\.timestep_embedder\.linear_1$", "t_embedder.mlp.0"),
        (r"^time_caption_embed\.timestep_embedder\.linear_2$", "t_embedder.mlp.2"),
        (r"^norm_out\.linear_1$", "final_layer.adaLN_modulation.1"),
        (r"^norm_out\.linear_2$", "final_layer.linear"),
        (r"\.attn\.to_[qkv]$", ".attention.qkv"),
        (r"\.attn\.to_out\.0$", ".attention.out"),
        (r"\.attn\.norm_([qk])$", r".attention.\1_norm"),
        (r"\.feed_forward\.linear_([123])$", r".feed_forward.w\1"),
        (r"\.norm1\.linear$", ".adaLN_modulation.1"),
        (r"\.norm1(\.norm)?$", ".attention_norm1"),
        (r"\.norm2$", ".attention_norm2"),
    ),
    unused=r"norm_final\.weight",
    adapters="PEFT",
)
_Z_IMAGE = Names(
    same=(
        r"(x|cap)_pad_token|all_final_layer\.2-1\.(linear|adaLN_modulation\.1)|t_embedder\.mlp\.[02]|cap_embedder\.[01]|"
        r"(layers|noise_refiner|context_refiner)\.\d+\.(feed_forward\.w[123]|(attention|ffn)_norm[12]|adaLN_modulation\.0)"
    ),
    architecture="Z-Image",
    rules=(
        (r"^all_final_layer\.2-1\.", "final_layer."),
        (r"^all_x_embedder\.2-1$", "x_embedder"),
        (r"\.attention\.to_[qkv]$", ".attention.qkv"),
        (r"\.attention\.to_out\.0$", ".attention.out"),
        (r"\.attention\.norm_([qk])$", r".attention.\1_norm"),
    ),
    unused=r"norm_final\.weight",
)
_AURA_FLOW = Names(
    same=r"register_tokens",
    rules=(
        (r"^pos_embed\.pos_embed$", "positional_encoding"),
        (r"^pos_embed\.proj$", "init_x_linear"),
        (r"^context_embedder$", "cond_seq_linear"),
        (r"^time_step_proj\.linear_1$", "t_embedder.mlp.0"),
        (r"^time_step_proj\.linear_2$", "t_embedder.mlp.2"),
        (r"^norm_out\.linear$", "modF.1"),
        (r"^proj_out$", "final_linear"),
        (r"^joint_transformer_blocks\.", "double_layers."),
        (r"^(double_layers\.\d+)\.norm1\.linear$", r"\1.modX.1"),
        (r"\.norm1_context\.linear$", ".modC.1"),
        (r"^(double_layers\.\d+)\.attn\.to_([qkv])$", r"\1.attn.w2\2"),
        (r"^(double_layers\.\d+)\.attn\.to_out\.0$", r"\1.attn.w2o"),
        (r"\.attn\.add_([qkv])_proj$", r".attn.w1\1"),
        (r"\.attn\.to_add_out$", ".attn.w1o"),
        (r"^(double_layers\.\d+)\.ff\.", r"\1.mlpX."),
        (r"\.ff_context\.", ".mlpC."),
        (r"^single_transformer_blocks\.", "single_layers."),
        (r"^(single_layers\.\d+)\.norm1\.linear$", r"\1.modCX.1"),
        (r"^(single_layers\.\d+)\.attn\.to_([qkv])$", r"\1.attn.w1\2"),
        (r"^(single_layers\.\d+)\.attn\.to_out\.0$", r"\1.attn.w1o"),
        (r"^(single_layers\.\d+)\.ff\.", r"\1.mlp."),
        (r"(\.mlp[XC]?)\.linear_([12])$", r"\1.c_fc\2"),
        (r"(\.mlp[XC]?)\.out_projection$", r"\1.c_proj"),
    ),
    swapped=r"norm_out\.linear",
)
_MOCHI = Names(
    same=r"pos_frequencies|time_embed\.pooler\.to_(kv|q|out)",
    rules=(
        (r"^patch_embed\.proj$", "x_embedder.proj"),
        (r"^time_embed\.timestep_embedder\.linear_1$", "t_embedder.mlp.0"),
        (r"^time_embed\.timestep_embedder\.linear_2$", "t_embedder.mlp.2"),
        (r"^time_embed\.pooler\.", "t5_y_embedder."),
        (r"^time_embed\.caption_proj$", "t5_yproj"),
        (r"^norm_out\.linear$", "final_layer.mod"),
        (r"^proj_out$", "final_layer.linear"),
        (r"^transformer_blocks\.", "blocks."),
        (r"\.norm1\.linear$", ".mod_x"),
        (r"\.norm1_context\.linear(_1)?$", ".mod_y"),
        (r"\.attn1\.to_[qkv]$", ".attn.qkv_x"),
        (r"\.attn1\.add_[qkv]_proj$", ".attn.qkv_y"),
        (r"\.attn1\.norm_([qk])$", r".attn.\1_norm_x"),
        (r"\.attn1\.norm_added_([qk])$", r".attn.\1_norm_y"),
        (r"\.attn1\.to_out\.0$", ".attn.proj_x"),
        (r"\.attn1\.to_add_out$", ".attn.proj_y"),
        (r"\.ff\.net\.0\.proj$", ".mlp_x.w1"),
        (r"\.ff\.net\.2$", ".mlp_x.w2"),
        (r"\.ff_context\.net\.0\.proj$", ".mlp_y.w1"),
        (r"\.ff_context\.net\.2$", ".mlp_y.w2"),
    ),
    swapped=r"norm_out\.linear|.*\.ff(_context)?\.net\.0\.proj",
)
_COSMOS = Names(
    same=r"time_embed\.t_embedder\.linear_[12]|crossattn_proj\.0",
    prefix="net.",
    rules=(
        (r"^patch_embed\.proj$", "x_embedder.proj.1"),
        (r"^time_embed\.t_embedder\.", "t_embedder.1."),
        (r"^time_embed\.norm$", "t_embedding_norm"),
        (r"^norm_out\.linear_([12])$", r"final_layer.adaln_modulation.\1"),
        (r"^proj_out$", "final_layer.linear"),
        (r"^transformer_blocks\.", "blocks."),
        (r"\.norm1\.linear_([12])$", r".adaln_modulation_self_attn.\1"),
        (r"\.norm2\.linear_([12])$", r".adaln_modulation_cross_attn.\1"),
        (r"\.norm3\.linear_([12])$", r".adaln_modulation_mlp.\1"),
        (r"\.attn1\.", ".self_attn."),
        (r"\.attn2\.", ".cross_attn."),
        (r"\.to_([qkv])$", r".\1_proj"),
        (r"\.norm_([qk])$", r".\1_norm"),
        (r"\.to_out\.0$", ".output_proj"),
        (r"\.ff\.net\.0\.proj$", ".mlp.layer1"),
        (r"\.ff\.net\.2$", ".mlp.layer2"),
    ),
    unused=r"accum_.*|pos_embedder\.(seq|dim_spatial_range|dim_temporal_range)|(.*\.)?_extra_state",
)
"""Of Cosmos-Predict2 and 2.5; diffusers' class serves Cosmos 1, of other names, too."""

NAMES = {
    "SD3Transformer2DModel": _SD3,
    "FluxTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX2,
    "ChromaTransformer2DModel": replace(
        _FLUX, architecture="chroma", same=r"distilled_guidance_layer\.(in_proj|norms\.\d+|out_proj)"
    ),
    "QwenImageTransformer2DModel": Names(architecture="Qwen-Image", same=r".*"),
    "ZImageTransformer2DModel": _Z_IMAGE,
    "Lumina2Transformer2DModel": _LUMINA2,
    "AuraFlowTransformer2DModel": _AURA_FLOW,
    "SanaTransformer2DModel": _SANA,
    "HiDreamImageTransformer2DModel": Names(adapters="PEFT", same=r".*"),
    "CosmosTransformer3DModel": _COSMOS,
    "WanTransformer3DModel": _WAN,
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "LTXVideoTransformer3DModel": _LTX,
    "MochiTransformer3DModel": _MOCHI,
}
