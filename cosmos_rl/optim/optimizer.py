"""One optimiser step: clip, refuse what is not finite, follow the schedule. Learning rates may differ by name."""

import contextlib
import enum
import inspect
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_rl.distributed.sharding import local_part
from cosmos_rl.errors import UserError
from cosmos_rl.optim.classes import Hyperparameters, build_arguments, find_class
from cosmos_rl.optim.loss_scale import LossScale
from cosmos_rl.optim.parts import on_flat_parts, on_whole_parts
from cosmos_rl.optim.schedule import LrSchedule
from cosmos_rl.policy.config.optimizers import find_kind
from cosmos_rl.utils.logging import logger


class Refusal(enum.Enum):
    """Why a step was not applied."""

    NOT_FINITE = enum.auto()
    """Loss or gradient is not finite."""
    OVERFLOW = enum.auto()
    """The gradient is not finite, and the loss scale was lowered: this happens now and then to a healthy run."""
    ZERO = enum.auto()
    """All gradients are 0 where they cannot be: they are too small for the type that they went through."""
    NOT_WANTED = enum.auto()
    """Only the gradient was asked for."""


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step did."""

    grad_norm: float
    learning_rate: float
    refusal: Refusal | None = None
    """None: it was applied. Else the weights and the moments are untouched."""

    @property
    def applied(self) -> bool:
        """Whether the weights moved."""
        return self.refusal is None


def most_serious_refusal(results: Sequence[StepResult]) -> Refusal | None:
    """The most serious refusal of several steps."""
    found = {result.refusal for result in results}
    return next((kind for kind in (Refusal.NOT_FINITE, Refusal.ZERO, Refusal.OVERFLOW) if kind in found), None)


class Optimizer:
    """Any class of optimisers over named parameters, with a schedule that is a function of the step."""

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        *,
        settings: Hyperparameters,
        lr: float,
        schedule: LrSchedule,
        max_grad_norm: float,
        lr_patterns: Mapping[str, float] | None = None,
        loss_scale: LossScale | None = None,
        rank_invariant: bool = False,
    ) -> None:
        """``lr_patterns``: regular expression over parameter names -> base learning rate in place of ``lr``; the first
        match counts. The schedule's factor is the same for all. ``loss_scale``: None for gradients of a type that holds
        small numbers. ``rank_invariant``: the norm has the same bits however the gradients are split over ranks.

        Raises:
            UserError: a pattern that matches nothing, a package that is missing, arguments that the class refuses.
        """
        self.loss_scale = loss_scale
        self._params = list(params.values())
        self._lr = lr
        self.lr_factor = 1.0
        """Factor on all learning rates, on top of the schedule's."""
        self._schedule = schedule
        self._max_grad_norm, self._rank_invariant = max_grad_norm, rank_invariant
        cls = find_class(settings.name)
        arguments, self._arguments = build_arguments(cls, settings), frozenset(inspect.signature(cls).parameters)
        groups = _groups(params, lr, lr_patterns or {})
        try:
            with contextlib.redirect_stdout(printed := io.StringIO()):  # prodigyopt prints how it decays weights
                self.torch_optimizer: torch.optim.Optimizer = cls(groups, lr=lr, **arguments)
        except (TypeError, ValueError) as error:
            raise UserError(f'train.optm_kwargs: train.optm_name = "{settings.name}" refuses them: {error}') from error
        if printed.getvalue():
            logger.debug(f"{settings.name}: {printed.getvalue().strip()}")
        self._parts = self._choose_parts(settings)
        self._bases = [float(group["lr"]) for group in self.torch_optimizer.param_groups]
        self.averages = callable(getattr(self.torch_optimizer, "eval", None))
        """Whether the weights to use are an average of those that are trained (schedule-free)."""
        if self.averages:
            self._switch("train")
        self._fresh = self._all_counters()

    def learning_rate(self, step: int) -> float:
        """The learning rate of 0-based optimiser step ``step``."""
        return self._lr * self._schedule.factor(step) * self.lr_factor

    @property
    def loss_factor(self) -> float:
        """What every loss must be multiplied with before its backward pass; ``step`` divides by it again."""
        if self.loss_scale is None:
            return 1.0
        return self.loss_scale.value

    def forget_moments(self) -> None:
        """As before the first step, from the weights to use; the learning rate goes by the schedule as before."""
        if self.averages:
            self._switch("eval")
        self.torch_optimizer.state.clear()
        self.restore_counters([{} for _ in self._fresh])

    def counters(self) -> list[dict[str, float]]:
        """What the class counts and estimates for each of its groups, where it changed since the start (JSON-ready)."""
        pairs = zip(self._all_counters(), self._fresh, strict=True)
        return [{name: value for name, value in now.items() if value != fresh.get(name)} for now, fresh in pairs]

    def restore_counters(self, groups: Sequence[Mapping[str, float]]) -> None:
        """Take over the counters of a checkpoint."""
        for group, fresh, values in zip(self.torch_optimizer.param_groups, self._fresh, groups, strict=True):
            group.update({**fresh, **values})

    def _all_counters(self) -> list[dict[str, float]]:
        own = self._arguments | {"params", "lr"}
        return [
            {name: _to_number(value) for name, value in group.items() if name not in own and _is_number(value)}
            for group in self.torch_optimizer.param_groups
        ]

    @contextlib.contextmanager
    def average_parameters(self) -> Iterator[None]:
        """The parameters hold the weights to use inside the block and the trained ones, bit for bit, after it."""
        if not self.averages:
            yield
            return
        live = [param.detach().clone() for param in self._params]
        self._switch("eval")
        try:
            yield
        finally:
            self._switch("train")
            with torch.no_grad():  # the way back by arithmetic is not exact
                for param, value in zip(self._params, live, strict=True):
                    param.copy_(value)

    def averages_of(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
        """Copies of the weights to use, by the names of ``params``; none where these are the trained ones."""
        if not self.averages:
            return {}
        with self.average_parameters():
            return {name: param.detach().clone() for name, param in params.items()}

    def _switch(self, mode: str) -> None:
        with self._parts():
            getattr(self.torch_optimizer, mode)()

    def _choose_parts(self, settings: Hyperparameters) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """What the class steps on: the parameters, or where it does not know tensors over ranks their parts."""
        kind = find_kind(settings.name)
        in_one_piece = all(local_part(param).is_contiguous() for param in self._params)
        if kind.flat and in_one_piece and settings.kwargs.get("slice_p", 1) == 1:
            return lambda: on_flat_parts(self.torch_optimizer)
        spread = any(isinstance(param, DTensor) for param in self._params)
        if spread and (kind.flat or not kind.sharded):
            return lambda: on_whole_parts(self.torch_optimizer)
        return contextlib.nullcontext

    def state_dict(self) -> list[float] | None:
        """State of the loss scale (JSON-ready)."""
        if self.loss_scale is None:
            return None
        return self.loss_scale.state()

    def load_state_dict(self, state: Sequence[float] | None) -> None:
        """Take over the loss scale of a checkpoint, where it had one."""
        if self.loss_scale is not None and state is not None:
            self.loss_scale.restore(state)

    def metrics(self) -> dict[str, float]:
        """The loss scale, where there is one, and the rate of an optimiser that multiplies it by its own estimate."""
        found = {}
        if self.loss_scale is not None:
            found["optim/loss_scale"] = self.loss_scale.value
        group = self.torch_optimizer.param_groups[0]
        if "d" in group and "d" not in self._arguments:  # of Prodigy and its relatives
            found["optim/effective_learning_rate"] = _to_number(group["d"]) * _to_number(group["lr"])
        return found

    def step(self, step: int, *, scale: float = 1.0, loss: float = 0.0, expects_gradient: bool = False) -> StepResult:
        """Scale the gradients, clip them by their global L2 norm (0 or less: only measure), step, and clear them.

        Args:
            step: 0-based step of the schedule.
            scale: factor on the gradients; one over the weight of the whole step where losses were sums.
            loss: the step's loss, the same on all ranks; when it is not finite nothing is applied.
            expects_gradient: a gradient that is 0 everywhere is an error, and is not applied.
        """
        lr = self.learning_rate(step)
        if not math.isfinite(loss):
            self.torch_optimizer.zero_grad(set_to_none=True)
            return StepResult(math.nan, lr, Refusal.NOT_FINITE)
        factor = scale / self.loss_factor
        grads = [param.grad for param in self._params if param.grad is not None]
        if factor != 1.0 and grads:
            torch._foreach_mul_(grads, factor)
        self._set_rates(step)
        norm = self._clip()
        refusal = self._judge_gradient(norm, expects_gradient)
        if refusal is None:
            with self._parts():
                self.torch_optimizer.step()
        self.torch_optimizer.zero_grad(set_to_none=True)
        return StepResult(norm, lr, refusal)

    def _clip(self) -> float:
        """The L2 norm of all gradients, which are scaled down to the bound."""
        bound = math.inf
        if self._max_grad_norm > 0:
            bound = self._max_grad_norm
        if self._rank_invariant:
            return clip_by_whole_norms([p.grad for p in self._params if p.grad is not None], bound)
        total = torch.nn.utils.clip_grad_norm_(self._params, bound)
        return float(total.full_tensor() if isinstance(total, DTensor) else total)

    def _set_rates(self, step: int) -> None:
        for group, base in zip(self.torch_optimizer.param_groups, self._bases, strict=True):
            rate = base * self._schedule.factor(step) * self.lr_factor
            if isinstance(group["lr"], torch.Tensor):  # a compiled step would be compiled again for another number
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _judge_gradient(self, norm: float, expects_gradient: bool) -> Refusal | None:
        """Whether a gradient of this norm, which is that of all ranks, may be applied; the loss scale follows."""
        if math.isfinite(norm):
            if norm == 0.0 and expects_gradient:
                return Refusal.ZERO
            if self.loss_scale is not None:
                self.loss_scale.record_success()
            return None
        lowered = self.loss_scale is not None and self.loss_scale.lower()
        if lowered:
            return Refusal.OVERFLOW
        return Refusal.NOT_FINITE


@torch.no_grad()
def clip_by_whole_norms(grads: Sequence[Tensor], bound: float) -> float:
    """Scale gradients down to the global L2 norm ``bound``; the norm before that, with the same bits however they are
    split over ranks: each norm is of a whole gradient, and their squares are added exactly."""
    wholes = (grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads)
    norms = [torch.linalg.vector_norm(whole.contiguous(), dtype=torch.float64) for whole in wholes]
    squares = [norm * norm for norm in torch.stack(norms).tolist()] if norms else []
    total = math.sqrt(math.fsum(squares))
    factor = bound / (total + 1e-6)  # as torch's clip_grad_norm_
    if factor < 1.0:
        torch._foreach_mul_([local_part(grad) for grad in grads], factor)
    return total


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _to_number(value: Any) -> float:
    return value.item() if isinstance(value, Tensor) else value


def _groups(params: Mapping[str, torch.nn.Parameter], lr: float, patterns: Mapping[str, float]) -> list[dict[str, Any]]:
    """Parameter groups of equal base learning rate, in the order of the patterns, the rest last."""
    members: dict[str | None, list[torch.nn.Parameter]] = {pattern: [] for pattern in patterns}
    members[None] = []
    for name, param in params.items():
        members[next((pattern for pattern in patterns if re.search(pattern, name)), None)].append(param)
    empty = [pattern for pattern in patterns if not members[pattern]]
    if empty:
        raise UserError(f"train.optm_lr: no trained parameter has a name that matches {', '.join(map(repr, empty))}")
    rates = {**patterns, None: lr}
    return [{"params": group, "lr": rates[pattern]} for pattern, group in members.items() if group]
