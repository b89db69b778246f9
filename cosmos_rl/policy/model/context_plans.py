"""The one table of how the tokens of a denoiser are split over context-parallel ranks, by the class of the denoiser.

Data only, without torch, so that a launch can be refused before anything is loaded. ``context_parallel.py`` carries it
out. Streams are sequences of tokens that are split each for itself: ``image`` (of videos too) and ``text``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEY = "policy.parallelism.cp_size"


@dataclass(frozen=True)
class Cut:
    """A tensor of which each peer keeps its own part.

    Attributes:
        stream: whose tokens it has.
        dim: along which axis.
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
        kv_heads: that of keys and values, where it is another one.
    """

    inputs: Mapping[str, Mapping[str, Cut]]
    attention: Mapping[str, SelfAttention]
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    gathered: str = "proj_out"
    heads: str = "num_attention_heads"
    kv_heads: str | None = None


_TOKENS = Cut("image")

PLANS: Mapping[str, Plan] = {
    "WanTransformer3DModel": Plan(
        inputs={
            "": {"timestep": Cut("image", ndim=2)},  # Wan 2.2 5B: a time per token
            "blocks.0": {"hidden_states": _TOKENS},
        },
        outputs={"rope": {0: _TOKENS, 1: _TOKENS}},
        attention={"blocks.*.attn1": SelfAttention()},
    ),
}

_LINEAR = (
    "its attention is linear: keys and values of all tokens are added up instead of being compared, and a convolution "
    "mixes neighbouring tokens"
)
REASONS: Mapping[str, str] = {
    "SanaTransformer2DModel": _LINEAR,
    "SanaVideoTransformer3DModel": _LINEAR,
}
"""Classes whose tokens cannot be split, and why."""


def find_problem(denoiser: str, config: Mapping[str, Any], size: int) -> str | None:
    """Why the tokens of a denoiser cannot be split over ``size`` ranks; None: they can.

    Args:
        denoiser: its class name, ``_class_name`` of its ``config.json``.
        config: its configuration.
        size: ``policy.parallelism.cp_size``.
    """
    if size == 1:
        return None
    plan = PLANS.get(denoiser)
    if plan is None:
        reason = REASONS.get(denoiser, f"there is no plan for it; there is one for {', '.join(sorted(PLANS))}")
        return f"{KEY} = {size}: the tokens of {denoiser} cannot be split over ranks: {reason}. Set it to 1"
    counts = [(name, config[name]) for name in (plan.heads, plan.kv_heads) if name is not None]
    bad = [f"{count} ({name})" for name, count in counts if count % size]
    if bad:
        common = [n for n in range(1, counts[0][1] + 1) if all(count % n == 0 for _, count in counts)]
        return (
            f"{KEY} = {size}: each rank computes as many attention heads, but those of {denoiser}, "
            f"{' and '.join(bad)}, are not a multiple of {size}; set it to one of {', '.join(map(str, common))}"
        )
    return None
