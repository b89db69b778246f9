"""Exports in the forms of other tools, loaded by their own rules, give the trainer's image."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import DiffusersConfig, LoraConfig
from cosmos_rl.policy.config.load import dump_toml, load_config
from cosmos_rl.policy.model import exports, lora
from cosmos_rl.policy.model.assembled import assemble
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.driver.model import DrivenModel
from cosmos_rl.policy.model.original_names import adapters_from_original, find_names, to_original
from cosmos_rl.policy.model.single_file import SingleFile
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from tests.support.exports import PROMPT, noise_for, policy_image
from tests.support.family_runs import ZOO, TrainedFamily, folder_of
from tests.support.paths import ROOT
from tests.support.trainer_runs import train_task

LORA = (
    'r = 4\nlora_alpha = 16\ntarget_modules = "all-linear"\ninit_lora_weights = "gaussian"\n'
    'r_pattern = { "attn.to_k" = 2 }\nalpha_pattern = { "attn.to_v" = 3 }'
)
PREFIX = "model.diffusion_model."


@dataclass(frozen=True)
class Trained:
    """A run, what it was started from, and the image that its policy makes."""

    run: Path
    base: Path
    noise: Tensor
    image: Tensor

    @property
    def step(self) -> str:
        return str(self.run / "checkpoints/step_2")


def trained(config: Path, base: Path) -> Trained:
    options = ["--policy.diffusers.max_prompt_length=256", "--train.max_num_steps=2"]
    run, trainer = train_task(build_sft, config, *options)
    (run / "config.toml").write_text(dump_toml(load_config(config, options)))
    noise = noise_for(trainer.model)
    return Trained(run, base, noise, policy_image(trainer, noise))


@pytest.fixture
def adapter(write_toml: Callable[..., Path], tiny_sd3: Path) -> Trained:
    return trained(write_toml(f"[policy.lora]\n{LORA}", lora=False), tiny_sd3)


def image(base: Path, noise: Tensor, transformer: Mapping[str, Tensor] | None = None) -> Tensor:
    pipe: Any = DiffusionPipeline.from_pretrained(str(base), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if transformer is not None:
        pipe.transformer.load_state_dict(transformer)
    return pipe(
        prompt=PROMPT, num_inference_steps=4, guidance_scale=4.5, latents=noise, height=32, width=32, output_type="pt"
    ).images


def weights_of(base: Path) -> dict[str, Tensor]:
    return load_file(base / "transformer/diffusion_pytorch_model.safetensors")


def load_like_comfyui(file: Path, base: Path) -> tuple[dict[str, Tensor], int]:
    """ComfyUI's rule: of every weight of the original `lora_unet_<name, dots as _>`, `alpha` over the rows of the down
    matrix times up @ down is added (comfy/lora.py, comfy/weight_adapter/lora.py). Back in diffusers' names."""
    names = find_names("SD3Transformer2DModel", "", "")
    original, lora = to_original(names, weights_of(base)), load_file(file)
    used = 0
    for key in list(original):
        module = f"lora_unet_{key.removeprefix(PREFIX).removesuffix('.weight').replace('.', '_')}"
        if key.endswith(".weight") and f"{module}.lora_up.weight" in lora:
            up, down, alpha = (lora[f"{module}.{end}"] for end in ("lora_up.weight", "lora_down.weight", "alpha"))
            original[key] = original[key] + float(alpha) / len(down) * (up @ down)
            used += 3
    assert used == len(lora)
    return convert_sd3_transformer_checkpoint_to_diffusers(original), used // 3


def documented_commands() -> dict[str, str]:
    """The format and the new name of each command on the page."""
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^cosmos-rl export \S+/step_30 --format (\S+) --out (\S+)$", page, re.MULTILINE))


