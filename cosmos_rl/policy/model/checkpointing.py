"""Blocks of a denoiser whose activations are computed again in the backward pass."""

from collections.abc import Iterable
from typing import Any

from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from cosmos_rl.policy.config.model_rules import recompute_remark
from cosmos_rl.policy.model.context_parallel import keep_lengths
from cosmos_rl.utils.logging import logger


def checkpoint_blocks(denoisers: Iterable[Any], *, offload: bool) -> None:
    """Keep nothing of a block until the backward pass but its inputs, with ``offload`` in host memory."""
    for denoiser in denoisers:
        if not getattr(denoiser, "_supports_gradient_checkpointing", False):
            logger.warning(recompute_remark(type(denoiser).__name__))
        elif offload:
            denoiser.enable_gradient_checkpointing(_checkpoint_in_host_memory)
        else:
            denoiser.enable_gradient_checkpointing(_checkpoint)


def _checkpoint(block: Any, *args: Any) -> Any:
    """As diffusers' own, and where tokens are split over ranks it remembers how many there are."""
    return checkpoint(keep_lengths(block.__call__), *args, use_reentrant=False)


def _checkpoint_in_host_memory(block: Any, *args: Any) -> Any:
    """The checkpoint's inputs go through the hooks around it, what is inside through its own."""
    with save_on_cpu(pin_memory=True):  # copies on a CPU too, so that there is one way
        return _checkpoint(block, *args)
