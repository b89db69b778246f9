"""Which device and which rank this process has, and the process group."""

import contextlib
import datetime
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cosmos_rl.distributed.exact_sum import expand_sum, round_sum
from cosmos_rl.errors import UserError

_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """The rank of this process in the job.

    Ranks of one data-parallel index are context-parallel peers: they share data and compute the same numbers of it. So
    sums and gathers run over one of them each, and count nothing twice; maxima and texts run over all ranks.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    mesh: DeviceMesh | None = None
    """(dp_replicate, shards); None for a single rank, which is not wrapped in FSDP."""
    cp_size: int = 1
    """Ranks that share the same data; neighbours."""
    dp_group: dist.ProcessGroup | None = None
    """One rank of each data-parallel index, in their order; None: all ranks."""
    cp_group: dist.ProcessGroup | None = None
    """The ranks of this rank's data-parallel index, in their order; None: it is the only one."""

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0

    @property
    def is_first_peer(self) -> bool:
        """True on one rank of each share of the data: that which asks for what its peers must not ask for again."""
        return self.rank % self.cp_size == 0

    @property
    def dp_rank(self) -> int:
        """Which share of each batch is this rank's."""
        return self.rank // self.cp_size

    @property
    def dp_size(self) -> int:
        """Into how many shares each batch is split."""
        return self.world_size // self.cp_size

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over all shares of the data, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM, self.dp_group)

    def sum_exactly(self, columns: Sequence[Sequence[float]]) -> list[float]:
        """The sum of each column over all its values on all shares of the data, rounded once: their order and how they
        lie on the ranks do not matter. The values are float32 numbers, or such times a whole number; ranks may have
        columns of different lengths."""
        own = torch.tensor([expand_sum(values) for values in columns], dtype=torch.float64)
        parts = self.gather_rows(own).view(-1, *own.shape)
        return [round_sum(terms.flatten().tolist()) for terms in parts.unbind(1)]

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Element-wise maxima over all ranks; NaN where any rank has it."""
        lost = [float(math.isnan(value)) for value in values]
        known = [-math.inf if math.isnan(value) else value for value in values]
        found = self._reduce([*known, *lost], dist.ReduceOp.MAX, None)  # the backends' own maximum loses some NaN
        tops = zip(found[: len(lost)], found[len(lost) :], strict=True)
        return [math.nan if is_lost else top for top, is_lost in tops]

    def _reduce(
        self, values: Sequence[float], operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
    ) -> list[float]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)  # on the CPU: gloo carries it whatever the device
        dist.all_reduce(tensor, op=operation, group=group)
        return tensor.tolist()

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of all shares of the data, share after share; every rank gives as many. The result is on the CPU."""
        if self.world_size == 1:
            return rows.cpu()
        parts = [torch.empty_like(rows, device="cpu") for _ in range(self.dp_size)]
        dist.all_gather(parts, rows.cpu().contiguous(), group=self.dp_group)
        return torch.cat(parts)

    def broadcast_from_main(self, text: str) -> str:
        """The main rank's `text`, on all ranks."""
        if self.world_size == 1:
            return text
        shared = [text]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]

    def share_with_peers(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on the first of the context-parallel peers, which alone calls it, on all of them."""
        if self.cp_group is None:
            return make()
        shared = [make() if self.is_first_peer else None]
        dist.broadcast_object_list(shared, group=self.cp_group, group_src=0)
        (value,) = shared
        assert value is not None
        return value

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()


def pick_device(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` -> the device of this local rank.

    Raises:
        UserError: CUDA is asked for and there is none.
    """
    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            name = "cuda"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError('train.device = "cuda", but torch sees no CUDA device; use "auto" or "cpu"')
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def use_deterministic_kernels() -> Iterator[None]:
    """Ask torch for deterministic kernels inside the block; an operation that has none warns."""
    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it, and reads it once: it stays
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def use_one_thread() -> Iterator[None]:
    """Compute with one thread inside the block: with more a CPU adds in another order, and the ranks of a machine share
    its cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def process_group(device_name: str, replicas: int = 1, cp_size: int = 1) -> Iterator[Context]:
    """Join the job's process group (or make one of size 1) for the length of the block.

    Args:
        device_name: ``auto``, ``cpu`` or ``cuda``.
        replicas: groups of ranks that each hold all weights; the ranks of a group share them (HSDP).
        cp_size: ranks that share the same data.
    """
    device = pick_device(device_name)
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"  # gloo on the CPU side carries async saves
    ours = not dist.is_initialized()
    if ours and os.environ.get("WORLD_SIZE", "1") != "1" and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
    elif ours:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield _context(device, replicas, cp_size)
    finally:
        if ours:  # a caller's own group stays the caller's
            dist.destroy_process_group()


def _context(device: torch.device, replicas: int, cp_size: int) -> Context:
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return Context(device)
    if world % (replicas * cp_size):
        raise UserError(
            f"{world} ranks cannot be split into policy.parallelism.dp_replicate_size = {replicas} equal groups of "
            f"whole context-parallel groups (cp_size = {cp_size})"
        )
    # weights are sharded over context-parallel peers as well
    mesh = init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("dp_replicate", "shards"))
    if cp_size == 1:
        return Context(device, rank, world, mesh)
    samples = init_device_mesh(device.type, (world // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
    return Context(device, rank, world, mesh, cp_size, samples.get_group("dp"), samples.get_group("cp"))
