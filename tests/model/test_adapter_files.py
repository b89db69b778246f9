"""Adapters of other tools start with the strength that they have there: the change of each weight, and one image."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import DiffusersConfig, LoraConfig
from cosmos_rl.policy.model import lora
from cosmos_rl.policy.model.adapter_files import adapter_place, read_tensors
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.original_names import adapters_to_original, find_names

TARGETS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
RANK, ALPHA = 4, 6.0
Pairs = Mapping[str, tuple[Tensor, Tensor]]
KOHYA, PEFT = (".lora_down.weight", ".lora_up.weight"), (".lora_A.weight", ".lora_B.weight")


def build(tiny_sd3: Path, path: Path, **options: object) -> SD3Model:
    table = {"r": RANK, "lora_alpha": 16.0, "target_modules": TARGETS, "lora_path": str(path), **options}
    config = DiffusersConfig(max_prompt_length=256, inference_size=(32, 32))
    return SD3Model(config, model_str=str(tiny_sd3), lora_config=LoraConfig(**table))  # type: ignore[arg-type]


def changes(model: SD3Model) -> dict[str, Tensor]:
    """What the trainer adds to the weight of each layer."""
    state, factors = lora.adapter_state(model.transformer, "default"), lora.scales(model.transformer, "default")
    return {
        layer: factor * (state[f"{layer}.lora_B.weight"] @ state[f"{layer}.lora_A.weight"]).detach()
        for layer, factor in factors.items()
    }


@pytest.fixture
def pairs(tiny_sd3: Path) -> Pairs:
    """Down and up matrices by diffusers' names."""
    generator = torch.Generator().manual_seed(3)
    weights = load_file(tiny_sd3 / "transformer/diffusion_pytorch_model.safetensors")
    sizes = {name.removesuffix(".weight"): value.shape for name, value in weights.items() if name.endswith(".weight")}
    return {
        layer: (torch.randn(RANK, inside, generator=generator) / 4, torch.randn(out, RANK, generator=generator) / 4)
        for layer, (out, inside) in ((layer, size) for layer, size in sizes.items() if layer.endswith(TARGETS))
    }


def assert_changes(model: SD3Model, expected: Mapping[str, Tensor]) -> None:
    found = changes(model)
    assert found.keys() == expected.keys()
    for layer, value in expected.items():
        torch.testing.assert_close(found[layer], value, atol=1e-6, rtol=1e-6)


def named(
    pairs: Pairs, name: Callable[[str], str], endings: tuple[str, str], alpha: float | None = None
) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for layer, pair in pairs.items():
        state |= {name(layer) + ending: matrix for ending, matrix in zip(endings, pair, strict=True)}
        if alpha is not None:
            state[f"{name(layer)}.alpha"] = torch.tensor(alpha)
    return state


def one_trainer(layer: str) -> str:
    return f"lora_transformer_{layer.replace('.', '_')}"


def oldest(layer: str) -> str:
    """`….attn.to_q` -> `….attn.processor.to_q`, as diffusers named the layers of attention processors."""
    module, _, last = layer.removesuffix(".0").rpartition(".")
    return f"unet.{module}.processor.{last}"


