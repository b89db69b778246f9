"""Sharded modules: FSDP2 over the data-parallel ranks, weights read shard by shard, whole tensors gathered."""

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from cosmos_rl.distributed.pairwise import reduce_pairwise
from cosmos_rl.distributed.precision import list_float32_units
from cosmos_rl.errors import UserError
from cosmos_rl.storage.weight_files import open_weights, read_table


@dataclass(frozen=True)
class Sharding:
    """How a module is spread over ranks."""

    mesh: DeviceMesh
    """(dp_replicate, shards)."""
    reduce_dtype: torch.dtype = torch.float32
    """Dtype in which gradients are reduced."""
    reshard: str = "default"
    """When gathered weights are freed after a forward pass: ``always``, ``never``, ``default`` (not in the root)."""
    cp_group: dist.ProcessGroup | None = None
    """Context-parallel peers, over which tokens are split; None: they are not."""
    pairwise: bool = False
    """Gradients are summed over the ranks along the tree of `distributed.pairwise`, and not averaged."""

    def apply(
        self,
        module: nn.Module,
        param_dtype: torch.dtype,
        *,
        keep_root: bool = True,
        whole: Collection[Any] = (),
    ) -> None:
        """Shard ``module`` in place but for the weights ``whole``; its gathered weights have ``param_dtype``.

        ``keep_root``: what is not in a block stays gathered after a forward pass, where ``reshard`` leaves it open.
        """
        reshard = self.reshard
        if reshard == "default" and not keep_root:
            reshard = "always"
        dtypes = {"param_dtype": param_dtype, "reduce_dtype": self.reduce_dtype}
        shard_module(module, self.mesh, **dtypes, reshard=reshard, whole=whole, pairwise=self.pairwise)

    def any_over_ranks(self, flags: Sequence[bool]) -> list[bool]:
        """Each flag: whether any rank has it set. All ranks must call it."""
        counts = torch.tensor(flags, dtype=torch.int64)  # on the CPU: gloo carries it whatever the device
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        return [bool(count) for count in counts.tolist()]


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard: str = "default",
    whole: Collection[Any] = (),
    pairwise: bool = False,
) -> None:
    """FSDP2 in place: every block of a class in ``_no_split_modules``, then the rest. See ``Sharding``.

    Inputs are not cast (noise levels must stay float32); what needs the compute dtype is cast by autocast.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    assert mesh.mesh_dim_names is not None
    replicas = None
    if pairwise and mesh.size(0) > 1:
        replicas = mesh.get_group(0)
    if pairwise or mesh.size(0) == 1:  # the sum over replicas is ours, not FSDP's
        mesh = mesh[mesh.mesh_dim_names[1]]
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": set(whole)}
    names = set(getattr(module, "_no_split_modules", None) or ())
    blocks = [child for child in module.modules() if child is not module and type(child).__name__ in names]
    for part in list_float32_units(module):
        exact = replace(policy, param_dtype=torch.float32)
        fully_shard(part, **{**options, "mp_policy": exact}, reshard_after_forward=reshard != "never")
    for block in blocks:
        fully_shard(block, **options, reshard_after_forward=reshard != "never")
    sharded = fully_shard(module, **options, reshard_after_forward=reshard == "always")
    if pairwise:
        reduce_pairwise(sharded, replicas)


def materialise(module: nn.Module, device: torch.device, *, but: Collection[Tensor] = ()) -> None:
    """Give a sharded module whose parameters were built on the meta device their (still empty) memory, ``but`` some.

    Buffers that the module computes when it is built, and no weight file has, keep their values.
    """
    computed = dict(_buffers_outside_state(module))
    lost = [name for name, buffer in computed.items() if buffer.is_meta]
    if lost:
        raise UserError(
            f"{type(module).__name__} computes buffers when it is built ({', '.join(lost[:3])}), which sharded loading "
            "cannot restore; train this model with one rank"
        )
    left = {id(weight) for weight in but}
    module._apply(lambda value: value if id(value) in left else torch.empty_like(value, device=device))
    for name, buffer in module.named_buffers():
        if name in computed:
            buffer.copy_(computed[name])


def _buffers_outside_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    saved = module.state_dict().keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name not in saved]


def find_weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file of a diffusers model folder (one file, or shards with an index).

    Raises:
        UserError: the folder holds no safetensors weights, or a file of them or their index is not whole.
    """
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    if index.is_file():
        named = read_table(index).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise UserError(f"{index}: has no weight_map of names of files; copy, download or write it again")
        files = {name: folder / file for name, file in named.items()}
        for file in sorted(set(files.values())):
            with open_weights(file):  # the readers of several shards do not say which one is cut off
                pass
        return files
    single = folder / "diffusion_pytorch_model.safetensors"
    if not single.is_file():
        raise UserError(f"{folder}: no diffusion_pytorch_model.safetensors (or its index) there")
    with open_weights(single) as opened:
        return dict.fromkeys(opened.keys(), single)


