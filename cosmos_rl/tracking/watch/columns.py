"""The metrics of a run as far as it has come: a row costs the same whatever came before it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cosmos_rl.tracking.report.record import Record, Series, read_number
from cosmos_rl.tracking.report.svg import MAX_POINTS

_WHOLE = ("guard/", "val/", "train/loss_mean", "adv/zero_std_ratio")
"""Metrics that are measured now and then, or of which the warnings name the steps: every value is kept."""


class _Column(Protocol):
    def add(self, step: int, value: float | None) -> None: ...

    def read(self) -> Series: ...


class _WholeColumn:
    """Every value."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._values: list[float | None] = []

    def add(self, step: int, value: float | None) -> None:
        self._steps.append(step)
        self._values.append(value)

    def read(self) -> Series:
        return Series(self._steps, self._values)


@dataclass(frozen=True)
class _ThinSeries(Series):
    """Means of neighbouring values."""

    lost: int = 0

    @property
    def missing(self) -> int:
        return self.lost


class _ThinColumn:
    """Means of as many neighbouring values as it takes for at most twice the points of a chart."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._sums: list[float] = []
        self._counts: list[int] = []
        self._width, self._filled, self._lost = 1, 0, 0

    def add(self, step: int, value: float | None) -> None:
        if self._filled == self._width or not self._steps:
            self._begin_point()
        self._steps[-1], self._filled = step, self._filled + 1  # the last step, so that it ends where the run does
        if value is None:
            self._lost += 1
        else:
            self._sums[-1] += value
            self._counts[-1] += 1

    def _begin_point(self) -> None:
        if len(self._steps) == 2 * MAX_POINTS:
            pairs = range(0, len(self._steps), 2)
            self._steps = self._steps[1::2]
            self._sums = [self._sums[i] + self._sums[i + 1] for i in pairs]
            self._counts = [self._counts[i] + self._counts[i + 1] for i in pairs]
            self._width *= 2
        self._steps.append(0)
        self._sums.append(0.0)
        self._counts.append(0)
        self._filled = 0

    def read(self) -> Series:
        values = [total / n if n else None for total, n in zip(self._sums, self._counts, strict=True)]
        return _ThinSeries(self._steps, values, self._lost)


class Columns:
    """All metrics of a run, in order of appearance."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self.last_step, self.seconds = 0, 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Take in a line of ``metrics.jsonl``."""
        step = row["step"]
        self.last_step = max(self.last_step, step)
        for key, found in row.items():
            if key == "step":
                continue
            value = read_number(found)
            if key not in self._columns:
                self._columns[key] = _WholeColumn() if key.startswith(_WHOLE) else _ThinColumn()
            self._columns[key].add(step, value)
            if key in ("time/iteration", "time/validation"):
                self.seconds += value or 0.0

    def read(self) -> dict[str, Series]:
        """The series of each."""
        return {key: column.read() for key, column in self._columns.items()}


@dataclass(frozen=True)
class LiveRecord(Record):
    """A record whose metrics were read before."""

    columns: Mapping[str, Series] = field(default_factory=dict)
    last_step: int = 0
    spent_s: float = 0.0

    @property
    def _columns(self) -> Mapping[str, Series]:
        return self.columns

    @property
    def steps(self) -> int:
        """Steps that are done."""
        return self.last_step

    @property
    def seconds(self) -> float:
        """Time of all steps and validations."""
        return self.spent_s
