"""``metrics.jsonl``: one JSON object per step, the truth about a run."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from cosmos_rl.storage.disk import report_full_disk

_BLOCK = 2**16


class MetricsFile:
    """Appends one line per step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int) -> None:
        """Forget all lines after ``step`` (and a line cut off by a kill): the resumed run will write them again."""
        if not self._path.exists():
            return
        with self._path.open("rb+") as file:
            end, line = next(
                (found for found in _read_lines_backwards(file) if _read_step(found[1]) <= step), (0, b"\n")
            )
            file.truncate(end)
            if not line.endswith(b"\n"):
                file.seek(end)
                file.write(b"\n")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the line of ``step``."""
        with report_full_disk(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **{k: _finite_or_none(v) for k, v in metrics.items()}}) + "\n")


def _finite_or_none(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for both."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """What a line holds; None for one that is not whole."""
    try:
        row = from_json(line, cache_strings="keys")  # several times as fast as json, which a long run's report feels
        return row if isinstance(row["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _read_step(line: bytes) -> float:
    """The step of a line; infinity for one that is not whole."""
    row = parse_line(line)
    if row is None:
        return math.inf
    return row["step"]


def _read_lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(where it ends in the file, line), the last line first. Steps ascend, so a resume reads little of a long file."""
    offset, rest = file.seek(0, os.SEEK_END), b""
    while offset > 0:
        size = min(_BLOCK, offset)
        offset = file.seek(offset - size)
        first, *lines = (file.read(size) + rest).splitlines(keepends=True)
        end = offset + len(first) + sum(map(len, lines))
        for line in reversed(lines):
            yield end, line
            end -= len(line)
        rest = first
    if rest:
        yield len(rest), rest


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; the last one may be half written while the run is in progress."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [row for line in lines if (row := parse_line(line)) is not None]
