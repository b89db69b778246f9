"""The names that a transformer's layers have in the file of its authors, which other tools read.

diffusers has the way from these files to its own names (`loaders/single_file_utils.py`); here is the way back, for a
whole transformer and for adapters. The tests go both ways by diffusers' own converter.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_rl.errors import UserError

Pair = tuple[Tensor, Tensor]
"""Down matrix ``[r, in]`` and up matrix ``[out, r]`` of an adapter, of convolutions with their kernel."""


@dataclass(frozen=True)
class Place:
    """Where a layer is in the original: a layer, and which of its equal parts along the outputs."""

    name: str
    part: int = 0
    parts: int = 1
    halves_swapped: bool = False
    """Scale and shift are in the other order."""


@dataclass(frozen=True)
class Names:
    """The original names of one class of transformers."""

    prefix: str
    """Of all names in a file."""
    rules: Sequence[tuple[str, str]]
    """Regular expression over diffusers' name -> the original one; all that match apply, in this order."""
    joined: Mapping[str, int]
    """Last name of a layer that is a part of a larger one -> which; its rule makes the name of the larger one."""
    swapped: str = r"(?!)"
    """Layers whose halves are in the other order, by diffusers' names; ``{last}`` is the last block's number."""

    def find(self, layer: str, last_block: int) -> Place:
        """Where a layer (or a tensor that belongs to none) is."""
        name = layer
        for pattern, original in self.rules:
            name = re.sub(pattern, original, name)
        part = self.joined.get(layer.rpartition(".")[2])
        swapped = re.fullmatch(self.swapped.replace("{last}", str(last_block)), layer) is not None
        if part is None:
            return Place(name, halves_swapped=swapped)
        return Place(name, part, 3)


_SD3 = Names(
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
    joined={"to_q": 0, "to_k": 1, "to_v": 2, "add_q_proj": 0, "add_k_proj": 1, "add_v_proj": 2},
    swapped=r"norm_out\.linear|transformer_blocks\.{last}\.norm1_context\.linear",
)
_LTX = Names(
    prefix="model.diffusion_model.",
    rules=(
        (r"^proj_in$", "patchify_proj"),
        (r"^time_embed\.", "adaln_single."),
        (r"\.norm_([qk])$", r".\1_norm"),
    ),
    joined={},
)
_WAN = Names(
    prefix="",
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
    joined={},
)
_NAMES = {
    "SD3Transformer2DModel": _SD3,
    "LTXVideoTransformer3DModel": _LTX,
    "WanTransformer3DModel": _WAN,
    "QwenImageTransformer2DModel": Names(prefix="", rules=(), joined={}),
}


def original_names(class_name: str) -> Names | None:
    """The original names of a class of transformers, where they are known."""
    return _NAMES.get(class_name)


def find_names(class_name: str, purpose: str, instead: str) -> Names:
    """The original names of a class of transformers.

    Args:
        purpose, instead: what they are for, and what works without them, for the message.

    Raises:
        UserError: they are not known here.
    """
    names = original_names(class_name)
    if names is None:
        raise UserError(
            f"{purpose}: the original names of a {class_name} are not known here, only those of {', '.join(_NAMES)}; "
            f"{instead}"
        )
    return names


def to_original(names: Names, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a transformer under their original names, prefix included."""
    parts: dict[str, dict[int, Tensor]] = {}
    last = last_block(state)
    for key, value in state.items():
        layer, leaf = _split(key)
        place = names.find(layer, last)
        if place.halves_swapped:
            value = _swap_halves(value)
        parts.setdefault(f"{names.prefix}{place.name}{leaf}", {})[place.part] = value
    return {
        key: torch.cat([found[part] for part in sorted(found)]) if len(found) > 1 else found[0]
        for key, found in parts.items()
    }


def adapters_to_original(names: Names, adapters: Mapping[str, Pair], last_block: int) -> dict[str, Pair]:
    """Adapters under the original names of their layers, without the prefix.

    Those of the parts of one layer become one of the sum of their ranks, whose up matrix has blocks: the same product.
    """
    members: dict[str, list[tuple[Place, Pair]]] = {}
    for layer, pair in adapters.items():
        place = names.find(layer, last_block)
        members.setdefault(place.name, []).append((place, pair))
    return {name: _join(found) for name, found in members.items()}


def adapters_from_original(
    names: Names, found: Mapping[str, Pair], layers: Sequence[str]
) -> tuple[dict[str, Pair], list[str]]:
    """Adapters by diffusers' names of their layers, and the names in ``found`` that belong to no layer.

    Args:
        names: of the transformer.
        found: by the original name without the prefix, with ``_`` in place of every dot, as adapters of kohya have it.
        layers: all layers of the transformer.
    """
    last, pairs, used = last_block(layers), dict[str, Pair](), set[str]()
    for layer in layers:
        place = names.find(layer, last)
        key = place.name.replace(".", "_")
        if key in found:
            down, up = found[key]
            used.add(key)
            pairs[layer] = (down, _swap_halves(up) if place.halves_swapped else up.chunk(place.parts)[place.part])
    return pairs, sorted(set(found) - used)


def _join(found: Sequence[tuple[Place, Pair]]) -> Pair:
    place, (down, up) = found[0]
    if place.parts == 1:
        return down, _swap_halves(up) if place.halves_swapped else up
    width = up.shape[0]
    joined = up.new_zeros(place.parts * width, sum(pair[1].shape[1] for _, pair in found))
    column = 0
    for member, (_, part) in found:
        rank = part.shape[1]
        joined[member.part * width : (member.part + 1) * width, column : column + rank] = part
        column += rank
    return torch.cat([pair[0] for _, pair in found]), joined


def _swap_halves(value: Tensor) -> Tensor:
    first, second = value.chunk(2, dim=0)
    return torch.cat([second, first])


def _split(key: str) -> tuple[str, str]:
    """A tensor's layer and ``.weight`` or ``.bias``; a tensor of another name is its own layer."""
    for leaf in (".weight", ".bias"):
        if key.endswith(leaf):
            return key.removesuffix(leaf), leaf
    return key, ""


def last_block(names: Sequence[str] | Mapping[str, Tensor]) -> int:
    """The largest number of a block in names of layers or tensors; -1: none has one."""
    return max(_block_numbers(names), default=-1)


def _block_numbers(names: Sequence[str] | Mapping[str, Tensor]) -> Iterator[int]:
    for name in names:
        match = re.match(r"transformer_blocks\.(\d+)\.", name)
        if match:
            yield int(match[1])
