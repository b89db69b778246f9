"""LoRA over a frozen base in 8 or 4 bits."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cosmos_rl.checkpoint.layout import policy_dir
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.check import estimate
from cosmos_rl.policy.config import dump_toml, load_config
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.quantised import is_packed, pack, restore
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model
from cosmos_rl.policy.trainer.offline import export_checkpoint
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.checks import sizes
from tests.support.exports import noise_for, snippet
from tests.support.family_runs import PARAMS, Clips, TrainedFamily, family_toml
from tests.support.nft_runs import Job, run_forked
from tests.support.trainer_runs import train

pytest.importorskip("torchao")
NF4, INT8 = "--policy.lora.quantize_base=nf4", "--policy.lora.quantize_base=int8"
Toml = Callable[..., Path]


def load(path: Path, *options: str) -> Any:
    return build_model(load_config(path, list(options)), Context(torch.device("cpu")), rest_on_cpu=False)


def list_tensors(weight: Tensor) -> list[Tensor]:
    """What a weight consists of."""
    inner = [value for value in vars(weight).values() if isinstance(value, Tensor)]
    return inner or [weight]


@pytest.mark.parametrize("form", [NF4, INT8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_frozen_weights_take_the_bytes_that_the_estimate_says(write_toml: Toml, form: str, dtype: str) -> None:
    options = [form, f"--train.param_dtype={dtype}"]
    model = load(write_toml(), *options)
    frozen = [p for name, p in model.transformer.named_parameters() if ".lora_" not in name]
    held = sum(t.numel() * t.element_size() for p in frozen for t in list_tensors(p))
    config, files = sizes(write_toml(), *options)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    buffers = size * (files.selection.frozen - sum(p.numel() for p in frozen))  # the table of positions
    expected = estimate.memory(config, files, on_cpu=True, saves=1).parts["frozen transformer weights"]
    assert expected == held + buffers
    assert expected < size * files.selection.frozen / (2 if form == NF4 else 1.5)


@pytest.mark.parametrize(
    ("form", "of_a_weight", "of_a_velocity"),
    [(NF4, 0.12, 0.15), (INT8, 0.01, 0.01)],  # of a normal distribution: 0.09, and 0.006 in rows of 64
)
def test_weights_and_velocities_are_close_to_those_of_the_base(
    write_toml: Toml, form: str, of_a_weight: float, of_a_velocity: float
) -> None:
    plain, packed = load(write_toml()), load(write_toml(), form)
    theirs = dict(plain.transformer.named_parameters())
    changed = 0
    for name, weight in packed.transformer.named_parameters():
        right = theirs[name].detach()
        apart = float((restore(weight).detach() - right).norm())
        assert apart <= of_a_weight * float(right.norm())
        changed += apart > 0
    assert changed == sum(len(list_tensors(p)) > 1 for p in packed.transformer.parameters()) > 0
    cond, level = plain.encode_prompts(["a cat"]), Level(torch.tensor([500.0]), torch.tensor([0.5]))
    noise = noise_for(plain)
    with torch.no_grad():
        right, found = plain.velocity(noise, level, cond), packed.velocity(noise, level, cond)
    apart = float((found - right).norm() / right.norm())
    assert 0.0 < apart < of_a_velocity


def result(run: Path) -> dict[str, Tensor]:
    return load_file(run / "safetensors" / "step_4" / "lora" / "model.safetensors")


@pytest.mark.zoo
@pytest.mark.parametrize("form", [NF4, INT8])
def test_a_run_trains_resumes_exactly_and_its_adapter_is_one_of_the_base(
    write_toml: Toml, tiny_sd3: Path, form: str
) -> None:
    options = (form, "--train.max_num_steps=4", "--train.optm_lr=1e-2", "--train.ckpt.save_freq=2")
    whole = train(write_toml(), *options)
    expected = result(whole)
    assert any(float(value.abs().max()) > 0 for name, value in expected.items() if "lora_B" in name)
    again = result(train(write_toml(), *options, resume=(whole, 2)))
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    noise = noise_for(load(write_toml()))
    with_adapter = snippet(str(tiny_sd3), whole / "safetensors" / "step_4" / "lora", noise)
    assert not torch.equal(with_adapter, snippet(str(tiny_sd3), None, noise))
    (whole / "config.toml").write_text(dump_toml(load_config(write_toml(), list(options))))
    export_checkpoint(policy_dir(whole / "checkpoints", 4), whole / "merged", file_format="merged")
    merged = snippet(str(whole / "merged"), None, noise)  # the adapter on the published weights, not on the packed ones
    assert float((merged - with_adapter).abs().max()) <= 1e-4


def test_reinforcement_learning_starts_from_the_policy_that_made_the_samples(write_nft_toml: Toml) -> None:
    run = train(write_nft_toml(), NF4)
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "train/loss_mean" in line]
    assert len(lines) == 2
    assert lines[0]["train/kl_loss_mean"] == 0.0
    assert lines[1]["train/kl_loss_mean"] > 0.0


def in_8_bits(weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a weight, in float64."""
    numbers = weight.double().numpy()
    scales = np.abs(numbers).max(axis=1, keepdims=True) / 127.5
    return np.clip(np.rint(numbers / scales), -128, 127), scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bits_are_codes_of_rows_and_at_most_half_a_step_away(dtype: torch.dtype) -> None:
    weight = torch.randn(96, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] *= 100.0  # a row of large weights leaves the others alone
    packed = pack(weight, "int8")
    codes, scales = in_8_bits(weight)
    np.testing.assert_allclose(packed.scale.numpy(), scales, rtol=1e-6)
    apart = np.abs(packed.qdata.double().numpy() - codes)
    assert apart.max() <= 1
    assert apart.mean() < 1e-2  # midway between two codes, as the largest of a row: either
    error = np.abs(restore(packed).double().numpy() - weight.double().numpy())
    rounding = torch.finfo(dtype).eps * np.abs(weight.double().numpy())
    assert (error <= scales * 0.501 + rounding).all()


