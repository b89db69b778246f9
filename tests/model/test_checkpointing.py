"""What gradient checkpointing keeps, on the device or in host memory."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl.distributed.context import Context
from cosmos_rl.launcher.check import estimate
from cosmos_rl.policy.config import ConfigError, load_config
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model
from tests.support.checks import sizes
from tests.support.exports import noise_for
from tests.support.family_runs import PARAMS, TrainedFamily, family_toml

RECOMPUTE, PLAIN = (f"--policy.model_gradient_checkpointing={value}" for value in ("true", "false"))
OFFLOAD = "--train.activation_offload=true"
Toml = Callable[..., Path]


def learn(config: Path, *options: str) -> tuple[dict[str, Tensor], int]:
    """Gradients of one loss, and how many inputs of blocks wait on the device for the backward pass."""
    model: Any = build_model(load_config(config, list(options)), Context(torch.device("cpu")), rest_on_cpu=False)
    inputs: list[weakref.ref[Tensor]] = []

    def remember(_block: Any, args: Any, kwargs: Any) -> None:
        inputs.append(weakref.ref(kwargs.get("hidden_states", args[0] if args else None)))

    blocks = [part for name, part in model.transformer.named_modules() if name.count(".") == 1 and "blocks." in name]
    hooks = [block.register_forward_pre_hook(remember, with_kwargs=True) for block in blocks]
    cond, level = model.encode_prompts(["a cat"]), Level(torch.tensor([500.0]), torch.tensor([0.5]))
    loss = model.velocity(noise_for(model), level, cond).square().sum()
    waiting = sum(made() is not None for made in inputs)
    for hook in hooks:
        hook.remove()
    loss.backward()
    assert len(inputs) == len(blocks) > 1
    gradients = {name: weight.grad for name, weight in model.trainable_parameters().items()}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}, waiting


@pytest.mark.parametrize("base", ["none", "int8"])
def test_inputs_of_blocks_leave_the_device_and_gradients_keep_their_bits(write_toml: Toml, base: str) -> None:
    form = f"--policy.lora.quantize_base={base}"
    plain, _ = learn(write_toml(), form, PLAIN)
    recomputed, here = learn(write_toml(), form, RECOMPUTE)
    offloaded, left = learn(write_toml(), form, RECOMPUTE, OFFLOAD)
    assert here > left == 0
    assert plain.keys() == recomputed.keys() == offloaded.keys()
    for name, right in recomputed.items():
        assert torch.equal(offloaded[name], right), name
        torch.testing.assert_close(right, plain[name], rtol=1e-4, atol=1e-6 * float(right.abs().max()))


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["wan", "cosmos-predict2.5", "hunyuan-video"])
def test_driven_pipelines_keep_their_gradients(name: str, tmp_path: Path) -> None:
    [family] = [found for param in PARAMS for found in param.values if param.id == name]
    assert isinstance(family, TrainedFamily)
    config = family_toml(tmp_path, family, job="nft")
    (recomputed, _), (offloaded, _) = learn(config, RECOMPUTE), learn(config, RECOMPUTE, OFFLOAD)
    assert recomputed
    assert all(torch.equal(offloaded[name], right) for name, right in recomputed.items())


def test_the_estimate_moves_what_is_kept_to_host_memory(write_toml: Toml) -> None:
    found = []
    for options in ((RECOMPUTE,), (RECOMPUTE, OFFLOAD)):
        config, files = sizes(write_toml(), *options)
        found.append(estimate.memory(config, files, on_cpu=False, saves=1))
    before, after = found
    phase = "forward and backward"
    layers = len({name.split(".")[1] for name in files.pipeline.transformer if name.startswith("transformer_blocks.")})
    moved = after.host - before.host
    assert before.phases[phase] - after.phases[phase] == pytest.approx(moved * (layers - 1) / layers, abs=2)
    assert moved > 0


def test_there_is_nothing_to_move_without_checkpointing(write_toml: Toml) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_toml(), [OFFLOAD, PLAIN])
    assert "train.activation_offload" in str(caught.value)
