"""Where a process was when its memory ran out."""

import contextlib
from collections.abc import Iterator

import torch

from cosmos_rl.distributed.phase import enter_phase
from cosmos_rl.errors import OutOfMemory


@contextlib.contextmanager
def memory_phase(name: str) -> Iterator[None]:
    """Within the block an error that means no memory becomes ``OutOfMemory`` of this phase, or of an inner one."""
    try:
        with enter_phase(name):
            yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(name) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # the words of torch's allocator for CPUs
            raise
        raise OutOfMemory(name) from error
