"""LoRA over a frozen base in 4 bits."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cosmos_rl.checkpoint.layout import policy_dir
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.check import estimate
from cosmos_rl.policy.config import ConfigError, dump_toml, load_config
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.quantised import restore
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model
from cosmos_rl.policy.trainer.offline import export_checkpoint
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.checks import sizes
from tests.support.exports import noise_for, snippet
from tests.support.family_runs import PARAMS, Clips, TrainedFamily, family_toml
from tests.support.trainer_runs import train

pytest.importorskip("torchao")
NF4 = "--policy.lora.quantize_base=nf4"
Toml = Callable[..., Path]


def load(path: Path, *options: str) -> Any:
    return build_model(load_config(path, list(options)), Context(torch.device("cpu")), rest_on_cpu=False)


def list_tensors(weight: Tensor) -> list[Tensor]:
    """What a weight consists of."""
    inner = [value for value in vars(weight).values() if isinstance(value, Tensor)]
    return inner or [weight]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_frozen_weights_take_the_bytes_that_the_estimate_says(write_toml: Toml, dtype: str) -> None:
    options = [NF4, f"--train.param_dtype={dtype}"]
    model = load(write_toml(), *options)
    frozen = [p for name, p in model.transformer.named_parameters() if ".lora_" not in name]
    held = sum(t.numel() * t.element_size() for p in frozen for t in list_tensors(p))
    config, files = sizes(write_toml(), *options)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    buffers = size * (files.selection.frozen - sum(p.numel() for p in frozen))  # the table of positions
    expected = estimate.memory(config, files, on_cpu=True, saves=1).parts["frozen transformer weights"]
    assert expected == held + buffers
    assert expected < size * files.selection.frozen / 2


def test_weights_and_velocities_are_close_to_those_of_the_base(write_toml: Toml) -> None:
    plain, packed = load(write_toml()), load(write_toml(), NF4)
    theirs = dict(plain.transformer.named_parameters())
    changed = 0
    for name, weight in packed.transformer.named_parameters():
        right = theirs[name].detach()
        apart = float((restore(weight).detach() - right).norm())
        assert apart <= 0.12 * float(right.norm())  # of a normal distribution in NF4: 0.09
        changed += apart > 0
    assert changed == sum(len(list_tensors(p)) > 1 for p in packed.transformer.parameters()) > 0
    cond, level = plain.encode_prompts(["a cat"]), Level(torch.tensor([500.0]), torch.tensor([0.5]))
    noise = noise_for(plain)
    with torch.no_grad():
        right, found = plain.velocity(noise, level, cond), packed.velocity(noise, level, cond)
    apart = float((found - right).norm() / right.norm())
    assert 0.0 < apart < 0.15


def result(run: Path) -> dict[str, Tensor]:
    return load_file(run / "safetensors" / "step_4" / "lora" / "model.safetensors")


@pytest.mark.zoo
def test_a_run_trains_resumes_exactly_and_its_adapter_is_one_of_the_base(write_toml: Toml, tiny_sd3: Path) -> None:
    options = (NF4, "--train.max_num_steps=4", "--train.optm_lr=1e-2", "--train.ckpt.save_freq=2")
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


def test_a_missing_package_is_named(write_toml: Toml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UserError, match="needs torchao 0.18 or newer"):
        load(write_toml(), NF4)


def test_several_ranks_are_refused(write_toml: Toml) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_toml(), [NF4, "--policy.parallelism.dp_shard_size=2"])
    assert "policy.lora.quantize_base" in str(caught.value)
    assert "allowed: one rank" in str(caught.value)


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
