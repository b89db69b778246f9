"""A driven pipeline as trainers use modules: adapters, gradient checkpointing, absent encoders, shards on two ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from cosmos_rl.launcher.ranks.worker_script import python_call
from cosmos_rl.policy.model import tiny
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.loading import load_pipeline
from cosmos_rl.policy.model.driver.probe import prove
from tests.support.driven import PROMPTS, STEPS, generators
from tests.support.paths import ROOT
from tests.support.ranks import free_port

SHARDED = ("sd3", "wan", "wan2.2")
CALL = {"max_sequence_length": 16}
GUIDANCE = 3.0


def driven(folder: Path) -> Driver:
    torch.set_num_threads(1)
    driver = Driver(load_pipeline(str(folder)), call=CALL)
    prove(driver)
    return driver


def states(driver: Driver, n: int) -> Tensor:
    return torch.randn(n, *driver.facts.state_shape, generator=torch.Generator().manual_seed(3))


def loss(driver: Driver, x: Tensor, level: Level, cond: Any) -> Tensor:
    """Of one plain velocity, and one of the same rows at another level that is alive when the first goes back."""
    other = driver.training_level(1 - level.sigma)
    return (
        driver.velocity(x, level, cond, GUIDANCE).square().sum()
        + 0.5 * driver.velocity(0.5 * x, other, cond, GUIDANCE).square().sum()
    )


def gradients(driver: Driver, rows: slice = slice(None)) -> dict[str, Tensor]:
    """Gradients of the loss of those of four rows, each at a level of its own."""
    cond = driver.encode([*PROMPTS, "a dog"], guidance=GUIDANCE)
    sigma = torch.tensor([0.2, 0.4, 0.7, 0.9])[rows]
    picked = cond.rows(torch.arange(4)[rows])
    loss(driver, states(driver, 4)[rows], driver.training_level(sigma), picked).backward()
    weights = torch.nn.ModuleDict(driver.denoisers).named_parameters()
    found = {name: w.grad for name, w in weights if w.grad is not None}
    return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)().clone() for name, grad in found.items()}


def test_encoders_may_be_gone_once_prompts_are_encoded(tiny_sd3: Path) -> None:
    driver = driven(tiny_sd3)
    cond = driver.encode(PROMPTS, guidance=GUIDANCE)
    whole = driver.rollout(cond, generators(3), STEPS, GUIDANCE)
    for name in [name for name in driver.pipeline.components if name.startswith(("text_encoder", "tokenizer"))]:
        driver.pipeline.__dict__[name] = None
    again = driver.rollout(cond, generators(3), STEPS, GUIDANCE)
    assert whole.media is not None
    assert again.media is not None
    assert torch.equal(whole.media, again.media)
    with torch.no_grad():
        driver.velocity(whole.states[1], whole.levels[1], cond, GUIDANCE)
    driver.encode_media(torch.zeros(1, 3, 32, 32))
    driver.levels(STEPS)


def test_an_adapter_is_driven_trained_and_switched_off(tiny_sd3: Path) -> None:
    driver = driven(tiny_sd3)
    cond, x = driver.encode(PROMPTS, guidance=GUIDANCE), states(driver, 3)
    level = driver.training_level(torch.tensor([0.2, 0.5, 0.8]))
    with torch.no_grad():
        plain = driver.velocity(x, level, cond, GUIDANCE)
    transformer = driver.pipeline.transformer
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_v"], init_lora_weights=False))
    moved = driver.velocity(x, level, cond, GUIDANCE)
    moved.square().sum().backward()
    assert float((moved - plain).abs().max()) > 1e-3
    trained = {name: w for name, w in transformer.named_parameters() if w.requires_grad}
    assert trained
    assert all("lora_" in name and w.grad is not None and w.grad.any() for name, w in trained.items())
    transformer.disable_adapters()
    with torch.no_grad():
        assert torch.equal(driver.velocity(x, level, cond, GUIDANCE), plain)


@pytest.mark.parametrize("family", ["sd3", "wan"])
def test_gradient_checkpointing_changes_no_bit(family: str, tmp_path: Path) -> None:
    driver = driven(tiny.build(family, tmp_path / family, "unit", 0))
    transformer = driver.pipeline.transformer.train()
    plain = gradients(driver)
    transformer.zero_grad(set_to_none=True)
    transformer.enable_gradient_checkpointing()
    again = gradients(driver)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.process
def test_two_ranks_with_shards_have_the_gradients_of_one(tmp_path: Path) -> None:
    """Rows of different levels with guidance, after a rollout: families with guidance in one batch and in two calls,
    and one with two experts, of which only one rank has rows for the first."""
    for family in SHARDED:
        tiny.build(family, tmp_path / family, "unit", 0)
    port, ranks = free_port(), []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(value) for name, value in place.items()}}
        command = python_call(["-m", "tests.model.test_driver_training", str(tmp_path)])
        with (tmp_path / f"{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], "\n".join((tmp_path / f"{rank}.log").read_text()[-3000:] for rank in range(2))


def compare_as_rank(folder: Path) -> None:
    """Body of a rank: its half of four rows sharded, against all rows unsharded."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from cosmos_rl.distributed.sharding import Sharding
    from cosmos_rl.policy.model.policies import free_gathered

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    sharding = Sharding(mesh)
    for family in SHARDED:
        driver = driven(folder / family)
        whole = gradients(driver)
        alone = driver.rollout(driver.encode(PROMPTS), generators(3), STEPS, decode=False)
        for module in driver.denoisers.values():
            module.zero_grad(set_to_none=True)
            sharding.apply(module, torch.float32)
        if len(driver.denoisers) > 1:
            driver.any_over_ranks = sharding.any_over_ranks
        loop = driver.rollout(driver.encode(PROMPTS), generators(3), STEPS, decode=False)
        assert torch.equal(loop.states[-1], alone.states[-1])
        for _ in range(2):
            for module in driver.denoisers.values():
                free_gathered(module)  # else the root's weights stay gathered over the next step
                module.zero_grad(set_to_none=True)
            sharded = gradients(driver, slice(2 * rank, 2 * rank + 2))
            assert sharded.keys() == whole.keys()
            largest = max(float(grad.abs().max()) for grad in whole.values())
            worst = max(float((2 * sharded[name] - whole[name]).abs().max()) for name in whole)  # averaged over ranks
            assert worst <= 1e-5 * largest, (family, worst, largest)
    dist.destroy_process_group()


if __name__ == "__main__":
    compare_as_rank(Path(sys.argv[1]))