@pytest.mark.slow
def test_an_adapter_leaves_in_every_form_with_its_full_strength(adapter: Trained, tmp_path: Path) -> None:
    assert (image(adapter.base, adapter.noise) - adapter.image).abs().max() > 1e-3
    (tmp_path / "checkpoints").symlink_to(adapter.run / "checkpoints")  # as the output folder has one
    written = {name: tmp_path / out for name, out in documented_commands().items()}
    assert written.keys() == {"diffusers", "comfyui", "peft", "merged", "single-file"}
    for name, out in written.items():
        step = str(tmp_path / "checkpoints/step_2") if name == "peft" else adapter.step
        assert main(["export", step, "--format", name, "--out", str(out)]) == 0
    fused, layers = load_like_comfyui(written["comfyui"], adapter.base)
    assert layers > 20
    assert (image(adapter.base, adapter.noise, fused) - adapter.image).abs().max() <= 1e-4
    assert (image(written["merged"], adapter.noise) - adapter.image).abs().max() <= 1e-4
    base = DiffusionPipeline.from_pretrained(str(adapter.base), torch_dtype=torch.float32).transformer
    merged = PeftModel.from_pretrained(base, str(written["peft"])).merge_and_unload()
    assert (image(adapter.base, adapter.noise, merged.state_dict()) - adapter.image).abs().max() <= 1e-4
    alone = SD3Transformer2DModel.from_single_file(
        str(written["single-file"]), config=str(adapter.base), subfolder="transformer"
    )
    assert (image(adapter.base, adapter.noise, alone.state_dict()) - adapter.image).abs().max() <= 1e-4
    merged_weights = weights_of(written["merged"])
    assert all(torch.equal(value, merged_weights[name]) for name, value in alone.state_dict().items())


@pytest.mark.slow
def test_a_run_starts_from_its_own_step_folder_and_from_its_file_for_comfyui(adapter: Trained, tmp_path: Path) -> None:
    assert_starts_from(adapter, adapter.run / "safetensors/step_2")
    assert_starts_from(adapter, export_for_comfyui(adapter, tmp_path))


def export_for_comfyui(adapter: Trained, folder: Path) -> Path:
    file = folder / "adapter.safetensors"
    assert main(["export", adapter.step, "--format", "comfyui", "--out", str(file)]) == 0
    return file


def assert_starts_from(adapter: Trained, place: Path) -> None:
    """A run with the exported adapter begins with the policy that the other one ended with."""
    config = load_config(adapter.run / "config.toml", [f"--policy.lora.lora_path={place}"])
    model = ModelRegistry.build_diffusers_model(config, param_dtype="float32")
    ours = model.sample([PROMPT], adapter.noise, num_steps=4, guidance=4.5)
    assert (ours - adapter.image).abs().max() <= 1e-5


@pytest.mark.zoo
def test_an_adapter_of_some_parts_of_a_joined_layer_starts_from_its_file_for_comfyui(
    write_toml: Callable[..., Path], tiny_sd3: Path, tmp_path: Path
) -> None:
    table = 'r = 4\nlora_alpha = 16\ntarget_modules = ["attn.to_q", "attn.to_v"]\ninit_lora_weights = "gaussian"'
    adapter = trained(write_toml(f"[policy.lora]\n{table}", lora=False), tiny_sd3)
    assert_starts_from(adapter, export_for_comfyui(adapter, tmp_path))


def test_joined_adapters_are_the_same_product() -> None:
    from cosmos_rl.policy.model.original_names import adapters_to_original

    generator = torch.Generator().manual_seed(0)
    layers = ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_v", "norm_out.linear"]
    ranks = (2, 3, 4)
    pairs = {
        layer: (torch.randn(rank, 5, generator=generator), torch.randn(6, rank, generator=generator))
        for layer, rank in zip(layers, ranks, strict=True)
    }
    names = find_names("SD3Transformer2DModel", "", "")
    rows = dict.fromkeys([*layers, "transformer_blocks.0.attn.to_k"], 6)
    joined = adapters_to_original(names, pairs, rows)
    down, up = joined["joint_blocks.0.x_block.attn.qkv"]
    expected = torch.cat(
        [pairs[layers[0]][1] @ pairs[layers[0]][0], torch.zeros(6, 5), pairs[layers[1]][1] @ pairs[layers[1]][0]]
    )
    torch.testing.assert_close(up @ down, expected)
    found = {name.replace(".", "_"): pair for name, pair in joined.items()} | {"nothing": pairs[layers[0]]}
    placed, unused = adapters_from_original(names, found, rows)
    back = {layer: pair for layer, (_, pair) in placed.items()}
    assert unused == ["nothing"]
    for layer, (down, up) in pairs.items():
        torch.testing.assert_close(back[layer][1] @ back[layer][0], up @ down)
    assert not (back["transformer_blocks.0.attn.to_k"][1] @ back["transformer_blocks.0.attn.to_k"][0]).any()


