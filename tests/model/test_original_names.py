"""Every family's names go to those of its authors and back, by diffusers' own converters, at its default widths."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import pytest
import torch
from accelerate import init_empty_weights
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model import lora
from cosmos_rl.policy.model.adapter_files import read_tensors
from cosmos_rl.policy.model.exports import name_tensors
from cosmos_rl.policy.model.original_names import (
    Pair,
    adapters_to_original,
    find_names,
    find_unknown,
    from_original,
    to_original,
)
from cosmos_rl.policy.model.original_tables import NAMES
from tests.support.paths import ROOT

RANK = 2


@dataclass(frozen=True)
class Family:
    """A class of transformers at the widths of its defaults, with few blocks."""

    kind: str
    blocks: Mapping[str, int]
    pipeline: str = ""
    """Whose loader of adapters reads what is written for ComfyUI; empty: diffusers has none for original names."""
    extra: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tensors of original files that are not used."""
    partial: bool = True
    """Whether that loader takes adapters for some of the layers."""
    layers: str = r".*blocks\.\d+\..*"
    """Those that it takes."""


_LAYERS = r"(layers|noise_refiner|context_refiner)\.\d+\..*"
_MAIN = r"(single_)?transformer_blocks\.\d+\..*"
"""diffusers' converter for HunyuanVideo cuts the down matrices of the joined layers of the token refiner, a mistake."""
_TWO = {"num_layers": 2, "num_single_layers": 2}
_FINAL = {"norm_final.weight": 1}
FAMILIES = [
    Family("SD3Transformer2DModel", {"num_layers": 2}),
    Family("FluxTransformer2DModel", _TWO, "FluxPipeline", layers=r".*"),
    Family("Flux2Transformer2DModel", _TWO, "Flux2Pipeline"),
    Family("ChromaTransformer2DModel", _TWO, "ChromaPipeline"),
    Family("QwenImageTransformer2DModel", {"num_layers": 1}, "QwenImagePipeline"),
    Family("ZImageTransformer2DModel", {"n_layers": 2}, "ZImagePipeline", _FINAL, layers=_LAYERS),
    Family("Lumina2Transformer2DModel", {"num_layers": 2}, "Lumina2Pipeline", _FINAL, False, _LAYERS),
    Family("AuraFlowTransformer2DModel", {"num_mmdit_layers": 2, "num_single_dit_layers": 2}),
    Family("SanaTransformer2DModel", {"num_layers": 2}, "", {"pos_embed": 1, "y_embedder.y_embedding": 1}),
    Family("HiDreamImageTransformer2DModel", {"num_layers": 1, "num_single_layers": 1}, "HiDreamImagePipeline"),
    Family("CosmosTransformer3DModel", {"num_layers": 2}, "", {"pos_embedder.seq": 1, "accum_iteration": 1}),
    Family("WanTransformer3DModel", {"num_layers": 2}, "WanPipeline", partial=False),
    Family(
        "HunyuanVideoTransformer3DModel",
        _TWO,
        "HunyuanVideoPipeline",
        layers=_MAIN,
    ),
    Family("LTXVideoTransformer3DModel", {"num_layers": 2}, "LTXPipeline"),
    Family("MochiTransformer3DModel", {"num_layers": 48}),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "SD3Transformer2DModel": {"dual_attention_layers": (0,), "qk_norm": "rms_norm"},
    "FluxTransformer2DModel": {"guidance_embeds": True},
    "WanTransformer3DModel": {"image_dim": 1280, "added_kv_proj_dim": 5120},
    "CosmosTransformer3DModel": {"extra_pos_embed_type": None, "use_crossattn_projection": True},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 16,
        "text_emb_dim": 2048,
        "caption_channels": (4096, 4096),
        "llama_layers": (0, 1),
        "num_routed_experts": 2,
        "num_activated_experts": 1,
    },
}


def build(family: Family) -> Any:
    """The transformer without memory."""
    with init_empty_weights(include_buffers=True):
        return getattr(diffusers, family.kind)(**family.blocks, **OPTIONS.get(family.kind, {}))


