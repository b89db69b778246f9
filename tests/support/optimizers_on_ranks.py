"""One of two ranks that train a small module, stop and continue: what the optimisers of `SHARDED` make of it where each
rank has a part of the weights, and those of `REPLICATED` where each has all of them.

`python -m tests.support.optimizers_on_ranks OUT.json FOLDER 0`; the first rank writes the numbers.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cosmos_rl.checkpoint.state import collect, restore
from cosmos_rl.distributed.sharding import gather_to_cpu
from cosmos_rl.optim.classes import Hyperparameters
from cosmos_rl.optim.optimizer import Optimizer
from cosmos_rl.optim.schedule import LrSchedule

SHARDED = ("AdamW", "Muon", "AdamWScheduleFree", "Adafactor", "Prodigy")
REPLICATED = ("AdamW", "Adafactor", "Prodigy", "torch.optim.NAdam", "AdamWScheduleFree", "Muon")


def build(name: str, mesh: DeviceMesh | None) -> tuple[nn.Module, Optimizer]:
    """Layers of uneven sizes, so that the ranks have unequal parts."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3), nn.LayerNorm(3))
    if mesh is not None:
        fully_shard(module, mesh=mesh)
    settings = Hyperparameters(name, (0.9, 0.99), 1e-8, 0.1, "foreach", {})
    schedule = LrSchedule.build(20, 2, None, "none", 0.0, 0.0)
    params, rate = dict(module.named_parameters()), 1.0 if name == "Prodigy" else 0.01
    return module, Optimizer(params, settings=settings, lr=rate, schedule=schedule, max_grad_norm=1.0)


def descend(module: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Each rank has a half of the samples, and the gradient is their mean; one rank has all."""
    rank = dist.get_rank() if isinstance(next(module.parameters()), DTensor) else None
    for step in steps:
        samples = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        if rank is not None:
            samples = samples[4 * rank : 4 * rank + 4]
        module(samples).square().sum(1).mean().mul(8.0).backward()
        optimizer.step(step)


def whole(module: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Trained weights, and those to use, gathered."""
    params = dict(module.named_parameters())
    copies = {"use": optimizer.averages_of(params)}
    found = {name: gather_to_cpu(value, None, keep=True) for name, value in collect(params, None, copies).items()}
    return {name: value for name, value in found.items() if value is not None}


def measure(name: str, mesh: DeviceMesh, folder: Path) -> dict[str, float]:
    """How far two ranks are from one, and a continued run from an undisturbed one."""
    alone, plain = build(name, None)
    start = whole(alone, plain)
    calm, undisturbed = build(name, mesh)
    stopped, first = build(name, mesh)
    resumed, second = build(name, mesh)
    descend(alone, plain, range(8))
    descend(calm, undisturbed, range(8))
    descend(stopped, first, range(5))
    dcp.save(collect(dict(stopped.named_parameters()), first.torch_optimizer, {}), checkpoint_id=folder)
    restore(folder, dict(resumed.named_parameters()), second.torch_optimizer, {})
    second.restore_counters(first.counters())
    descend(resumed, second, range(5, 8))
    apart, third = build(name, None)
    restore(folder, dict(apart.named_parameters()), third.torch_optimizer, {})
    third.restore_counters(first.counters())
    descend(apart, third, range(5, 8))
    spread, fourth = build(name, mesh)
    half, fifth = build(name, None)
    descend(half, fifth, range(5))
    dcp.save(collect(dict(half.named_parameters()), fifth.torch_optimizer, {}), checkpoint_id=folder / "of_one")
    restore(folder / "of_one", dict(spread.named_parameters()), fourth.torch_optimizer, {})
    fourth.restore_counters(fifth.counters())
    descend(spread, fourth, range(5, 8))
    other_ranks = [whole(apart, third), whole(spread, fourth)]
    expected, found, again = whole(alone, plain), whole(calm, undisturbed), whole(resumed, second)
    return {
        "from one rank": max(float((expected[key] - found[key]).abs().max()) for key in expected),
        "moved": max(float((expected[key] - value).abs().max()) for key, value in start.items()),
        "resumed on another number": max(
            float((expected[key] - one[key]).abs().max()) for one in other_ranks for key in expected
        ),
        "from undisturbed": max(float((found[key] - again[key]).abs().max()) for key in found),
        "kinds": len({key.partition(".")[0] for key in found}),
    }


def main(out: str, folder: str, _: str) -> None:
    """Measure all and write what was found."""
    dist.init_process_group("gloo")
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "shards"))
    found = {
        "sharded": {name: measure(name, one, Path(folder) / "sharded" / name) for name in SHARDED},
        "replicated": {name: measure(name, two, Path(folder) / "replicated" / name) for name in REPLICATED},
    }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