def two_experts(trained: Any = "all", **lora: Any) -> DrivenModel:
    """The tiny pipeline of Wan 2.2, its adapters with values of their own."""
    table = {"r": 2, "lora_alpha": 6.0, "target_modules": ("attn1.to_q", "ffn.net.0.proj"), "init_lora_weights": False}
    config = DiffusersConfig(
        inference_size=(32, 32), is_video=True, train_frames=5, inference_frames=5, trained_denoiser=trained
    )
    return DrivenModel(config, model_str=str(folder_of("wan2.2")), lora_config=LoraConfig(**table | lora))


@pytest.mark.zoo
def test_two_experts_leave_as_two_files_each_and_start_from_them(tmp_path: Path) -> None:
    model = two_experts()
    for number, module in enumerate(model.denoisers.values()):  # not the same adapter twice
        for name, value in lora.adapter_state(module, "default").items():
            value.data.add_(0.1 * (number + 1) * len(name))
    state = {name: lora.adapter_state(module, "default") for name, module in model.denoisers.items()}
    adapters = exports.write_comfyui(model, tmp_path / "a.safetensors", torch.float32)
    assert [file.name for file in adapters] == ["a_high_noise.safetensors", "a_low_noise.safetensors"]
    with pytest.raises(UserError, match=r"a_high_noise\.safetensors exists already"):
        exports.write_comfyui(model, tmp_path / "a.safetensors", torch.float32)
    again = two_experts(lora_path=str(adapters[0]))
    for name, module in again.denoisers.items():
        for key, value in lora.adapter_state(module, "default").items():
            torch.testing.assert_close(value, state[name][key])
    files = exports.write_single_file(model, tmp_path / "m.safetensors", torch.float32)
    assert [file.name for file in files] == ["m_high_noise.safetensors", "m_low_noise.safetensors"]
    base = folder_of("wan2.2")
    made = assemble(SingleFile(files[0], base, files[1]), tmp_path / "made")
    for name, module in again.denoisers.items():
        module.fuse_lora()
        found, merged = load_file(made / name / "diffusion_pytorch_model.safetensors"), lora.base_state(module)
        assert found.keys() == merged.keys()
        for key, value in merged.items():
            torch.testing.assert_close(found[key], value)
    assert not torch.equal(*(load_file(file)["blocks.0.self_attn.q.weight"] for file in files))
    assert assemble(SingleFile(files[0], base), tmp_path / "made") != made


@pytest.mark.zoo
def test_two_experts_leave_as_two_folders_of_peft_that_peft_diffusers_and_a_run_load(tmp_path: Path) -> None:
    model, base = two_experts(), folder_of("wan2.2")
    [out] = exports.write_peft(model, tmp_path / "out", torch.float32)
    assert sorted(file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()) == [
        f"{name}/{file}"
        for name in ("transformer", "transformer_2")
        for file in ("adapter_config.json", "adapter_model.safetensors")
    ]
    again = two_experts(lora_path=str(out), init_lora_weights=True)
    pipe: Any = DiffusionPipeline.from_pretrained(str(base), torch_dtype=torch.float32)
    for name, module in model.denoisers.items():
        start = lora.adapter_state(again.denoisers[name], "default")
        for key, value in lora.adapter_state(module, "default").items():
            torch.testing.assert_close(start[key], value)
        module.fuse_lora()  # what the trainer's policy computes with
        wanted = lora.base_state(module)
        alone = type(module).from_pretrained(str(base / name), torch_dtype=torch.float32)
        by_peft = PeftModel.from_pretrained(alone, str(out / name)).merge_and_unload().state_dict()
        part = getattr(pipe, name)
        part.load_lora_adapter(str(out / name), prefix="base_model.model", weight_name="adapter_model.safetensors")
        part.fuse_lora()
        by_diffusers = lora.base_state(part)
        plain = type(module).from_pretrained(str(base / name), torch_dtype=torch.float32).state_dict()
        for key, value in wanted.items():
            torch.testing.assert_close(by_peft[key], value)
            torch.testing.assert_close(by_diffusers[key], value)
        assert any((plain[key] - value).abs().max() > 1e-3 for key, value in wanted.items())