def narrow_state(model: Any) -> dict[str, Tensor]:
    """All its tensors with their true rows, which conversions cut and join, and few columns: different values."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(value.shape[0], *(min(size, 2) for size in value.shape[1:]), generator=generator)
        for name, value in model.state_dict().items()
    }


def kind_of(family: Family) -> str:
    return family.kind


def test_every_family_is_tested_and_documented() -> None:
    assert {family.kind for family in FAMILIES} == NAMES.keys()
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+Transformer\w+)` \| .* \| in(, out)? \| (kohya|PEFT|—) \| (?:`(\w+)`)?", page, re.MULTILINE
    )
    assert {kind: (bool(out), form) for kind, out, form, _ in rows} == {
        kind: (not names.lacking, names.adapters or "—") for kind, names in NAMES.items()
    }
    assert {kind: pipeline for kind, _, _, pipeline in rows} == {family.kind: family.pipeline for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=kind_of)
def test_a_transformer_goes_to_its_original_names_and_back_by_diffusers(family: Family) -> None:
    names, state = find_names(family.kind, "", ""), narrow_state(build(family))
    original = to_original(names, state)
    plain = {name.removeprefix(names.prefix): value for name, value in original.items()}
    ours = from_original(names, plain, state)
    extra = {name: torch.zeros(size) for name, size in family.extra.items()}
    theirs = SINGLE_FILE_LOADABLE_CLASSES[family.kind]["checkpoint_mapping_fn"]({**original, **extra}, config={})
    for back in (ours, theirs):
        assert back.keys() == state.keys()
        assert all(torch.equal(back[name], value) for name, value in state.items())


@pytest.mark.parametrize("key", ["new.weight", "transformer_blocks.0.new.weight", "blocks.0.attn1.new.weight", "new"])
@pytest.mark.parametrize("kind", [kind for kind, names in NAMES.items() if names.same != ".*"])
def test_a_tensor_that_no_row_knows_is_refused(kind: str, key: str) -> None:
    message = r"^x: the original name of {} is not known here; keep the names of diffusers: a pipeline folder"
    with pytest.raises(UserError, match=message.format(re.escape(key))):
        to_original(NAMES[kind], {key: torch.zeros(1)}, "x")
    layer = key.removesuffix(".weight")
    with pytest.raises(UserError, match=message.format(re.escape(layer))):
        adapters_to_original(NAMES[kind], {layer: (torch.zeros(1, 2), torch.zeros(3, 1))}, {layer: 3}, "x")


@pytest.mark.parametrize(
    ("kind", "options", "unknown"),
    [
        ("SanaTransformer2DModel", {"num_layers": 1, "guidance_embeds": True}, {"time_embed"}),
        ("CosmosTransformer3DModel", {"num_layers": 1}, {"learnable_pos_embed"}),  # Cosmos 1
        ("WanTransformer3DModel", {"num_layers": 1, "image_dim": 8, "pos_embed_seq_len": 3}, set[str]()),
    ],
)
def test_the_variants_of_a_class_are_known_or_refused(kind: str, options: dict[str, Any], unknown: set[str]) -> None:
    with init_empty_weights():
        state = getattr(diffusers, kind)(**options).state_dict()
    assert {name.partition(".")[0] for name in find_unknown(NAMES[kind], state)} == unknown


def test_the_positions_of_first_and_last_frame_have_their_name_in_wan() -> None:
    with init_empty_weights():
        state = diffusers.WanTransformer3DModel(num_layers=1, image_dim=8, pos_embed_seq_len=3).state_dict()
    original = to_original(NAMES["WanTransformer3DModel"], state)
    assert original["img_emb.emb_pos"].shape == (1, 3, 8)
    assert from_original(NAMES["WanTransformer3DModel"], original, state).keys() == state.keys()


def adapters_of(model: Any, layers: str) -> dict[str, Pair]:
    """Of linear layers, with few inputs, as `narrow_state` has them."""
    generator = torch.Generator().manual_seed(1)
    found = [name for name in lora.list_linear_names(model) if re.fullmatch(layers, name)]
    rows = lora.layer_rows(model)
    assert len(found) > 10
    return {
        name: (torch.randn(RANK, 2, generator=generator), torch.randn(rows[name], RANK, generator=generator))
        for name in found
    }


def assert_products(found: Mapping[str, Pair], expected: Mapping[str, Pair]) -> None:
    """What a joined layer has for its other parts is zero."""
    for layer, (down, up) in found.items():
        product = torch.zeros(len(up), 2)
        if layer in expected:
            product = expected[layer][1] @ expected[layer][0]
        torch.testing.assert_close(up @ down, product, msg=lambda text, layer=layer: f"{layer}: {text}")
    assert expected.keys() <= found.keys()


def by_layer(state: Mapping[str, Tensor]) -> dict[str, Pair]:
    layers = {key.removesuffix(".lora_A.weight") for key in state if key.endswith(".lora_A.weight")}
    pairs = {layer: (state[f"{layer}.lora_A.weight"], state[f"{layer}.lora_B.weight"]) for layer in layers}
    assert len(state) == 2 * len(pairs)
    return {layer.removeprefix("transformer."): pair for layer, pair in pairs.items()}


ADAPTED = pytest.mark.parametrize("family", [one for one in FAMILIES if NAMES[one.kind].adapters], ids=kind_of)


@ADAPTED
@pytest.mark.parametrize("parts", ["all layers", "some layers"])
def test_an_adapter_for_comfyui_is_read_here_and_by_diffusers_as_strong(family: Family, parts: str) -> None:
    model, names = build(family), find_names(family.kind, "", "")
    adapters = adapters_of(model, family.layers)
    if parts == "some layers":
        adapters = {name: pair for name, pair in adapters.items() if not name.endswith(("to_k", "proj_mlp"))}
    rows = lora.layer_rows(model)
    tensors = name_tensors(names, adapters_to_original(names, adapters, rows))
    ours = read_tensors(tensors, family.kind, rows, None)
    assert not ours.unknown
    assert set(ours.factors.values()) <= {1.0}
    assert_products(ours.pairs, adapters)
    if family.pipeline and (family.partial or parts == "all layers"):
        theirs = getattr(diffusers, family.pipeline).lora_state_dict(dict(tensors))
        assert_products(by_layer(theirs), adapters)


@ADAPTED
def test_an_adapter_for_comfyui_changes_the_original_weights_by_its_rule(family: Family) -> None:
    """ComfyUI adds `alpha / rank * up @ down`, without alpha `up @ down`, to the weight of the file's name."""
    model, names = build(family), find_names(family.kind, "", "")
    state, adapters = narrow_state(model), adapters_of(model, r".*")
    tensors = name_tensors(names, adapters_to_original(names, adapters, lora.layer_rows(model)))
    original = to_original(names, state)
    for key in original:
        name = key.removeprefix(names.prefix).removesuffix(".weight")
        kohya, peft = f"lora_unet_{name.replace('.', '_')}", f"diffusion_model.{name}"
        if f"{kohya}.lora_up.weight" in tensors:
            up, down, alpha = (tensors.pop(kohya + end) for end in (".lora_up.weight", ".lora_down.weight", ".alpha"))
            original[key] = original[key] + float(alpha) / len(down) * (up @ down)
        elif f"{peft}.lora_B.weight" in tensors:
            original[key] = original[key] + tensors.pop(f"{peft}.lora_B.weight") @ tensors.pop(f"{peft}.lora_A.weight")
    assert not tensors
    back = SINGLE_FILE_LOADABLE_CLASSES[family.kind]["checkpoint_mapping_fn"](original, config={})
    for name, value in state.items():
        change = torch.zeros(1)
        if name.endswith(".weight") and name.removesuffix(".weight") in adapters:
            down, up = adapters[name.removesuffix(".weight")]
            change = up @ down
        torch.testing.assert_close(back[name], value + change)
