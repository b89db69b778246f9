"""What the loop asks of a task. There is one loop, and a task for each kind of job."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from cosmos_rl.optim.ema import Ema
from cosmos_rl.optim.optimizer import Optimizer, Refusal
from cosmos_rl.tracking.media import Shown


@dataclass(frozen=True)
class Alarm:
    """Something went wrong with what is learnt, while every number is still finite."""

    text: str
    action: Literal["warn", "stop", "rewind"]
    good_step: int
    """The last step at which nothing was wrong: a rewind goes back to a checkpoint no later than that."""
    rewinds: int
    """The number of the rewind, should there be one."""
    other_actions: str
    """What a user may choose in the place of the action that was chosen, where it ends the run."""


@dataclass(frozen=True)
class StepReport:
    """What one training step did."""

    metrics: Mapping[str, float]
    refusal: Refusal | None = None
    """Why an optimiser step was not applied; None: all were. Other optimiser steps of the same training step may have
    been."""
    gallery: Sequence[Shown] = ()
    """Samples to be shown; the same on all ranks, but for the pixels, which the rank has that made them."""
    alarm: Alarm | None = None
    """The same on all ranks."""

    @property
    def applied(self) -> bool:
        """Whether all optimiser steps were applied."""
        return self.refusal is None


@dataclass(frozen=True)
class ValidationReport:
    """What one validation found."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    images: Sequence[Shown] = ()
    """From the same prompts and noise at every validation; on all ranks as ``StepReport.gallery``."""
    objective: float | None = None
    """What the best checkpoint has the lowest of."""
    loss: float | None = None
    """Of held-out pairs; None: they are prompts."""


def merge_reports(found: Sequence[ValidationReport | None]) -> ValidationReport:
    """Those of several validation sets as one, with objective and loss of the first; None: a set was not due."""
    made = [report for report in found if report is not None]
    metrics = {key: value for report in made for key, value in report.metrics.items()}
    first = (found[0] if found else None) or ValidationReport()
    images = [image for report in made for image in report.images]
    return ValidationReport(metrics, images, first.objective, first.loss)


Notify = Callable[[str, dict[str, Any]], None]
"""(hook name, data) -> None."""


class StopRequest(Protocol):
    """Asks the loop to save and end."""

    @property
    def requested(self) -> str | None:
        """Name of the signal that asked for it."""
        ...


LoggerFn = Callable[[dict[str, Any], int], None]
HookFn = Callable[..., None]


class Task(Protocol):
    """One kind of training job."""

    total_steps: int
    params: Mapping[str, torch.nn.Parameter]
    optimizer: Optimizer
    ema: Ema | None

    def start(self, step: int) -> None:
        """Prepare to run from 0-based ``step`` on (called once, after a resume has restored the state)."""
        ...

    def train_step(self, step: int) -> StepReport:
        """One step: data, losses, optimiser, averages."""
        ...

    def validate(self, step: int, notify: Notify) -> ValidationReport:
        """Judge the weights after ``step`` steps; changes no trained tensor. ``notify`` is called around each batch."""
        ...

    def epoch(self, step: int) -> int:
        """In which 0-based pass over the data the run is after ``step`` steps."""
        ...

    def prepare_export(self) -> Callable[[Path], None]:
        """Copy what the export needs; the result writes it into a step's folder, later and in another thread."""
        ...

    def extra_tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Tensors a restart needs besides weights, optimiser state and EMA: kind -> name -> live tensor."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must have in common with this one (JSON-ready)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Counters that a resumed run continues from (JSON-ready)."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counters of a checkpoint."""
        ...

    def close(self) -> None:
        """Called once at the end of the run, whatever ended it."""
        ...

    def on_rewind(self, step: int, rewinds: int) -> None:
        """The state after ``step`` steps is back, for the ``rewinds``-th time in all."""
        ...
