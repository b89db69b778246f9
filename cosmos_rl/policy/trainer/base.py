"""What every task shares: the optimiser step, the average of the weights, and their state."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.data.streams import Stream
from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.pairwise import BlockwiseSum
from cosmos_rl.optim.ema import Ema
from cosmos_rl.optim.optimizer import Optimizer, Refusal, StepResult
from cosmos_rl.policy.config import Config, data_ranks
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_ema, build_optimizer
from cosmos_rl.policy.trainer.peers import compare_peers
from cosmos_rl.policy.trainer.task import StepReport

Gradients = dict[str, Tensor]
WriteExport = Callable[[Path], None]


class TaskBase(abc.ABC):
    """A task whose losses are sums over rows: the gradient of a step is their sum divided by the weight of all rows."""

    def __init__(
        self,
        config: Config,
        context: Context,
        params: Mapping[str, torch.nn.Parameter],
        stream: Stream,
        export: Callable[[], WriteExport] | None,
    ) -> None:
        """
        Args:
            stream: what the steps take.
            export: copies the weights as they are now; its result writes them into a step's folder.
        """
        self._config, self._context = config, context
        if data_ranks(config.policy.parallelism) != context.dp_size:
            raise RuntimeError(f"the configuration is not that of {context.dp_size} data-parallel ranks")
        self._seed = config.train.seed
        self.params = params
        self.stream: Stream = stream
        self.total_steps: int = count_steps(stream, config)
        self.optimizer: Optimizer = build_optimizer(params, config.train, self.total_steps)
        self.ema: Ema | None = build_ema(params, config.train)
        self._export = export
        self._optimizer_steps = 0  # those that were applied: what EMA and old policy count
        self._gradients: list[Gradients] | None = None
        self._pairwise = BlockwiseSum() if config.train.rank_invariant else None
        self._peers_compared = False

    @abc.abstractmethod
    def train_step(self, step: int) -> StepReport:
        """One step: data, losses, optimiser, averages."""

    def apply_gradient(self, step: int, *, weight: float, loss: float, expects_gradient: bool) -> StepResult:
        """One optimiser step along the gradient that the ranks have accumulated.

        Args:
            step: of the learning rate's schedule.
            weight: of the rows of all ranks.
            loss: the mean over these rows, the same on all ranks.
            expects_gradient: a gradient that is 0 everywhere is an error.
        """
        # sharded gradients are averaged over all ranks; what is wanted is their sum over the weight of the whole step
        # (context-parallel peers have the gradients of different tokens of the same rows)
        scale = self._context.world_size / max(weight, 1e-12)
        if self._pairwise is not None:
            scale = 1.0 / max(weight, 1e-12)  # these are sums already
            for name, gradient in self._pairwise.take().items():
                self.params[name].grad = gradient
        if self._gradients is not None:
            return self._record_gradient(step, scale)
        result = self.optimizer.step(step, scale=scale, loss=loss, expects_gradient=expects_gradient)
        if result.applied:
            if self.ema is not None:
                with self.optimizer.average_parameters():
                    self.ema.update(self._optimizer_steps)
            self._optimizer_steps += 1
        return result

    def collect_gradient(self) -> None:
        """After each micro-batch: with ``train.rank_invariant`` its gradient goes into the sum of the step."""
        if self._pairwise is None:
            return
        self._pairwise.add({name: p.grad for name, p in self.params.items() if p.grad is not None})
        self.optimizer.torch_optimizer.zero_grad(set_to_none=True)

    def end_block(self) -> None:
        """The next micro-batch begins another block of the sum, see `BlockwiseSum`."""
        if self._pairwise is not None:
            self._pairwise.end_block()

    def compare_peers(self, what: str, *values: Tensor) -> None:
        """Once in a process: see `peers.compare_peers`."""
        if not self._peers_compared:
            compare_peers(what, values, self._context)
        self._peers_compared = True

    def compute_gradients(self, step: int) -> tuple[list[Gradients], StepReport]:
        """The gradient of each optimiser step of a training step, none of which is applied, and the step's report."""
        self._gradients = []
        try:
            report = self.train_step(step)
            return self._gradients, report
        finally:
            self._gradients = None

    def _record_gradient(self, step: int, scale: float) -> StepResult:
        assert self._gradients is not None
        factor = scale / self.optimizer.loss_factor
        self._gradients.append({n: p.grad * factor for n, p in self.params.items() if p.grad is not None})
        self.optimizer.torch_optimizer.zero_grad(set_to_none=True)
        return StepResult(0.0, self.optimizer.learning_rate(step), Refusal.NOT_WANTED)

    @contextlib.contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        """The model has the averaged weights inside the block, if an average is kept."""
        averages = self.optimizer.average_parameters()
        if self.ema is not None:
            averages = self.ema.average_parameters()
        with averages:
            yield

    def epoch(self, step: int) -> int:
        """In which 0-based pass over the data the run is after ``step`` steps."""
        return self.stream.epoch_of(step)

    def prepare_export(self) -> WriteExport:
        """Copy the weights to export (EMA if kept) in ``train.param_dtype``."""
        if self._export is None:
            return lambda folder: None
        with self.use_averaged_weights():
            return self._export()

    def extra_tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """None."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Counters that a resumed run continues from (JSON-ready)."""
        counters = self.optimizer.counters()
        own = {"optimizer": counters} if any(counters) else {}
        return {"optimizer_steps": self._optimizer_steps, "loss_scale": self.optimizer.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counters of a checkpoint."""
        self._optimizer_steps = int(state["optimizer_steps"])
        self.optimizer.load_state_dict(state.get("loss_scale"))
        self.optimizer.restore_counters(state.get("optimizer", self.optimizer.counters()))

    def close(self) -> None:  # noqa: B027 - most tasks have nothing to close
        """Nothing is open."""

    def on_rewind(self, step: int, rewinds: int) -> None:  # noqa: B027 - most tasks have nothing to do
        """Nothing depends on it."""


def count_steps(stream: Stream, config: Config) -> int:
    """Steps of the whole run: all epochs, or fewer where ``train.max_num_steps`` ends it."""
    steps = stream.steps_until(config.train.epoch)
    if config.train.max_num_steps is None:
        return steps
    return min(steps, config.train.max_num_steps)
