"""The one table of how the tokens of a denoiser are split over context-parallel ranks, by the class of the denoiser.

Data only, without torch, so that a launch can be refused before anything is loaded. ``context_parallel.py`` carries it
out. Streams are sequences of tokens that are split each for itself: ``image`` (of videos, and of all tokens where the
blocks know but one sequence) and ``text``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEY = "policy.parallelism.cp_size"


@dataclass(frozen=True)
class Cut:
    """A tensor of which each peer keeps its own part; a number is one of first tokens, and becomes that of own ones.

    Attributes:
        stream: whose tokens it has.
        dim: along which axis; one of length 1 stands for all tokens, and is kept.
        ndim: it has them only where it has so many axes; None: always.
    """

    stream: str
    dim: int = 1
    ndim: int | None = None


@dataclass(frozen=True)
class SelfAttention:
    """A module in which tokens see each other.

    Attributes:
        streams: in the order in which it puts them together.
        own_mask: it makes its mask of what it is given, so of its own tokens; else masks are of all tokens.
    """

    streams: tuple[str, ...] = ("image",)
    own_mask: bool = False


@dataclass(frozen=True)
class Plan:
    """Where a denoiser's tokens are split, where they meet, and where they are put together. Names have one ``*``.

    Attributes:
        inputs: module -> argument -> how it is cut; the module "" is the denoiser.
        outputs: module -> position among what it returns -> how that is cut.
        attention: modules in which tokens see each other.
        gathered: the module whose output ``[B, S, C]`` is put together again, of the stream ``image``.
        heads: key of the number of attention heads in the denoiser's configuration.
    """

    inputs: Mapping[str, Mapping[str, Cut]]
    attention: Mapping[str, SelfAttention]
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    gathered: str = "proj_out"
    heads: str = "num_attention_heads"


_IMAGE = Cut("image")
_TEXT = Cut("text")
_PER_TOKEN = Cut("image", ndim=3)
_BOTH = {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT}
_ROPE = {0: Cut("image", 0), 1: Cut("image", 0)}
_TEXT_FIRST = SelfAttention(("text", "image"))
_IMAGE_FIRST = SelfAttention(("image", "text"))

_FLUX = Plan(
    inputs={"": {**_BOTH, "img_ids": Cut("image", 0), "txt_ids": Cut("text", 0)}},
    attention={"transformer_blocks.*.attn": _TEXT_FIRST, "single_transformer_blocks.*.attn": _TEXT_FIRST},
)

PLANS: Mapping[str, Plan] = {
    "WanTransformer3DModel": Plan(
        inputs={
            "": {"timestep": Cut("image", ndim=2)},  # Wan 2.2 5B: a time per token
            "blocks.0": {"hidden_states": _IMAGE},
        },
        outputs={"rope": {0: _IMAGE, 1: _IMAGE}},
        attention={"blocks.*.attn1": SelfAttention()},
    ),
    "CosmosTransformer3DModel": Plan(
        inputs={
            "transformer_blocks.0": {"hidden_states": _IMAGE},
            # with a time per frame these are per token, in which Predict2.5 has 3 axes
            "transformer_blocks.*": {"embedded_timestep": _PER_TOKEN, "temb": _PER_TOKEN, "extra_pos_emb": _IMAGE},
            "norm_out": {"embedded_timestep": _PER_TOKEN, "temb": _PER_TOKEN},
        },
        outputs={"rope": _ROPE},
        attention={"transformer_blocks.*.attn1": SelfAttention()},
    ),
    "LTXVideoTransformer3DModel": Plan(
        inputs={"": {"hidden_states": _IMAGE, "timestep": Cut("image", ndim=2)}},  # from an image: a time per token
        outputs={"rope": {0: _IMAGE, 1: _IMAGE}},
        attention={"transformer_blocks.*.attn1": SelfAttention()},
    ),
    "HunyuanVideoTransformer3DModel": Plan(
        inputs={
            "transformer_blocks.0": _BOTH,
            "transformer_blocks.*": {"num_tokens": _IMAGE},  # from an image: those of its frame, the first ones
            "single_transformer_blocks.*": {"num_tokens": _IMAGE},
        },
        outputs={"rope": _ROPE},
        attention={"transformer_blocks.*.attn": _IMAGE_FIRST, "single_transformer_blocks.*.attn": _IMAGE_FIRST},
    ),
    "FluxTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": Plan(
        inputs={"": {**_BOTH, "img_ids": Cut("image", ndim=3), "txt_ids": Cut("text", ndim=3)}},
        attention={"transformer_blocks.*.attn": _TEXT_FIRST, "single_transformer_blocks.*.attn": _TEXT_FIRST},
    ),
    "QwenImageTransformer2DModel": Plan(
        inputs={
            "transformer_blocks.0": _BOTH,
            "transformer_blocks.*": {"modulate_index": _IMAGE, "encoder_hidden_states_mask": _TEXT},
        },
        outputs={"pos_embed": {0: Cut("image", 0), 1: Cut("text", 0)}},
        attention={"transformer_blocks.*.attn": SelfAttention(("text", "image"), own_mask=True)},
    ),
    "SD3Transformer2DModel": Plan(
        inputs={"transformer_blocks.0": _BOTH},
        # the second one is that of 3.5 medium, of the image alone
        attention={"transformer_blocks.*.attn": _IMAGE_FIRST, "transformer_blocks.*.attn2": SelfAttention()},
    ),
    "AuraFlowTransformer2DModel": Plan(
        inputs={"joint_transformer_blocks.0": _BOTH},
        attention={"joint_transformer_blocks.*.attn": _TEXT_FIRST, "single_transformer_blocks.*.attn": _TEXT_FIRST},
    ),
    "CogView4Transformer2DModel": Plan(
        inputs={"transformer_blocks.0": _BOTH},
        outputs={"rope": _ROPE},
        attention={"transformer_blocks.*.attn1": _TEXT_FIRST},
    ),
    # text and image are one sequence, each row with its text's own length; the refiners before it are not split
    "Lumina2Transformer2DModel": Plan(
        inputs={"layers.0": {"hidden_states": _IMAGE}, "layers.*": {"image_rotary_emb": _IMAGE}},
        attention={"layers.*.attn": SelfAttention()},
        gathered="norm_out",
    ),
    "ZImageTransformer2DModel": Plan(
        inputs={"layers.0": {"x": _IMAGE}, "layers.*": {"freqs_cis": _IMAGE, "noise_mask": _IMAGE}},
        attention={"layers.*.attention": SelfAttention()},
        gathered="all_final_layer.*",
        heads="n_heads",
    ),
}

_LINEAR = (
    "its attention is linear: keys and values of all tokens are added up instead of being compared, and a convolution "
    "mixes neighbouring tokens"
)
REASONS: Mapping[str, str] = {
    "SanaTransformer2DModel": _LINEAR,
    "SanaVideoTransformer3DModel": _LINEAR,
    "MochiTransformer3DModel": "it calls attention once for each row, with as many tokens as that row's prompt has",
}
"""Classes whose tokens cannot be split, and why."""


def find_problem(denoiser: str, config: Mapping[str, Any], size: int) -> str | None:
    """Why the tokens of a denoiser cannot be split over ``size`` ranks; None: they can.

    Args:
        denoiser: its class name, ``_class_name`` of its ``config.json``.
        config: its configuration; one that leaves out a default is asked for it again when the model is loaded.
        size: ``policy.parallelism.cp_size``.
    """
    if size == 1:
        return None
    plan = PLANS.get(denoiser)
    if plan is None:
        reason = REASONS.get(denoiser, f"there is no plan for it; there is one for {', '.join(sorted(PLANS))}")
        return f"{KEY} = {size}: the tokens of {denoiser} cannot be split over ranks: {reason}. Set it to 1"
    heads = config.get(plan.heads)
    if heads is not None and heads % size:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        return (
            f"{KEY} = {size}: each rank computes as many attention heads, but {denoiser} has {heads}, which is not a "
            f"multiple of {size}; set it to one of {', '.join(map(str, divisors))}"
        )
    return None