def read_tensors(folder: Path, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Those of the tensors of a diffusers model folder that have one of ``names``, whole and one after another."""
    held: dict[Path, list[str]] = {}
    for name, file in find_weight_files(folder).items():
        if name in names:
            held.setdefault(file, []).append(name)
    for file, own in held.items():
        with open_weights(file) as opened:
            for name in own:
                yield name, opened.get_tensor(name)


def check_names(folder: Path, stored: set[str], wanted: set[str]) -> None:
    """Raise `UserError` unless the files hold exactly the tensors that the model has."""
    missing, foreign = sorted(wanted - stored), sorted(stored - wanted)
    if missing or foreign:
        lines = [f"  missing: {name}" for name in missing[:5]] + [f"  unexpected: {name}" for name in foreign[:5]]
        raise UserError(
            f"{folder}: {len(wanted) - len(missing)} of {len(wanted)} tensors can be loaded, {len(missing)} are "
            f"missing and {len(foreign)} are unexpected:\n" + "\n".join(lines)
        )


def load_shards(folder: Path, state: Mapping[str, Tensor], *, but: Collection[str] = ()) -> None:
    """Fill the tensors of ``state`` (sharded or not) from a diffusers model folder; each rank reads its own part only.

    ``but``: names that are left as they are.

    Raises:
        UserError: names differ.
    """
    files = find_weight_files(folder)
    check_names(folder, set(files), set(state))
    state = {name: value for name, value in state.items() if name not in but}
    with tempfile.TemporaryDirectory() as links:  # the reader takes all safetensors files of a folder, variants too
        for file in set(files.values()):
            os.symlink(file.resolve(), Path(links) / file.name)
        dcp.load(dict(state), storage_reader=HuggingFaceStorageReader(links))


def shard_like(param: Tensor, local: Tensor, shape: torch.Size) -> Tensor:
    """This rank's part ``local`` of a tensor of ``shape``, spread like ``param``; plain where that is plain."""
    if not isinstance(param, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    placed = param.device_mesh, param.placements
    return DTensor.from_local(local, *placed, run_check=False, shape=shape, stride=stride)


def local_part(value: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    if isinstance(value, DTensor):
        return value.to_local()
    return value


def copy_full(target: Tensor, full: Tensor) -> None:
    """Write a whole tensor that every rank holds into a sharded (or plain) one."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            placed = distribute_tensor(full.to(target.dtype), target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(placed)
        else:
            target.copy_(full)


def gather_to_cpu(value: Tensor, dtype: torch.dtype | None, *, keep: bool) -> Tensor | None:
    """The whole tensor as a CPU copy on the ranks with ``keep``; all ranks must call it in the same order."""
    whole = value.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    if not keep:
        return None
    if dtype is None or not whole.is_floating_point():
        dtype = whole.dtype
    return whole.to("cpu", dtype, copy=True)