FORMS = {
    "OneTrainer": (one_trainer, KOHYA, ALPHA),
    "kohya": (lambda layer: f"lora_unet_{layer.replace('.', '_')}", KOHYA, ALPHA),
    "no alpha": (lambda layer: f"transformer.{layer}", KOHYA, None),
    "older": (lambda layer: f"transformer.{layer}", (".lora.down.weight", ".lora.up.weight"), None),
    "oldest": (oldest, ("_lora.down.weight", "_lora.up.weight"), None),
    "alpha beside names of PEFT": (lambda layer: f"diffusion_model.{layer}", PEFT, ALPHA),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_of_another_tool_changes_each_weight_as_there(
    tiny_sd3: Path, tmp_path: Path, pairs: Pairs, form: str
) -> None:
    name, endings, alpha = FORMS[form]
    save_file(named(pairs, name, endings, alpha), tmp_path / "some name.safetensors")
    factor = 1.0 if alpha is None else alpha / RANK
    assert_changes(build(tiny_sd3, tmp_path), {layer: factor * (up @ down) for layer, (down, up) in pairs.items()})


def test_names_of_peft_without_alpha_act_as_in_diffusers(
    tiny_sd3: Path, tmp_path: Path, pairs: Pairs, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(named(pairs, lambda layer: f"transformer.{layer}", PEFT), tmp_path / "x.safetensors")
    with caplog.at_level("WARNING", logger="cosmos_rl"):
        ours = build(tiny_sd3, tmp_path / "x.safetensors")
    assert "does not say its alpha; it acts with the factor 1, as in diffusers" in caplog.text
    pipe: Any = DiffusionPipeline.from_pretrained(str(tiny_sd3))
    pipe.load_lora_weights(str(tmp_path), weight_name="x.safetensors", adapter_name="a")
    assert set(lora.scales(pipe.transformer, "a").values()) == {1.0}
    assert_changes(ours, {layer: up @ down for layer, (down, up) in pairs.items()})


@pytest.mark.parametrize(("alpha", "factor"), [(16.0, 4.0), (4.0, 1.0), (None, 1.0)])
def test_names_of_peft_that_are_converted_take_the_alpha_of_the_header(
    tiny_sd3: Path, tmp_path: Path, pairs: Pairs, alpha: float | None, factor: float
) -> None:
    header = json.dumps({"transformer.r": RANK, "transformer.lora_alpha": alpha})
    file = tmp_path / "x.safetensors"
    save_file(named(pairs, lambda layer: f"other.{layer}", PEFT), file, {lora.METADATA_KEY: header} if alpha else None)
    ours = build(tiny_sd3, tmp_path, lora_path=None)

    def rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("other.", "transformer."): value for name, value in tensors.items()}

    lora.warm_start(ours.transformer, "default", str(file), convert=rename)
    assert_changes(ours, {layer: factor * (up @ down) for layer, (down, up) in pairs.items()})


def test_parts_of_a_joined_layer_that_were_not_adapted_are_left_out(
    tiny_sd3: Path, tmp_path: Path, pairs: Pairs
) -> None:
    few = {layer: pair for layer, pair in pairs.items() if layer.endswith(("to_q", "to_v"))}
    joined = adapters_to_original(
        find_names("SD3Transformer2DModel", "", ""), few, {layer: len(up) for layer, (_, up) in pairs.items()}
    )
    state = named(joined, lambda layer: f"lora_unet_{layer.replace('.', '_')}", KOHYA)
    state |= {f"lora_unet_{layer.replace('.', '_')}.alpha": torch.tensor(8.0) for layer in joined}  # the joined rank
    save_file(state, tmp_path / "x.safetensors")
    ours = build(tiny_sd3, tmp_path / "x.safetensors", target_modules=("attn.to_q", "attn.to_v"))
    assert_changes(ours, {layer: up @ down for layer, (down, up) in few.items()})
    with pytest.raises(UserError, match=r"attn\.to_v\.lora_A\.weight: not in the adapter"):
        build(tiny_sd3, tmp_path / "x.safetensors", target_modules=("attn.to_q",))


def test_kohyas_joined_layers_are_divided(tiny_sd3: Path, tmp_path: Path) -> None:
    generator, state, expected = torch.Generator().manual_seed(4), dict[str, Tensor](), dict[str, Tensor]()
    for block in range(2):
        down, up = torch.randn(RANK, 64, generator=generator), torch.randn(192, RANK, generator=generator)
        name = f"lora_unet_joint_blocks_{block}_x_block_attn_qkv"
        state |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(ALPHA)}
        for place, last in enumerate("qkv"):
            rows = up[64 * place : 64 * (place + 1)]
            expected[f"transformer_blocks.{block}.attn.to_{last}"] = ALPHA / RANK * (rows @ down)
    save_file(state, tmp_path / "x.safetensors")
    assert_changes(build(tiny_sd3, tmp_path / "x.safetensors", target_modules=TARGETS[:3]), expected)


def test_a_folder_of_peft_and_a_file_of_diffusers(tiny_sd3: Path, tmp_path: Path, pairs: Pairs) -> None:
    pipe: Any = DiffusionPipeline.from_pretrained(str(tiny_sd3))
    model = get_peft_model(pipe.transformer, PeftLoraConfig(r=RANK, lora_alpha=16, target_modules=list(TARGETS)))
    endings = (".lora_A.default.weight", ".lora_B.default.weight")
    state = named(pairs, lambda layer: f"base_model.model.{layer}", endings)
    assert model.load_state_dict(state, strict=False).unexpected_keys == []
    model.save_pretrained(str(tmp_path / "peft"))
    metadata = {"r": RANK, "lora_alpha": 16, "target_modules": list(TARGETS)}
    type(pipe).save_lora_weights(
        str(tmp_path / "diffusers"),
        transformer_lora_layers=named(pairs, str, PEFT),
        transformer_lora_adapter_metadata=metadata,
    )
    for place in ("peft", "diffusers"):
        ours = build(tiny_sd3, tmp_path / place)
        assert_changes(ours, {layer: 4.0 * (up @ down) for layer, (down, up) in pairs.items()})
    noise = torch.randn(1, *ours.latent_shape(32, 32), generator=torch.Generator().manual_seed(5))
    pipe: Any = DiffusionPipeline.from_pretrained(str(tiny_sd3))
    pipe.set_progress_bar_config(disable=True)
    size = {"num_inference_steps": 3, "guidance_scale": 4.5, "height": 32, "width": 32, "output_type": "pt"}
    before = pipe(prompt="a cat", latents=noise, **size).images
    pipe.load_lora_weights(str(tmp_path / "diffusers"))
    theirs = pipe(prompt="a cat", latents=noise, **size).images
    assert (ours.sample(["a cat"], noise, num_steps=3, guidance=4.5) - theirs).abs().max() <= 1e-5
    assert (before - theirs).abs().max() > 1e-3


