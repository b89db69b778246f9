"""``metrics.jsonl``: one JSON object per step, the truth about a run."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cosmos_rl.storage import atomic
from cosmos_rl.storage.disk import writing_into


class MetricsFile:
    """Appends one line per step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int) -> None:
        """Forget all lines after ``step`` (and a line cut off by a kill): the resumed run will write them again."""
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        atomic.write_text(self._path, "".join(f"{line}\n" for line in kept))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the line of ``step``."""
        with writing_into(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **{k: _plain(v) for k, v in metrics.items()}}) + "\n")


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for both."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    """The step of a line; infinity for one that is not whole."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; the last one may be half written while the run goes on."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if math.isfinite(_step_of(line))]
