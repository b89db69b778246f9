"""Adapters of teachers in that of the policy: of a lower rank and for fewer layers they act as they are, others are
refused by `cosmos-rl check` as by the run."""

import json
import math
import re
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
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.load import load_config
from cosmos_rl.policy.model import lora
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from tests.model.test_lora import ATTENTION, build, velocity
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


def config_of(folder: Path, base: Path, teacher: Path, *options: str) -> Config:
    """A job with a teacher and adapters of rank 4 for the layers of `build`."""
    own = ["policy.lora.r=4", f"policy.lora.target_modules={json.dumps(ATTENTION)}", "train.train_policy.kl_beta=1.0"]
    return load_config(nft_toml(folder, base), [*own, f"{KEY}={teacher}", *options])


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
    config = config_of(tmp_path, tiny_sd3, place)
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


def test_the_advice_for_a_higher_rank_names_the_keys_that_set_it(tiny_sd3: Path, tmp_path: Path) -> None:
    place = save_folded(teacher_of(tiny_sd3, r=4, r_pattern={"1.attn.to_k": 9}), tmp_path)
    patterns = 'policy.lora.r_pattern={"0.attn.to_q"=2, "1.attn.to_v"=3}'
    config = config_of(tmp_path, tiny_sd3, place, "policy.lora.r=8", patterns)
    [line] = teacher_problems(config, read_pipeline(config.policy))
    advice = (
        'set policy.lora.r = 9 and policy.lora.r_pattern."0.attn.to_q" = 4 and policy.lora.r_pattern."1.attn.to_v" = 4,'
    )
    assert advice in line
    followed = build(tiny_sd3, r=9, r_pattern={"0.attn.to_q": 4, "1.attn.to_v": 4})
    followed.load_policy(str(place), KEY)
    torch.testing.assert_close(velocity(followed), velocity(teacher_of(tiny_sd3, r=4, r_pattern={"1.attn.to_k": 9})))


def only_text(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"text_encoder.{name}": value for name, value in tensors.items()}


def nothing(_: dict[str, Tensor]) -> dict[str, Tensor]:
    return {}


def zeros_elsewhere(_: dict[str, Tensor]) -> dict[str, Tensor]:
    layer = "transformer.transformer_blocks.0.attn.add_k_proj"
    return {f"{layer}.lora_A.weight": torch.ones(2, 64), f"{layer}.lora_B.weight": torch.zeros(64, 2)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            only_text,
            "; all it has is for the text encoders (text_encoder.transformer_blocks.0.attn.to_k.lora_A.weight, …)",
        ),
        (nothing, ""),
        (zeros_elsewhere, ""),
    ],
)
def test_a_teacher_without_a_layer_of_the_transformer_is_refused(
    tiny_sd3: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    problem: str,
) -> None:
    file, model = tmp_path / "teacher.safetensors", teacher_of(tiny_sd3)
    save_file(change(lora.adapter_state(model.transformer, "default")), file)
    text = f"{file} adapts no layer of the transformer{problem}; give the file or folder of an adapter that does"
    config = config_of(tmp_path, tiny_sd3, file)
    assert list(teacher_problems(config, read_pipeline(config.policy))) == [f'{KEY} = "{file}": {text}']
    with pytest.raises(UserError) as error:
        model.load_policy(str(file), KEY)
    assert str(error.value) == f"{KEY}: {text}"


@pytest.mark.parametrize("save", [save_folded, save_kohya])
@pytest.mark.parametrize("matrix", ["lora_A", "lora_B", "alpha"])
def test_a_broken_matrix_of_a_teacher_is_named(
    tiny_sd3: Path, tmp_path: Path, save: Callable[[SD3Model, Path], Path], matrix: str
) -> None:
    place, model = save(teacher_of(tiny_sd3), tmp_path), build(tiny_sd3)
    [file] = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    wanted = matrix if save is save_folded else {"lora_A": "lora_down", "lora_B": "lora_up"}.get(matrix, matrix)
    broken = next((name for name in tensors if wanted in name), "transformer_blocks.0.attn.to_k.alpha")
    tensors[broken] = torch.ones(3) if matrix == "alpha" else torch.tensor(1.0)
    save_file(tensors, file)
    config = config_of(tmp_path, tiny_sd3, place)
    assert list(teacher_problems(config, read_pipeline(config.policy))) == []  # as all names that only the run may know
    with pytest.raises(UserError, match=re.escape(f"{broken}: no layer of this model, or no part of a LoRA")):
        model.load_policy(str(place), KEY)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"r": 0}, "has r = 0, which is no positive number"),
        ({"r": "x"}, 'has r = "x", which is no positive number'),
        ({"r": None}, "has r = null, which is no positive number"),
        ({"lora_alpha": None}, "has lora_alpha = null, which is no positive number"),
        ({"lora_alpha": True}, "has lora_alpha = true, which is no positive number"),
        ({"lora_alpha": math.nan}, "has lora_alpha = NaN, which is no positive number"),
        ({"r": -4, "use_rslora": True}, "has r = -4, which is no positive number"),
        ({"rank_pattern": {"to_q": 0}}, 'has rank_pattern."to_q" = 0, which is no positive number'),
        ({"alpha_pattern": [3]}, "has alpha_pattern = [3], which is no table"),
    ],
)
def test_a_bad_table_of_a_teacher_is_named(
    tiny_sd3: Path, tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    place, model = save_plain(teacher_of(tiny_sd3), tmp_path), build(tiny_sd3)
    edit_table(place, lambda table: table | change)
    with pytest.raises(UserError) as error:
        model.load_policy(str(place), KEY)
    start = f"{KEY}: {place / 'adapter_model.safetensors'}: its adapter_config.json {problem}"
    assert str(error.value) == f"{start}; correct it there"


def test_a_table_without_the_rank_takes_that_of_the_matrices(tiny_sd3: Path, tmp_path: Path) -> None:
    teacher, policy = teacher_of(tiny_sd3, r=2, lora_alpha=6.0, r_pattern={"0.attn.to_q": 3}), build(tiny_sd3)
    place = save_plain(teacher, tmp_path)
    edit_table(place, lambda table: {name: table[name] for name in ("lora_alpha", "use_rslora")})
    policy.load_policy(str(place), KEY)
    torch.testing.assert_close(velocity(policy), velocity(teacher), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 4])
def test_a_table_with_a_rank_and_no_alpha_is_refused(tiny_sd3: Path, tmp_path: Path, rank: int) -> None:
    place, model = save_plain(teacher_of(tiny_sd3, r=rank), tmp_path), build(tiny_sd3)
    edit_table(place, lambda table: {"r": table["r"]})
    with pytest.raises(UserError, match="its adapter_config.json has no lora_alpha, so that the strength"):
        model.load_policy(str(place), KEY)


def edit_table(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
