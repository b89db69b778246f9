"""Sums with the same bits on any number of ranks: they follow one binary tree over the samples of a step.

Sample k of a step is the k-th leaf. The left branch of N samples holds the largest power of two below N, the right one
the rest: four are ``(g0 + g1) + (g2 + g3)``, seven are ``((g0 + g1) + (g2 + g3)) + ((g4 + g5) + g6)``. Rank r of W has
the samples r, r + W, r + 2 W, …, so that one sample of each rank, W a power of two, is a whole branch. It is added over
ranks first (`PairwiseReduceScatter`, `all_reduce_pairwise`), and then micro-batch after micro-batch (`PairwiseSum`).

A gradient's own bits are the same on any number of ranks where one sample is one forward pass and the modules are
wrapped alike: FSDP2 puts a node of autograd at the inputs of each block, which groups the gradients of an input that
several layers use. So a single rank is wrapped too.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class PairwiseSum:
    """A running sum of named tensors, added like the digits of a binary counter.

    It holds as many partial sums as the number of addends has binary digits 1: at most log2(N) + 1 copies. A name that
    an addend lacks counts as 0. Tensors over ranks are added part by part.
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, Mapping[str, Tensor]]] = []  # (addends in it, their sum), the largest first

    def add(self, addend: Mapping[str, Tensor]) -> None:
        """Take in the next addend, whose tensors become the sum's own."""
        count = 1
        while self._partial and self._partial[-1][0] == count:
            addend, count = _add(self._partial.pop()[1], addend), 2 * count
        self._partial.append((count, addend))

    def take(self) -> Mapping[str, Tensor]:
        """The sum of all, after which there are none."""
        total: Mapping[str, Tensor] = {}
        while self._partial:
            total = _add(self._partial.pop()[1], total)
        return total


class BlockwiseSum:
    """A running sum over blocks of addends: a tree over each block, and one over the blocks.

    In reinforcement learning a step has each sample at several levels, and block k is the k-th level of each sample.
    Where the ranks do not divide their number, zeros at the end of a block do not change its tree.
    """

    def __init__(self) -> None:
        self._block, self._blocks = PairwiseSum(), PairwiseSum()

    def add(self, addend: Mapping[str, Tensor]) -> None:
        """Take in the next addend of the block."""
        self._block.add(addend)

    def end_block(self) -> None:
        """The next addend is the first one of another block."""
        self._blocks.add(self._block.take())  # one without gradients counts: another rank may have zeros there

    def take(self) -> Mapping[str, Tensor]:
        """The sum of all, after which there are none."""
        self.end_block()
        return self._blocks.take()


@torch.no_grad()
def _add(earlier: Mapping[str, Tensor], later: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    shared = [name for name in earlier if name in later]
    if shared:
        torch._foreach_add_([_local(earlier[name]) for name in shared], [_local(later[name]) for name in shared])
    return {**later, **earlier}


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@torch.no_grad()
def add_rows(rows: Tensor) -> Tensor:
    """The sum ``[...]`` over the rows of ``[W, ...]`` along the tree, W a power of two; the memory of ``rows`` is used.

    Raises:
        ValueError: W is none.
    """
    if len(rows) & (len(rows) - 1):
        raise ValueError(f"{len(rows)} ranks make no block of a binary tree")
    while len(rows) > 1:
        rows[0::2].add_(rows[1::2])
        rows = rows[0::2]
    return rows[0]


def all_reduce_pairwise(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replace ``tensor`` by its sum over the ranks of ``group``, in their order."""
    gathered = tensor.new_empty(group.size() * tensor.numel())
    dist.all_gather_into_tensor(gathered, tensor.flatten(), group=group)
    tensor.copy_(add_rows(gathered.view(group.size(), -1)).view_as(tensor))


class PairwiseReduceScatter:
    """FSDP2's reduce-scatter as a sum over the ranks in their order; backends choose one of their own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for its tensors."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """``input_tensor [W n]``: a part ``[n]`` for each rank; ``output_tensor [n]``: the sum of this rank's parts."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(add_rows(received.view(group.size(), -1)))


def reduce_pairwise(module: FSDPModule, replicas: dist.ProcessGroup | None) -> None:
    """Have a sharded module add its gradients along the tree: the plain sum over its ranks, and over ``replicas``."""
    for part in module.modules():  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(part, FSDPModule):
            continue
        part.set_custom_reduce_scatter(PairwiseReduceScatter())  # pyright: ignore[reportArgumentType]
        part.set_gradient_divide_factor(1.0)  # a mean would lose the last bits of the smallest numbers
        part.set_force_sum_reduction_for_comms(True)
        if replicas is not None:
            part.set_all_reduce_hook(lambda summed, group=replicas: all_reduce_pairwise(summed, group))