def test_the_product_in_8_bits_and_its_gradients_are_those_of_the_unpacked_weight() -> None:
    draw = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(48, 64, generator=draw), torch.randn(48, generator=draw)
    x, up = torch.randn(5, 7, 64, generator=draw), torch.randn(5, 7, 48, generator=draw)
    linear = torch.nn.Linear(64, 48).requires_grad_(False)
    packed = pack(weight, "int8")
    linear.weight, linear.bias = (torch.nn.Parameter(v, requires_grad=False) for v in (packed, bias))
    kept: list[Tensor] = []
    ours = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = linear(ours)
    assert [is_packed(tensor) for tensor in kept] == [True]  # no copy in full size waits for the backward pass
    out.backward(up)
    codes, scales = packed.qdata.double().numpy(), packed.scale.double().numpy()
    expected = x.double().numpy() @ (codes * scales).T + bias.double().numpy()
    np.testing.assert_allclose(out.detach().numpy(), expected, rtol=1e-5, atol=1e-4)
    assert ours.grad is not None
    np.testing.assert_allclose(ours.grad.numpy(), up.double().numpy() @ (codes * scales), rtol=1e-5, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16


def test_adapters_over_8_bits_get_the_gradients_of_the_unpacked_base(write_toml: Toml) -> None:
    plain, packed = load(write_toml()), load(write_toml(), INT8)
    weights = {name: restore(weight) for name, weight in packed.transformer.named_parameters()}
    with torch.no_grad():
        for name, weight in plain.transformer.named_parameters():
            weight.copy_(weights[name])
    gradients = []
    for model in (plain, packed):
        cond, level = model.encode_prompts(["a cat"]), Level(torch.tensor([500.0]), torch.tensor([0.5]))
        model.velocity(noise_for(model), level, cond).square().sum().backward()
        gradients.append({name: weight.grad for name, weight in model.trainable_parameters().items()})
    assert gradients[0]
    for name, right in gradients[0].items():
        assert right is not None
        torch.testing.assert_close(gradients[1][name], right, rtol=1e-4, atol=1e-6 * float(right.abs().max()))


def test_a_missing_package_is_named(write_toml: Toml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UserError, match="needs torchao 0.18 or newer"):
        load(write_toml(), NF4)


@pytest.mark.zoo
@pytest.mark.process
@pytest.mark.parametrize("form", [NF4, INT8])
def test_two_ranks_hold_the_whole_packed_base_and_have_the_numbers_of_one(
    write_nft_toml: Toml, tmp_path: Path, form: str
) -> None:
    options = (form, "--train.max_num_steps=3", "--train.optm_lr=1e-3")
    for ranks in (1, 2):
        run_forked([Job(write_nft_toml(), tmp_path / f"{ranks}", options)], ranks, tmp_path)
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("1", "2"))
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        for key in ("train/loss_mean", "optim/grad_norm", "reward/mean"):
            assert a[key] == pytest.approx(b[key], rel=2e-4), key  # the plain base is further away


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["flux", "wan2.2", "sana"])
def test_driven_pipelines_train_on_a_packed_base(name: str, tmp_path: Path, image_folder: Path) -> None:
    [family] = [found for param in PARAMS for found in param.values if param.id == name]
    assert isinstance(family, TrainedFamily)
    data: dict[str, Any] = {} if family.frames is None else {"dataset": Clips(family.frames[1])}
    run = train(family_toml(tmp_path, family, job="sft", images=image_folder), NF4, **data)
    losses = [line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl") if "train/loss_mean" in line]
    assert len(losses) == 3
    weights = load_file(run / "safetensors" / "step_3" / "lora" / "model.safetensors")
    assert any(float(value.abs().max()) > 0 for key, value in weights.items() if "lora_B" in key)
