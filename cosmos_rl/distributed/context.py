"""Which device this process has, which rank it is, and the process group."""

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cosmos_rl.errors import UserError

_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class Context:
    """The place of this process in the job."""

    device: torch.device
    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0


def pick_device(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` -> the device of this local rank.

    Raises:
        UserError: CUDA is asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError('train.device = "cuda", but torch sees no CUDA device; use "auto" or "cpu"')
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def use_deterministic_kernels() -> None:
    """Ask torch for deterministic kernels; an operation that has none warns."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def process_group(device_name: str) -> Iterator[Context]:
    """Join the job's process group (or make one of size 1) for the length of the block."""
    device = pick_device(device_name)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # gloo on the CPU side carries async saves
    if dist.is_initialized():  # a caller's own group stays the caller's
        yield Context(device, dist.get_rank(), dist.get_world_size())
        return
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Context(device, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
