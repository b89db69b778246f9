"""Models in one file, in and out."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.environment import inspect_environment
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.single_file import find_base
from tests.support.paths import ROOT
from tests.support.trainer_runs import train

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"


def test_a_model_in_one_file_is_refused_with_the_command_that_makes_a_folder(
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
    assert all(message.count("is one file, and a pipeline is a folder") == 1 for message in messages)
    with pytest.raises(UserError, match="is one file") as error:
        ModelRegistry.build_diffusers_model(load_config(config, options[2:]))
    (line,) = re.findall(r"python -c .*", str(error.value))
    assert all(line in message for message in messages)
    python, flag, code = shlex.split(line)
    assert (python, flag) == ("python", "-c")
    exec(code.replace("stabilityai/stable-diffusion-3-medium-diffusers", str(tiny_sd3)), {})
    made = tmp_path / "my model"
    assert inspect_environment(load_config(config, [f"--policy.model_name_or_path={made}"]), "pairs") == ([], [])
    ours, theirs = load_file(made / TRANSFORMER), load_file(tiny_sd3 / TRANSFORMER)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["input_blocks.0.0.weight"], "does not hold the transformer of Stable Diffusion 3"),
        (["transformer.x.lora_A.weight"], "it holds an adapter: name its base there"),
        ([], "does not hold"),
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
    assert "only of .safetensors and .pt files" in problem_of(file.parent / "config.toml")
    large = tmp_path / "my x.pt"
    large.touch()
    os.truncate(large, 28_000_000_000)  # no disk is used
    assert f"cosmos-rl import '{large}' --base nvidia/Cosmos-Predict2.5-14B" in problem_of(large)


def test_the_base_is_known_by_the_names_of_the_tensors() -> None:
    large = [f"joint_blocks.{i}.context_block.attn.qkv.weight" for i in range(38)]
    assert find_base(large) == "stabilityai/stable-diffusion-3.5-large"
    prefixed = [f"model.diffusion_model.{key}" for key in large[:24]]
    assert find_base(prefixed) == "stabilityai/stable-diffusion-3-medium-diffusers"
    two = [*prefixed, "model.diffusion_model.joint_blocks.0.x_block.attn2.qkv.weight"]
    assert find_base(two) == "stabilityai/stable-diffusion-3.5-medium"


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

    def image(pipe: DiffusionPipeline) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        size = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 16}
        return pipe("a cat", generator=torch.Generator().manual_seed(0), output_type="pt", **size).images

    adapted = DiffusionPipeline.from_pretrained(tiny_sd3)
    base = image(adapted)
    adapted.load_lora_weights(str(run / "safetensors/step_3/lora"), weight_name="model.safetensors")
    merged = image(DiffusionPipeline.from_pretrained(tmp_path / "merged"))
    assert (merged - image(adapted)).abs().max() <= 1e-5
    assert (merged - base).abs().max() > 1e-3
