"""Context parallelism: the tokens inside a denoiser are split over ranks that hold the same sample.

Each peer computes its own tokens. Where tokens see each other, they change places with attention heads
(DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509): every peer then has all tokens of its own heads. What the
denoiser returns is put together on every peer, so nobody outside notices. After a backward pass each peer has the part
of every gradient that its own tokens cause, and the sum over the peers is the gradient.

The `enable_parallelism` of diffusers needs an accelerator and parts of equal length (those of any length have no
gradient), ignores masks, and has no plan for most families.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.context_plans import PLANS, Cut, Plan, SelfAttention, find_problem

_LENGTHS: ContextVar[dict[str, int] | None] = ContextVar("lengths", default=None)
"""How many tokens each stream has over all peers, in the call of a denoiser that is under way."""


@dataclass(frozen=True)
class Peers:
    """The ranks over which tokens are split, in their order."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def shares(self, length: int) -> list[int]:
        """How many of ``length`` tokens each peer has: the first ones have one more where that does not divide."""
        return [length // self.size + (peer < length % self.size) for peer in range(self.size)]

    def own_place(self, length: int) -> tuple[int, int]:
        """(first token, number of tokens) of this rank's part."""
        shares = self.shares(length)
        return sum(shares[: self.rank]), shares[self.rank]

    def places(self, streams: Sequence[str]) -> list[tuple[int, int]]:
        """(first token, number of tokens) of each peer's part of each stream, peer by peer.

        Positions are those in a sequence of all tokens, stream after stream.
        """
        lengths = _current_lengths()
        starts = [sum(lengths[name] for name in streams[:i]) for i in range(len(streams))]
        shares = [self.shares(lengths[name]) for name in streams]
        return [
            (start + sum(share[:peer]), share[peer])
            for peer in range(self.size)
            for start, share in zip(starts, shares, strict=True)
        ]


def split_over_peers(denoiser: nn.Module, group: dist.ProcessGroup) -> None:
    """From now on calls of ``denoiser`` split their tokens over the ranks of ``group``, which all give equal inputs.

    To be called when adapters and packed weights are in their places; before or after sharding. Fewer tokens than ranks
    leave some without any, which works.

    Raises:
        UserError: the tokens of this class cannot be split, or its attention heads not over so many.
    """
    name = next((c.__name__ for c in type(denoiser).mro() if c.__name__ in PLANS), type(denoiser).__name__)
    peers = Peers(group)
    problem = find_problem(name, denoiser.config, peers.size)  # pyright: ignore[reportArgumentType]
    if problem is not None:
        raise UserError(problem)
    _apply(denoiser, PLANS[name], peers)


def _apply(denoiser: nn.Module, plan: Plan, peers: Peers) -> None:
    for pattern, attention in plan.attention.items():
        for module in find_modules(denoiser, pattern):
            _wrap(module, functools.partial(_attend, peers, attention))
    for pattern, cuts in plan.inputs.items():
        for module in find_modules(denoiser, pattern):
            _wrap(module, functools.partial(_cut_inputs, peers, cuts, inspect.signature(module.forward)))
    for pattern, cuts in plan.outputs.items():
        for module in find_modules(denoiser, pattern):
            _wrap(module, functools.partial(_cut_outputs, peers, cuts))
    for module in find_modules(denoiser, plan.gathered):
        _wrap(module, functools.partial(_gather_output, peers))
    _wrap(denoiser, functools.partial(_call_whole, peers))


def find_modules(root: nn.Module, pattern: str) -> list[nn.Module]:
    """The modules of a plan's name; those that a model leaves out (None) are none."""
    found: list[Any] = [root]
    for part in filter(None, pattern.split(".")):
        if part == "*":
            found = [child for module in found for child in module.children()]
        else:
            found = [getattr(module, part) for module in found if module is not None]
    return [module for module in found if module is not None]


def _wrap(module: nn.Module, around: Callable[..., Any]) -> None:
    """Put ``around(forward, *args, **kwargs)`` in the place of the module's forward: inside of all hooks."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    module.forward = forward


# ---- what happens at the places of a plan ----------------------------------------------------------------------------


def _call_whole(peers: Peers, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The denoiser itself: what it is given is on all peers, so the gradient of it is the sum of theirs."""

    def share(x: Tensor) -> Tensor:
        return _Shared.apply(x, peers) if x.requires_grad else x

    args, kwargs = tree_map_only(Tensor, share, (args, kwargs))
    with _counting({}):
        return forward(*args, **kwargs)


def _cut_inputs(
    peers: Peers,
    cuts: Mapping[str, Cut],
    signature: inspect.Signature,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = signature.bind(*args, **kwargs)
    for name, cut in cuts.items():
        if given.arguments.get(name) is not None:
            given.arguments[name] = _keep_own(given.arguments[name], cut, peers)
    return forward(*given.args, **given.kwargs)


def _cut_outputs(
    peers: Peers, cuts: Mapping[int, Cut], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    made = list(forward(*args, **kwargs))
    for index, cut in cuts.items():
        made[index] = _keep_own(made[index], cut, peers)
    return tuple(made)


def _gather_output(peers: Peers, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    return _Gather.apply(forward(*args, **kwargs), peers, _current_lengths()["image"])


def _keep_own(x: Any, cut: Cut, peers: Peers) -> Any:
    lengths = _current_lengths()
    if isinstance(x, int):
        start, own = peers.own_place(lengths[cut.stream])
        return min(max(x - start, 0), own)
    if cut.ndim is not None and x.ndim != cut.ndim:
        return x
    length = x.shape[cut.dim]
    known = lengths.setdefault(cut.stream, length)
    if length == 1 and known != 1:
        return x
    if length != known:
        raise RuntimeError(f"{length} tokens of the stream {cut.stream}, which has {known}")
    return x.narrow(cut.dim, *peers.own_place(length))


def _attend(peers: Peers, attention: SelfAttention, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Ulysses(peers, attention) as exchange:
        output = forward(*args, **kwargs)
    if exchange.calls != 1:
        raise UserError(
            "context parallelism replaces torch's scaled_dot_product_attention, and this attention called it "
            f"{exchange.calls} times instead of once; unset DIFFUSERS_ATTN_BACKEND if it is set"
        )
    return output


# ---- the lengths of the call under way -------------------------------------------------------------------------------


def _current_lengths() -> dict[str, int]:
    lengths = _LENGTHS.get()
    if lengths is None:
        raise RuntimeError("a part of a denoiser whose tokens are split was called outside of a call of the whole")
    return lengths


@contextlib.contextmanager
def _counting(lengths: dict[str, int]) -> Iterator[None]:
    before = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(before)


def keep_lengths(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, to be called again in the backward pass with as many tokens as now; itself if none are split."""
    lengths = _LENGTHS.get()
    if lengths is None:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _counting(lengths):
            return function(*args, **kwargs)

    return call


# ---- attention -------------------------------------------------------------------------------------------------------


class _Ulysses(TorchFunctionMode):
    """Inside the block `scaled_dot_product_attention` of own tokens ``[B, H, S', D]`` sees those of all peers."""

    def __init__(self, peers: Peers, attention: SelfAttention) -> None:
        super().__init__()
        self.calls = 0
        self._peers, self._own_mask = peers, attention.own_mask
        self._places = peers.places(attention.streams)
        each = len(attention.streams)
        counts = [count for _, count in self._places]
        self._lengths = [sum(counts[peer * each : (peer + 1) * each]) for peer in range(peers.size)]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kw: Any
    ):
        own = self._lengths[self._peers.rank]
        if not query.shape[2] == key.shape[2] == own:
            raise RuntimeError(f"attention of {query.shape[2]} to {key.shape[2]} tokens, of which {own} were split")
        heads = query.shape[1]
        query, key, value = (self._to_heads(_as_computed(x)) for x in (query, key, value))
        mask = self._join_mask(attn_mask)
        output = F.scaled_dot_product_attention(query, key, value, mask, *args, **kw)
        each = [heads // self._peers.size] * self._peers.size
        return _Exchange.apply(output, self._peers, 2, self._lengths, 1, each)

    def _to_heads(self, x: Tensor) -> Tensor:
        """Own tokens of all heads -> all tokens of own heads."""
        each = [x.shape[1] // self._peers.size] * self._peers.size
        return _Exchange.apply(x, self._peers, 1, each, 2, self._lengths)

    def _join_mask(self, mask: Tensor | None) -> Tensor | None:
        """The mask, the same for all heads, with the tokens in the order of the exchange: peer by peer."""
        if mask is None:
            return None
        if self._own_mask:
            return self._gather_mask(mask)
        for dim in (-1, -2):
            if mask.shape[dim] > 1:
                mask = torch.cat([mask.narrow(dim, *place) for place in self._places], dim)
        return mask

    def _gather_mask(self, mask: Tensor) -> Tensor:
        """A bool mask of own keys ``[B, 1, 1, S']`` -> of all."""
        shapes = [[*mask.shape[:-1], length] for length in self._lengths]
        return torch.cat(_trade([mask.to(torch.uint8)] * self._peers.size, shapes, self._peers), -1).bool()


def _as_computed(x: Tensor) -> Tensor:
    """In the dtype of autocast, which attention would cast to anyway."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


# ---- exchanges -------------------------------------------------------------------------------------------------------


def _trade(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], peers: Peers) -> list[Tensor]:
    """Give each peer its piece; what each gives to this rank has its shape of ``shapes``."""
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [piece.numel() for piece in pieces], group=peers.group)
    return [part.view(*shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]


def _exchange(x: Tensor, peers: Peers, cut_dim: int, cut: Sequence[int], join_dim: int, join: Sequence[int]) -> Tensor:
    """Cut one axis into a piece for each peer, and put what comes from them together along another one."""
    shape = list(x.shape)
    shape[cut_dim] = cut[peers.rank]
    shapes = [[*shape[:join_dim], length, *shape[join_dim + 1 :]] for length in join]
    return torch.cat(_trade(x.split(list(cut), cut_dim), shapes, peers), join_dim)


class _Exchange(torch.autograd.Function):
    """`_exchange`, whose gradient goes the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, peers: Peers, cut_dim: int, cut: list[int], join_dim: int, join: list[int]
    ) -> Tensor:
        ctx.back = peers, join_dim, join, cut_dim, cut
        return _exchange(x, *(peers, cut_dim, cut, join_dim, join))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, *ctx.back), None, None, None, None, None


class _Gather(torch.autograd.Function):
    """Own tokens ``[B, S', C]`` -> all. Every peer has the same loss, so the gradient is the own part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, length: int) -> Tensor:
        ctx.place = 1, *peers.own_place(length)
        shapes = [[len(x), share, *x.shape[2:]] for share in peers.shares(length)]
        return torch.cat(_trade([x] * peers.size, shapes, peers), 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.narrow(*ctx.place), None, None


class _Shared(torch.autograd.Function):
    """What all peers were given: the gradient is the sum of what the tokens of each cause."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.peers.group)
        return grad, None
