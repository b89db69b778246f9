"""One of four ranks that step with Prodigy on parts of weights, and on replicas of halves: how far they are from one
rank, and a continued run from an undisturbed one on another number of ranks.

`python -m tests.support.prodigy_on_ranks OUT.json FOLDER 0`; the first rank writes the numbers.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cosmos_rl.checkpoint.state import collect, restore
from cosmos_rl.distributed.sharding import gather_to_cpu
from cosmos_rl.optim.classes import Hyperparameters
from cosmos_rl.optim.optimizer import Optimizer
from cosmos_rl.optim.schedule import LrSchedule

SHAPES = {"even": (8, 6), "uneven": (5, 3), "zero": (6, 4), "vector": (7,), "one": (1,)}
"""Weights of which the ranks have equal parts, unequal ones and none."""
STEPS, STOP = 12, 5


class Run:
    """Weights and their optimiser, on this rank alone or spread over a mesh."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        generator = torch.Generator().manual_seed(1)
        values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        values["zero"].zero_()
        self.mesh = mesh
        self.params = {name: nn.Parameter(self.spread(value)) for name, value in values.items()}
        settings = Hyperparameters("Prodigy", (0.9, 0.99), 1e-8, 0.1, "foreach", {"d0": 1e-3})
        schedule = LrSchedule.build(20, 2, None, "none", 0.0, 0.0)
        self.optimizer = Optimizer(self.params, settings=settings, lr=1.0, schedule=schedule, max_grad_norm=0.0)

    def spread(self, value: Tensor) -> Tensor:
        if self.mesh is None:
            return value
        return distribute_tensor(value, self.mesh, [Replicate(), Shard(0)])

    def descend(self, steps: range) -> None:
        """Along gradients of whole weights, so that they are the same on all ranks."""
        for step in steps:
            for name, param in self.params.items():
                own = param.detach()
                whole = own.full_tensor() if isinstance(own, DTensor) else own
                wave = torch.cos(torch.arange(whole.numel()) + step / 3 + len(name)).view(whole.shape)
                param.grad = self.spread(whole - wave)
            self.optimizer.step(step)

    def save(self, folder: Path) -> None:
        dcp.save(collect(self.params, self.optimizer.torch_optimizer, {}), checkpoint_id=folder)

    def take(self, folder: Path, saved: "Run") -> None:
        restore(folder, self.params, self.optimizer.torch_optimizer, {})
        self.optimizer.restore_counters(saved.optimizer.counters())

    def state(self) -> dict[str, Tensor]:
        """Weights and moments, gathered, and the estimate of the rate with the sum that it comes from."""
        found = {
            name: gather_to_cpu(value, torch.float64, keep=True)
            for name, value in collect(self.params, self.optimizer.torch_optimizer, {}).items()
        }
        group = self.optimizer.torch_optimizer.param_groups[0]
        found |= {name: torch.tensor([group[name]], dtype=torch.float64) for name in ("d", "d_numerator")}
        return {name: value for name, value in found.items() if value is not None}

    def distance(self, other: "Run") -> float:
        """The largest difference, by the size of what it is in."""
        own, others = self.state(), other.state()
        assert own.keys() == others.keys()
        return max(float((own[key] - others[key]).abs().max() / own[key].abs().max().clamp(1e-12)) for key in own)


def measure(meshes: dict[str, DeviceMesh | None], folder: Path) -> dict[str, float]:
    """Name of a measure -> relative difference, or size."""
    runs = {name: Run(mesh) for name, mesh in meshes.items()}
    stopped = {name: Run(mesh) for name, mesh in meshes.items()}
    for name, run in runs.items():
        run.descend(range(STEPS))
        stopped[name].descend(range(STOP))
        stopped[name].save(folder / name)
    alone = runs["one rank"]
    found = {f"{name} from one rank": alone.distance(run) for name, run in runs.items()}
    for old in meshes:
        for new, mesh in meshes.items():
            again = Run(mesh)
            again.take(folder / old, stopped[old])
            again.descend(range(STOP, STEPS))
            found[f"{old} to {new}"] = runs[new].distance(again)
    start, end = Run(None).state(), alone.state()
    found["moved"] = max(float((end[f"model.{name}"] - start[f"model.{name}"]).abs().max()) for name in SHAPES)
    found["growth"] = float(end["d"]) / 1e-3
    return found


def main(out: str, folder: str, _: str) -> None:
    """Measure and write what was found."""
    dist.init_process_group("gloo")
    names = ("dp_replicate", "shards")
    meshes: dict[str, DeviceMesh | None] = {"one rank": None}
    meshes["four parts"] = init_device_mesh("cpu", (1, 4), mesh_dim_names=names)
    meshes["replicas of two parts"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    found = measure(meshes, Path(folder))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