def test_what_does_not_fit_is_named_with_what_the_file_has(tiny_sd3: Path, tmp_path: Path, pairs: Pairs) -> None:
    file = tmp_path / "x.safetensors"
    state = named(pairs, one_trainer, KOHYA, ALPHA)
    save_file(state, file)
    with pytest.raises(UserError, match=r"\(4, 64\) in the file, \(2, 64\) in the adapter") as caught:
        build(tiny_sd3, file, r=2)
    assert 'the file has policy.lora.r = 4, target_modules = ["attn.to_k", "attn.to_out.0"' in str(caught.value)
    save_file({**state, "lora_transformer_no_such_layer.lora_down.weight": torch.zeros(1, 1)}, file)
    with pytest.raises(UserError, match=r"lora_transformer_no_such_layer\.lora_down\.weight: no layer of this model"):
        build(tiny_sd3, file)
    save_file({**state, "lora_transformer_transformer_blocks_0_attn_to_q.dora_scale": torch.zeros(1, 1)}, file)
    with pytest.raises(UserError, match=r"attn_to_q\.dora_scale: no layer of this model, or no part of a LoRA"):
        build(tiny_sd3, file)


def test_tensors_for_text_encoders_are_named_and_left_out(
    tiny_sd3: Path, tmp_path: Path, pairs: Pairs, caplog: pytest.LogCaptureFixture
) -> None:
    state = named(pairs, one_trainer, KOHYA, ALPHA) | {"lora_te1_x.lora_down.weight": torch.zeros(1, 1)}
    save_file(state, tmp_path / "x.safetensors")
    with caplog.at_level("WARNING", logger="cosmos_rl"):
        build(tiny_sd3, tmp_path / "x.safetensors")
    assert "1 tensors are for the text encoders (lora_te1_x.lora_down.weight, …), which are not" in caplog.text


def tiny_flux() -> FluxTransformer2DModel:
    sizes: dict[str, Any] = {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
    }
    sizes |= {"num_attention_heads": 2, "joint_attention_dim": 8, "pooled_projection_dim": 8}
    return FluxTransformer2DModel(**sizes, axes_dims_rope=(2, 2, 4))


XLABS = {
    "double_blocks.0.processor.qkv_lora1": ["transformer_blocks.0.attn.to_q", "….to_k", "….to_v"],
    "double_blocks.0.processor.qkv_lora2": ["transformer_blocks.0.attn.add_q_proj", "….add_k_proj", "….add_v_proj"],
    "double_blocks.0.processor.proj_lora1": ["transformer_blocks.0.attn.to_out.0"],
    "double_blocks.0.processor.proj_lora2": ["transformer_blocks.0.attn.to_add_out"],
    "single_blocks.0.processor.qkv_lora": ["single_transformer_blocks.0.attn.to_q", "….to_k", "….to_v"],
}
"""Names of x-flux -> the layers, by their ends where the beginning is the same."""


def test_an_adapter_of_x_flux_is_converted_by_diffusers() -> None:
    generator, state, expected = torch.Generator().manual_seed(6), dict[str, Tensor](), dict[str, Tensor]()
    for name, layers in XLABS.items():
        down, up = torch.randn(2, 16, generator=generator), torch.randn(16 * len(layers), 2, generator=generator)
        state |= {f"{name}.down.weight": down, f"{name}.up.weight": up}
        for layer, rows in zip(layers, up.split(16), strict=True):
            expected[layer.replace("…", layers[0].rpartition(".")[0])] = rows @ down
    rows = lora.layer_rows(tiny_flux())
    convert: Any = FluxPipeline.lora_state_dict
    found = read_tensors(state, "FluxTransformer2DModel", rows, convert)
    assert (found.form, found.unknown) == ("diffusers' converters", [])
    assert found.pairs.keys() == expected.keys()
    assert found.factors == dict.fromkeys(expected, 1.0)
    for layer, (down, up) in found.pairs.items():
        torch.testing.assert_close(up @ down, expected[layer])


