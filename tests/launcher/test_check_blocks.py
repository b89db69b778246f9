"""What `cosmos-rl check` and a launch say of transformers that cannot be taken block by block."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.arguments import parse_launch
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.launch import accept_command
from cosmos_rl.launcher.pipeline_source import supports_recomputing
from cosmos_rl.policy.model.base_offload import find_resting
from cosmos_rl.policy.model.driver.loading import load_pipeline

RECOMPUTE, OFFLOAD = "--policy.model_gradient_checkpointing=true", "--train.base_offload=true"
WITHOUT = "LuminaNextDiT2DModel"
"""A transformer of diffusers without gradient checkpointing."""


@pytest.fixture
def copied(tiny_sd3: Path, tmp_path: Path) -> Path:
    """A pipeline folder that a test may change."""
    return Path(shutil.copytree(tiny_sd3, tmp_path / "copied"))


def rename_blocks(folder: Path) -> None:
    """The blocks in a list of another name."""
    [file] = (folder / "transformer").glob("*.safetensors")
    named = {name.replace("transformer_blocks.", "parts."): value for name, value in load_file(file).items()}
    save_file(named, file, metadata={"format": "pt"})


def rename_class(folder: Path) -> None:
    """Another class of transformer, which is read before anything of it is loaded."""
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "_class_name": WITHOUT}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            rename_blocks,
            "train.base_offload: found true; allowed: false with SD3Transformer2DModel, none of whose weights are in a "
            "list of blocks by a known name (...blocks.<n> or ...layers.<n>)",
        ),
        (
            rename_class,
            f"train.base_offload: found true; allowed: false with {WITHOUT}, which does not support gradient "
            "checkpointing, so that all its blocks would stay on the device for the backward pass",
        ),
    ],
    ids=["no blocks", "no checkpointing"],
)
def test_a_base_that_cannot_be_fetched_by_block_is_refused_before_it_is_loaded(
    write_toml: Callable[..., Path],
    copied: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    message: str,
) -> None:
    change(copied)
    command = ["--config", str(write_toml()), f"--policy.model_name_or_path={copied}", RECOMPUTE]
    assert main(["check", *command, OFFLOAD]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(UserError) as caught:
        accept_command(parse_launch([*command, OFFLOAD], "0", ""))
    assert message in str(caught.value)
    main(["check", *command])
    assert "train.base_offload" not in capsys.readouterr().err


def test_a_base_with_blocks_is_accepted(write_toml: Callable[..., Path], tiny_sd3: Path) -> None:
    config, _ = accept_command(parse_launch(["--config", str(write_toml()), RECOMPUTE, OFFLOAD], "0", ""))
    assert config.train.base_offload
    assert find_resting(load_pipeline(str(tiny_sd3)).transformer)


def test_check_says_that_checkpointing_has_no_effect(
    write_toml: Callable[..., Path], copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"warning: policy.model_gradient_checkpointing has no effect: {WITHOUT} does not support it"
    command = ["check", "--config", str(write_toml()), f"--policy.model_name_or_path={copied}"]
    main([*command, RECOMPUTE])
    assert line not in capsys.readouterr().out
    rename_class(copied)
    main([*command, RECOMPUTE])
    assert line in capsys.readouterr().out
    main([*command, "--policy.model_gradient_checkpointing=false"])
    assert line not in capsys.readouterr().out


def list_transformers() -> dict[str, Any]:
    """Every transformer that diffusers exports."""
    import diffusers
    from diffusers.models import transformers

    names = [name for name in dir(transformers) if name.endswith(("Model", "Transformer", "DiT")) or "DModel" in name]
    found = {name: getattr(transformers, name) for name in names}
    return {name: one for name, one in found.items() if isinstance(one, type) and issubclass(one, diffusers.ModelMixin)}


def test_the_source_says_of_every_transformer_what_its_class_says() -> None:
    classes = list_transformers()
    assert len(classes) > 40
    expected = {name: one._supports_gradient_checkpointing for name, one in classes.items()}
    assert {name: supports_recomputing(name) for name in classes} == expected
    assert set(expected.values()) == {True, False}
    assert supports_recomputing("OfMyOwnTransformer") is None
