"""Models in one file, in and out."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.accept import accept
from cosmos_rl.launcher.acceptance.environment import inspect_environment
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.assembled import assemble
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.digest import pipeline_digest
from cosmos_rl.policy.model.original_names import find_names, to_original
from cosmos_rl.policy.model.single_file import SingleFile, find_bases
from tests.support.paths import ROOT
from tests.support.states import assert_same_state, saved_state
from tests.support.trainer_runs import train

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("original", [True, False], ids=["original names", "names of diffusers"])
def test_a_transformer_in_one_file_trains_like_the_folder(
    tmp_path: Path, tiny_sd3: Path, write_toml: Callable[..., Path], original: bool
) -> None:
    state = load_file(tiny_sd3 / TRANSFORMER)
    file = tmp_path / "my model.safetensors"
    save_file(to_original(find_names("SD3Transformer2DModel", "", ""), state) if original else state, file)
    config = write_toml()
    place = [f"--policy.model_name_or_path={file}", f"--policy.single_file_base={tiny_sd3}"]
    accepted = accept(load_config(config, place), "pairs", own_script=False)
    made = Path(accepted.policy.model_name_or_path)
    assert made.parent == Path(accepted.train.output_dir) / "single_files"
    assert accept(load_config(config, place), "pairs", own_script=False) == accepted
    ours = load_file(made / TRANSFORMER)
    assert ours.keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in ours.items())
    assert pipeline_digest(str(made), None) is not None
    ends = [
        train(config, "--train.max_num_steps=1", f"--policy.model_name_or_path={name}") for name in (made, tiny_sd3)
    ]
    assert_same_state(saved_state(ends[0], 1), saved_state(ends[1], 1))


def test_a_file_whose_other_parts_are_not_here_is_refused_with_what_fetches_them(
    tmp_path: Path, tiny_sd3: Path, write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my model.safetensors"
    file.write_bytes((tiny_sd3 / TRANSFORMER).read_bytes())
    config = write_toml()
    options = ["--config", str(config), f"--policy.model_name_or_path={file}"]
    messages = []
    for command in (["check"], ["check", "--env"], []):
        assert main([*command, *options]) == 2
        messages.append(capsys.readouterr().err)
    base = "stabilityai/stable-diffusion-3-medium-diffusers"
    for message in messages:
        assert f"would be those of {base}, which is not here: `hf download {base}` fetches it, or set" in message
        assert message.count("is one file, and a pipeline is a folder") == 1
    with pytest.raises(UserError, match="is one file"):
        ModelRegistry.build_diffusers_model(load_config(config, options[2:]))
    assert main(["check", "--env", *options, f"--policy.single_file_base={tmp_path}"]) == 2
    assert f"those of {tmp_path}, which is not here: there is no such pipeline; set" in capsys.readouterr().err
    assert main(["check", "--env", *options, f"--policy.single_file_base={tiny_sd3}"]) == 0
    assert "trained weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "original", "message"),
    [
        ({"proj_out.weight": None}, True, r"\n  missing: final_layer\.linear\.weight"),
        ({"proj_out.weight": None}, False, r"\n  missing: proj_out\.weight"),
        ({"new.weight": torch.zeros(1)}, True, r"\n  unexpected: new\.weight"),
        ({"new.weight": torch.zeros(1)}, False, r"\n  unexpected: new\.weight"),
        ({"proj_out.bias": torch.zeros(3)}, True, r"\n  final_layer\.linear\.bias: \(3,\) in the file"),
        ({"proj_out.bias": torch.zeros(3)}, False, r"\n  proj_out\.bias: \(3,\) in the file"),
    ],
)
def test_a_file_with_another_transformer_is_refused_by_its_tensors(
    tmp_path: Path, tiny_sd3: Path, change: dict[str, torch.Tensor | None], original: bool, message: str
) -> None:
    changed = {**load_file(tiny_sd3 / TRANSFORMER), **change}
    state = {name: value for name, value in changed.items() if value is not None}
    if original:
        new = {f"model.diffusion_model.{name}": state.pop(name) for name in ("new.weight",) if name in state}
        state = to_original(find_names("SD3Transformer2DModel", "", ""), state) | new
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=message):
        assemble(SingleFile(tmp_path / "x.safetensors", tiny_sd3), tmp_path / "single_files")
    assert not list((tmp_path / "single_files").glob("x-*"))


def test_a_file_that_was_replaced_is_not_taken_for_the_one_before(
    tmp_path: Path, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmos_rl.policy.model.digest._SAMPLED_BYTES", 64)  # as of a file of gigabytes
    state, file = load_file(tiny_sd3 / TRANSFORMER), tmp_path / "x.safetensors"
    for value in (0.0, 1.0):
        state["proj_out.bias"].fill_(value)
        save_file(state, file)
        made = assemble(SingleFile(file, tiny_sd3), tmp_path / "single_files")
        assert torch.equal(load_file(made / TRANSFORMER)["proj_out.bias"], state["proj_out.bias"])


def test_parts_of_a_file_that_are_not_used_are_named(
    tmp_path: Path, tiny_sd3: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = to_original(find_names("SD3Transformer2DModel", "", ""), load_file(tiny_sd3 / TRANSFORMER))
    save_file({**state, "first_stage_model.x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with caplog.at_level("WARNING", logger="cosmos_rl"):
        assemble(SingleFile(tmp_path / "x.safetensors", tiny_sd3), tmp_path)
    assert "1 tensors are of other parts (first_stage_model) and are not used" in caplog.text


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["input_blocks.0.0.weight"], "its names are those of no transformer that is known here"),
        (["transformer.x.lora_A.weight"], "it holds an adapter: name its base there"),
        ([], "that is known here"),
    ],
)
def test_files_of_other_kinds_are_named(
    tmp_path: Path, write_toml: Callable[..., Path], keys: list[str], why: str
) -> None:
    def problem_of(place: Path) -> str:
        config = load_config(write_toml(), [f"--policy.model_name_or_path={place}"])
        [problem] = inspect_environment(config, "pairs")[0]
        return problem

    file = tmp_path / "x.safetensors"
    save_file({key: torch.zeros(1) for key in keys}, file)
    assert why in problem_of(file)
    file.write_bytes(b"no header")
    assert "not a complete .safetensors file" in problem_of(file)
    assert "only .safetensors files can take its place" in problem_of(file.parent / "config.toml")
    large = tmp_path / "my x.pt"
    large.touch()
    os.truncate(large, 28_000_000_000)  # no disk is used
    assert f"cosmos-rl import '{large}' --base nvidia/Cosmos-Predict2.5-14B" in problem_of(large)


def test_the_base_is_known_by_the_names_of_the_tensors() -> None:
    large = [f"joint_blocks.{i}.context_block.attn.qkv.weight" for i in range(38)]
    assert find_bases(large) == ["stabilityai/stable-diffusion-3.5-large"]
    for prefix in ("diffusion_model.", "model.model.", "model.diffusion_model."):
        prefixed = [f"{prefix}{key}" for key in large[:24]]
        assert find_bases(prefixed) == ["stabilityai/stable-diffusion-3-medium-diffusers"]
    two = [*prefixed, "model.diffusion_model.joint_blocks.0.x_block.attn2.qkv.weight"]
    assert find_bases(two) == ["stabilityai/stable-diffusion-3.5-medium"]


@pytest.mark.parametrize(
    ("kind", "blocks", "bases"),
    [
        ("FluxTransformer2DModel", {"guidance_embeds": True}, ["FLUX.1-dev", "FLUX.1-Kontext-dev"]),
        ("FluxTransformer2DModel", {}, ["FLUX.1-schnell"]),
        ("Flux2Transformer2DModel", {"num_single_layers": 20}, ["FLUX.2-klein-base-4B", "FLUX.2-klein-4B"]),
        ("Flux2Transformer2DModel", {"num_single_layers": 48}, ["FLUX.2-dev"]),
        ("ChromaTransformer2DModel", {}, ["Chroma1-HD"]),
        ("HunyuanVideoTransformer3DModel", {}, ["HunyuanVideo", "HunyuanVideo-I2V"]),
        ("WanTransformer3DModel", {"num_layers": 30}, ["Wan2.1-T2V-1.3B-Diffusers", "Wan2.2-TI2V-5B-Diffusers"]),
        ("WanTransformer3DModel", {"num_layers": 2}, []),
        ("Lumina2Transformer2DModel", {}, ["Lumina-Image-2.0"]),
        ("ZImageTransformer2DModel", {}, ["Z-Image", "Z-Image-Turbo"]),
        ("AuraFlowTransformer2DModel", {}, ["AuraFlow-v0.3"]),
        ("LTXVideoTransformer3DModel", {}, ["LTX-Video"]),
        ("MochiTransformer3DModel", {}, ["mochi-1-preview"]),
    ],
)
def test_the_bases_that_a_file_may_have_are_known_by_its_original_names(
    kind: str, blocks: dict[str, Any], bases: list[str]
) -> None:
    with init_empty_weights():
        state = getattr(diffusers, kind)(**{**FEW.get(kind, {}), **blocks}).state_dict()
    original = to_original(find_names(kind, "", ""), {name: value.to("meta") for name, value in state.items()})
    assert [base.split("/")[1] for base in find_bases(list(original))] == bases


FEW = {
    "FluxTransformer2DModel": {"num_layers": 1, "num_single_layers": 1},
    "Flux2Transformer2DModel": {"num_layers": 1},
    "ChromaTransformer2DModel": {"num_layers": 1, "num_single_layers": 1},
    "HunyuanVideoTransformer3DModel": {"num_layers": 1, "num_single_layers": 1},
    "Lumina2Transformer2DModel": {"num_layers": 1},
    "ZImageTransformer2DModel": {"n_layers": 1},
    "AuraFlowTransformer2DModel": {"num_mmdit_layers": 1, "num_single_dit_layers": 1},
    "LTXVideoTransformer3DModel": {"num_layers": 1},
    "MochiTransformer3DModel": {"num_layers": 2},
}


def test_a_file_in_eight_bits_is_read_at_its_precision(tmp_path: Path, tiny_sd3: Path) -> None:
    state = load_file(tiny_sd3 / TRANSFORMER)
    original = to_original(find_names("SD3Transformer2DModel", "", ""), state)
    save_file({key: value.to(torch.float8_e4m3fn) for key, value in original.items()}, tmp_path / "x.safetensors")
    made = assemble(SingleFile(tmp_path / "x.safetensors", tiny_sd3), tmp_path / "single_files")
    transformer = DiffusionPipeline.from_pretrained(made, torch_dtype=torch.float32).transformer
    for key, value in transformer.state_dict().items():
        assert torch.equal(value, state[key].to(torch.float8_e4m3fn).float()), key


def test_a_second_expert_is_refused_where_the_base_has_none(
    tmp_path: Path, tiny_sd3: Path, write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(1)}, file)
    options = [f"--policy.model_name_or_path={file}", f"--policy.single_file_base={tiny_sd3}"]
    low = f"--policy.single_file_low_noise={file}"
    assert main(["check", "--env", "--config", str(write_toml()), *options, low]) == 2
    assert f'policy.single_file_low_noise = "{file}": {tiny_sd3} has no second expert' in capsys.readouterr().err


@pytest.mark.parametrize("key", ["single_file_base", "single_file_low_noise"])
def test_what_belongs_to_a_single_file_is_refused_with_a_pipeline(
    key: str, tiny_sd3: Path, write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--config", str(write_toml()), f"--policy.{key}={tiny_sd3}"]) == 2
    message = capsys.readouterr().err
    assert f'policy.{key}: given together with policy.model_name_or_path = "{tiny_sd3}"; allowed: only with' in message


def test_the_documented_merge_gives_the_adapters_image(
    write_toml: Callable[..., Path], tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(write_toml(), "--train.max_num_steps=3")
    text = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "fuse_lora" in block]
    monkeypatch.chdir(tmp_path)
    code = code.replace("stabilityai/stable-diffusion-3.5-medium", str(tiny_sd3)).replace(
        "torch.bfloat16", "torch.float32"
    )
    exec(code.replace("path/to/safetensors/step_30/lora", str(run / "safetensors/step_3/lora")), {})

    def image(pipe: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        size = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 16}
        return pipe("a cat", generator=torch.Generator().manual_seed(0), output_type="pt", **size).images

    adapted = DiffusionPipeline.from_pretrained(tiny_sd3)
    base = image(adapted)
    adapted.load_lora_weights(str(run / "safetensors/step_3/lora"), weight_name="model.safetensors")
    merged = image(DiffusionPipeline.from_pretrained(tmp_path / "merged"))
    assert (merged - image(adapted)).abs().max() <= 1e-5
    assert (merged - base).abs().max() > 1e-3