FLUX_FORMS = {
    "kohya": (lambda name: f"lora_unet_{name.replace('.', '_')}", KOHYA, ALPHA),
    "ComfyUI": (lambda name: f"diffusion_model.{name}", KOHYA, ALPHA),
    "PEFT over the original": (lambda name: f"base_model.model.{name}", PEFT, None),
}


@pytest.mark.parametrize("form", FLUX_FORMS)
def test_joined_layers_of_flux_are_divided(form: str) -> None:
    name, endings, alpha = FLUX_FORMS[form]
    generator = torch.Generator().manual_seed(7)
    joined = {"double_blocks.0.txt_attn.qkv": 48, "single_blocks.0.linear1": 3 * 16 + 64, "single_blocks.0.linear2": 16}
    pairs = {
        layer: (torch.randn(RANK, 16, generator=generator), torch.randn(rows, RANK, generator=generator))
        for layer, rows in joined.items()
    }
    rows = lora.layer_rows(tiny_flux())
    found = read_tensors(named(pairs, name, endings, alpha), "FluxTransformer2DModel", rows, None)
    assert not found.unknown
    block = "single_transformer_blocks.0"
    single = [*(f"{block}.attn.to_{last}" for last in "qkv"), f"{block}.proj_mlp"]
    text = [f"transformer_blocks.0.attn.add_{last}_proj" for last in "qkv"]
    for layers, (down, up) in zip((text, single, [f"{block}.proj_out"]), pairs.values(), strict=True):
        ours = torch.cat([found.pairs[layer][1] @ found.pairs[layer][0] for layer in layers])
        torch.testing.assert_close(ours, up @ down)
        # without any alpha a header or an adapter_config.json may have one
        assert [found.factors.get(layer) for layer in layers] == [alpha and alpha / RANK] * len(layers)


BOTH, LOW = ["transformer", "transformer_2"], ["transformer_2"]


@pytest.mark.parametrize(
    ("given", "trained", "first", "second"),
    [
        ("a/x_high_noise.safetensors", BOTH, "a/x_high_noise.safetensors", "a/x_low_noise.safetensors"),
        ("x_low_noise.safetensors", BOTH, "x_high_noise.safetensors", "x_low_noise.safetensors"),
        ("Wan2.2-HighNoise.safetensors", BOTH, "Wan2.2-HighNoise.safetensors", "Wan2.2-LowNoise.safetensors"),
        ("X-HIGH-NOISE.safetensors", BOTH, "X-HIGH-NOISE.safetensors", "X-LOW-NOISE.safetensors"),
        ("x-high-4.safetensors", BOTH, "x-high-4.safetensors", "x-low-4.safetensors"),
        (
            "highlight_high_noise.safetensors",
            BOTH,
            "highlight_high_noise.safetensors",
            "highlight_low_noise.safetensors",
        ),
        (
            "high_noise_of_high_noise_high.safetensors",
            BOTH,
            "high_noise_of_high_noise_high.safetensors",
            "high_noise_of_low_noise_high.safetensors",
        ),
        ("my_highres.safetensors", BOTH, "my_highres.safetensors", "my_highres.safetensors"),
        ("flow_noise.safetensors", BOTH, "flow_noise.safetensors", "flow_noise.safetensors"),
        ("x.safetensors", LOW, None, "x.safetensors"),
        ("x_low_noise.safetensors", LOW, None, "x_low_noise.safetensors"),
        ("high/lora", BOTH, "high/lora", "high/lora/transformer_2"),
        ("high/lora", LOW, None, "high/lora/transformer_2"),
    ],
)
def test_the_adapter_of_an_expert_is_in_the_file_that_names_it(
    given: str, trained: list[str], first: str | None, second: str
) -> None:
    if first is not None:
        assert adapter_place(given, "transformer", trained) == first
    assert adapter_place(given, "transformer_2", trained) == second


def test_the_only_trained_expert_takes_a_folder_of_peft(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    assert adapter_place(str(tmp_path), "transformer_2", LOW) == str(tmp_path)
    assert adapter_place(str(tmp_path), "transformer_2", BOTH) == str(tmp_path / "transformer_2")
