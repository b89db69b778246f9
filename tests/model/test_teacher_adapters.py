"""Adapters of teachers in that of the policy: of a lower rank and for fewer layers they act as they are, others are
refused by `cosmos-rl check` as by the run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.teachers import teacher_problems
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.pipeline_files import read_pipeline
from cosmos_rl.policy.config.load import load_config
from cosmos_rl.policy.model import lora
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from tests.model.test_lora import build, velocity
from tests.support.nft_runs import nft_toml

KEY = "train.train_policy.teacher"


def teacher_of(base: Path, **options: Any) -> SD3Model:
    """A network with an adapter of random weights."""
    model = build(base, **options)
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.trainable_parameters().values():
            param.copy_(0.3 * torch.randn(param.shape, generator=draws))
    return model


def save_folded(model: SD3Model, folder: Path) -> Path:
    """As an export has it: the factor in the up matrices."""
    file, config = folder / "adapter_model.safetensors", model.transformer.peft_config["default"]
    save_file(
        {f"base_model.model.{k}": v.contiguous() for k, v in lora.fold_weights(model.transformer, "default")}, file
    )
    table = lora.fold_config(config)
    (folder / "adapter_config.json").write_text(json.dumps({name: table[name] for name in ("r", *_TABLE)}))
    return folder


_TABLE = ("lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")


def save_plain(model: SD3Model, folder: Path) -> Path:
    """As PEFT does: the factor in the table alone."""
    table = model.transformer.peft_config["default"].to_dict()
    save_file(lora.adapter_state(model.transformer, "default"), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({name: table[name] for name in ("r", *_TABLE)}))
    return folder


def save_kohya(model: SD3Model, folder: Path) -> Path:
    """With a number alpha for each layer."""
    factors, tensors = lora.scales(model.transformer, "default"), dict[str, Tensor]()
    for name, value in lora.adapter_state(model.transformer, "default").items():
        tensors["lora_unet_" + name.replace(".lora_A", ".lora_down").replace(".lora_B", ".lora_up")] = value
        if ".lora_A." in name:
            layer = name.removesuffix(".lora_A.weight")
            tensors[f"lora_unet_{layer}.alpha"] = torch.tensor(factors[layer] * value.shape[0])
    save_file(tensors, folder / "kohya.safetensors")
    return folder / "kohya.safetensors"


@pytest.mark.parametrize("save", [save_folded, save_plain, save_kohya])
@pytest.mark.parametrize(
    "options",
    [
        {"r": 2, "lora_alpha": 6.0, "target_modules": ("attn.to_q", "attn.to_v")},
        {
            "r": 2,
            "lora_alpha": 6.0,
            "use_rslora": True,
            "r_pattern": {"0.attn.to_q": 3},
            "alpha_pattern": {"to_k": 1.0},
        },
    ],
    ids=["fewer layers", "patterns"],
)
def test_a_teacher_of_a_lower_rank_acts_as_it_does_alone(
    tiny_sd3: Path, tmp_path: Path, save: Callable[[SD3Model, Path], Path], options: dict[str, Any]
) -> None:
    teacher = teacher_of(tiny_sd3, **options)
    policy = teacher_of(tiny_sd3, r=4, lora_alpha=8.0)
    before = velocity(policy)
    policy.load_policy(str(save(teacher, tmp_path)), KEY)
    expected = velocity(teacher)
    torch.testing.assert_close(velocity(policy), expected, rtol=1e-5, atol=1e-5)
    assert float((before - expected).abs().max()) > 1e-2


def test_what_is_trained_from_an_adapter_must_still_have_its_rank(tiny_sd3: Path, tmp_path: Path) -> None:
    place = save_folded(teacher_of(tiny_sd3, r=2), tmp_path)
    with pytest.raises(UserError, match=r"\(2, 64\) in the file, \(4, 64\) in the adapter"):
        build(tiny_sd3, r=4, lora_path=str(place))


def without_columns(folder: Path) -> None:
    """All but the first four columns of the up matrices are zero."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, value in tensors.items():
        if "lora_B" in name:
            value[:, 4:] = 0.0
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("options", "change", "problem"),
    [
        ({"r": 2}, None, None),
        ({"r": 8}, without_columns, None),
        (
            {"r": 8},
            None,
            "has the rank 8 in transformer_blocks.0.attn.to_k and 7 more layers, and the adapters of ",
        ),
        ({"target_modules": ("attn.to_q", "attn.add_k_proj")}, None, "adapts transformer_blocks.0.attn.add_k_proj"),
        ({"r_pattern": {"0.attn.to_q": 5}}, None, "has the rank 5 in transformer_blocks.0.attn.to_q, and"),
    ],
)
def test_check_refuses_the_teachers_that_the_run_would(
    tiny_sd3: Path,
    tmp_path: Path,
    options: dict[str, Any],
    change: Callable[[Path], None] | None,
    problem: str | None,
) -> None:
    place = save_folded(teacher_of(tiny_sd3, **options), tmp_path)
    if change is not None:
        change(place)
    own = ["policy.lora.r=4", 'policy.lora.target_modules=["attn.to_q","attn.to_k","attn.to_v","attn.to_out.0"]']
    config = load_config(nft_toml(tmp_path, tiny_sd3), [*own, f"{KEY}={place}", "train.train_policy.kl_beta=1.0"])
    lines, policy = list(teacher_problems(config, read_pipeline(config.policy))), build(tiny_sd3, r=4)
    if problem is None:
        assert lines == []
        policy.load_policy(str(place), KEY)
        return
    [line] = lines
    start = f'{KEY} = "{place}": {place / "adapter_model.safetensors"} {problem}'
    assert line[: len(start)] == start
    with pytest.raises(UserError, match="does not fit policy.lora"):
        policy.load_policy(str(place), KEY)


def test_a_teacher_that_cannot_be_held_is_named_by_check(
    tiny_sd3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = save_folded(teacher_of(tiny_sd3, r=8), tmp_path)
    options = ["--policy.lora.r=4", f"--{KEY}={place}", "--train.train_policy.kl_beta=1.0"]
    command = ["check", "--config", str(nft_toml(tmp_path, tiny_sd3)), *options]
    assert main(command) == 2
    assert "set policy.lora.r = 8, or give a teacher of a lower rank" in capsys.readouterr().err
    assert main([*command, "--policy.lora.r=8"]) == 0