@pytest.mark.zoo
@pytest.mark.parametrize("form", ["comfyui", "peft"])
def test_the_only_trained_expert_leaves_as_one_file_and_starts_from_it(tmp_path: Path, form: str) -> None:
    model = two_experts("transformer_2")
    write, name = {
        "comfyui": (exports.write_comfyui, "w.safetensors"),
        "peft": (exports.write_peft, "w"),
    }[form]
    assert write(model, tmp_path / name, torch.float32) == [tmp_path / name]
    again = two_experts("transformer_2", lora_path=str(tmp_path / name), init_lora_weights=True)
    [(expert, module)] = again.denoisers.items()
    assert expert == "transformer_2"
    state = lora.adapter_state(model.denoisers[expert], "default")
    for key, value in lora.adapter_state(module, "default").items():
        torch.testing.assert_close(value, state[key])
        assert value.any()


def pipeline_of(family: TrainedFamily, **adapter: Any) -> DrivenModel:
    """A tiny pipeline, its adapter with values of its own."""
    frames: dict[str, Any] = {}
    if family.frames is not None:
        frames = {"is_video": True, "train_frames": family.frames[1], "inference_frames": family.frames[1]}
    config = DiffusersConfig(inference_size=(32, 32), max_prompt_length=48, **frames)
    table = {"r": 2, "lora_alpha": 6.0, "target_modules": "all-linear", "init_lora_weights": False}
    return DrivenModel(config, model_str=str(folder_of(family.name)), lora_config=LoraConfig(**table | adapter))


ONE_EXPERT = [family for family in ZOO if family.name not in ("wan2.2", "cogview4")]  # the latter has no original names


@pytest.mark.zoo
@pytest.mark.parametrize("family", ONE_EXPERT, ids=lambda family: family.name)
def test_the_files_of_each_family_are_its_start(family: TrainedFamily, tmp_path: Path) -> None:
    model, base = pipeline_of(family), folder_of(family.name)
    [adapter] = exports.write_comfyui(model, tmp_path / "a.safetensors", torch.float32)
    [file] = exports.write_single_file(model, tmp_path / "m.safetensors", torch.float32)
    merged = weights_of(assemble(SingleFile(file, base), tmp_path / "made"))
    again = pipeline_of(family, lora_path=str(adapter)).transformer
    again.fuse_lora()
    for key, value in lora.base_state(again).items():
        torch.testing.assert_close(merged[key], value)
    changed = [key for key, value in weights_of(base).items() if not torch.equal(value, merged[key])]
    assert len(changed) == len(lora.scales(again, "default"))


@pytest.mark.zoo
def test_the_header_of_an_adapter_says_rank_architecture_and_base(tmp_path: Path) -> None:
    flux = next(family for family in ZOO if family.name == "flux")
    for targets, rank in (("all-linear", "Dynamic"), (["attn.to_out.0"], "2")):  # joined layers have a higher rank
        model = pipeline_of(flux, target_modules=targets)
        [adapter] = exports.write_comfyui(model, tmp_path / f"my {rank}.safetensors", torch.float32)
        with safe_open(adapter, framework="pt") as opened:
            assert opened.metadata() == {
                "format": "pt",
                "base_model": "flux",
                "ss_sd_model_name": "flux",
                "modelspec.architecture": "flux-1/lora",
                "modelspec.title": f"my {rank}",
                "ss_network_dim": rank,
                "ss_network_alpha": rank,
            }


@pytest.mark.slow
def test_all_weights_leave_as_one_file_and_what_needs_an_adapter_is_refused(
    write_toml: Callable[..., Path], tiny_sd3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = trained(write_toml(lora=False), tiny_sd3)
    out = tmp_path / "one.safetensors"
    assert main(["export", full.step, "--format", "single-file", "--out", str(out)]) == 0
    state = convert_sd3_transformer_checkpoint_to_diffusers(load_file(out))
    expected = weights_of(full.run / "safetensors/step_2")
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    for name in ("comfyui", "peft", "merged"):
        place = tmp_path / f"{name}{'.safetensors' if name == 'comfyui' else ''}"
        assert main(["export", full.step, "--format", name, "--out", str(place)]) == 2
        assert f"--format {name}: this run has no adapter" in capsys.readouterr().err
        assert not place.exists()
    assert main(["export", full.step, "--format", "single-file", "--out", str(tmp_path / "folder")]) == 2
    assert "--format single-file writes one file, name it <name>.safetensors" in capsys.readouterr().err
