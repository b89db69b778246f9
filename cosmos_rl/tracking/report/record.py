"""What a run folder holds, read without torch: metrics, galleries, configuration, how the run was started."""

import itertools
import json
import math
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cosmos_rl.errors import UserError
from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.tracking.media import TOTAL
from cosmos_rl.tracking.metrics import read_metrics

_STILL_GOING_S = 60.0
"""A run whose last line is younger than this, or than a few steps, is taken to be in progress."""

_BLOCK = 1000
"""Rows that are turned into columns at once; so many stay in the processor's cache."""


@dataclass(frozen=True)
class Entry:
    """One image of a gallery on the disk."""

    file: Path
    prompt: str
    sample_id: int
    group: str
    scores: Mapping[str, float | None]
    clip: Path | None = None
    """The video of which ``file`` is the first frame."""
    of_set: str = ""
    """Label of its validation set; empty: there is one."""

    @property
    def total(self) -> float | None:
        """The score that was trained on."""
        return self.scores.get(TOTAL)

    @property
    def parts(self) -> Mapping[str, float | None]:
        """The scores that make up the total; empty where it is a single one."""
        parts = {name: score for name, score in self.scores.items() if name != TOTAL}
        if list(parts.values()) == [self.total]:
            return {}
        return parts

    @property
    def key(self) -> tuple[str, int, str]:
        """The same in every gallery of the same prompts and noise."""
        return self.of_set, self.sample_id, self.prompt


Gallery = Sequence[Entry]


@dataclass(frozen=True)
class Series:
    """The values of one metric; None where a line had null."""

    steps: Sequence[int]
    values: Sequence[float | None]

    @property
    def missing(self) -> int:
        """How many are null."""
        return self.values.count(None)

    @property
    def known(self) -> list[tuple[int, float]]:
        """(step, value) without the nulls."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None]

    @property
    def ends(self) -> tuple[tuple[int, float], tuple[int, float]] | None:
        """The first and the last of the known values; None: there is none."""
        indices = range(len(self.steps))
        first = next((i for i in indices if self.values[i] is not None), None)
        last = next((i for i in reversed(indices) if self.values[i] is not None), None)
        if first is None or last is None:
            return None
        return (self.steps[first], self.values[first] or 0.0), (self.steps[last], self.values[last] or 0.0)


@dataclass(frozen=True)
class Record:
    """One run."""

    root: Path
    config: Mapping[str, Any]
    config_text: str
    started: Mapping[str, Any]
    """``run.json``: command, time, seed, versions."""
    rows: Sequence[Mapping[str, Any]]
    """``metrics.jsonl``, ascending steps."""
    validation: Mapping[int, Gallery]
    rollout: Mapping[int, Gallery]
    age_s: float = field(default=float("inf"))
    """Seconds since the last line of ``metrics.jsonl`` was written."""

    @cached_property
    def steps(self) -> int:
        """Steps that are done."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def wanted_steps(self) -> int | None:
        """Steps that the configuration asks for, where it gives their number."""
        return self.setting("train.max_num_steps")

    @cached_property
    def seconds(self) -> float:
        """Time of all steps and validations."""
        columns = (self.series(key).values for key in ("time/iteration", "time/validation"))
        return sum(value for values in columns for value in values if value is not None)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end: all steps that were asked for, or the card of the final export."""
        if self.wanted_steps is not None and self.steps >= self.wanted_steps:
            return True
        export = self.export
        return export is not None and export[0] == self.steps and (export[1] / "README.md").is_file()

    @property
    def in_progress(self) -> bool:
        """Whether the last line is so young that the run is likely to write another."""
        times = [t for _, t in self.series("time/iteration").known[-10:]]
        return not self.finished and self.age_s < max(_STILL_GOING_S, 5 * max(times, default=0.0))

    @property
    def export(self) -> tuple[int, Path] | None:
        """Step and folder of the newest exported model: a ``lora`` folder or a pipeline."""
        folders = list_step_folders(RunFolder(self.root).safetensors)
        if not folders:
            return None
        step = max(folders)
        lora = folders[step] / "lora"
        if lora.is_dir():
            return step, lora
        return step, folders[step]

    @cached_property
    def _columns(self) -> Mapping[str, Series]:
        """The rows by key, in order of appearance: charts, tables and warnings ask for each many times."""
        columns: dict[str, tuple[list[int], list[Any]]] = {}
        for first in range(0, len(self.rows), _BLOCK):
            block = self.rows[first : first + _BLOCK]
            for key in dict.fromkeys(itertools.chain.from_iterable(block)):
                having = [row for row in block if key in row]
                steps, values = columns.setdefault(key, ([], []))
                steps += [row["step"] for row in having]
                values += [row[key] for row in having]
        return {key: Series(steps, _numbers(values)) for key, (steps, values) in columns.items()}

    @cached_property
    def keys(self) -> list[str]:
        """Names of all metrics that ever were numbers, in order of appearance."""
        found = (key for key, series in self._columns.items() if any(value is not None for value in series.values))
        return [key for key in found if key != "step"]

    def series(self, key: str) -> Series:
        """The values of ``key`` at the lines that have it."""
        return self._columns.get(key, Series((), ()))

    def value(self, key: str, step: int) -> float | None:
        """The value of ``key`` at ``step``."""
        return next((read_number(row.get(key)) for row in self.rows if row["step"] == step), None)

    def setting(self, dotted: str) -> Any:
        """The value of a configuration key, None when it is not set."""
        value: Any = self.config
        for name in dotted.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(name)
        return value


def read_record(root: Path) -> Record:
    """Everything that the run folder ``root`` has by now; what is not there yet is empty."""
    run = RunFolder(root)
    by_step, age_s = {}, math.inf
    if run.metrics.is_file():
        by_step = {row["step"]: row for row in read_metrics(run.metrics)}
        age_s = time.time() - run.metrics.stat().st_mtime
    return Record(
        root=root,
        **read_description(run),
        rows=[by_step[step] for step in sorted(by_step)],
        validation=_galleries(run.media / "validation"),
        rollout=_galleries(run.media / "rollout"),
        age_s=age_s,
    )


def read_description(run: RunFolder) -> dict[str, Any]:
    """``config``, ``config_text`` and ``started`` of the record of a run, also of one that has not begun to train.

    Raises:
        UserError: its configuration was changed into what is no TOML.
    """
    described, config_text, started = run, "", {}
    if not run.config.is_file():
        described = RunFolder(run.next)
    if described.config.is_file():
        config_text = described.config.read_text(encoding="utf-8")
    if described.run_json.is_file():
        started = json.loads(described.run_json.read_text(encoding="utf-8"))
    try:
        config = tomllib.loads(config_text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{described.config}: not valid TOML: {error}") from None
    return {"config": config, "config_text": config_text, "started": started}


def find_same_images(record: Record) -> dict[int, Gallery]:
    """Step -> images from the same prompts and noise: of validations, else the fixed ones among the rollouts."""
    if record.validation:
        return dict(record.validation)
    fixed = {step: [one for one in gallery if one.group == "fixed"] for step, gallery in record.rollout.items()}
    return {step: gallery for step, gallery in fixed.items() if gallery}


def pick_first_of_each_prompt(gallery: Gallery, also: Callable[[Entry], bool], count: int) -> list[Entry]:
    """Up to ``count`` entries for which ``also`` holds, in their order, each prompt once before any comes twice; of
    several validation sets in turns."""
    candidates = [one for one in gallery if also(one)]
    first: dict[tuple[str, str], Entry] = {}
    for one in candidates:
        first.setdefault((one.of_set, one.prompt), one)
    chosen = list(first.values())
    chosen += [one for one in candidates if first[one.of_set, one.prompt] is not one]
    sets = dict.fromkeys(one.of_set for one in chosen)
    turns = itertools.zip_longest(*([one for one in chosen if one.of_set == label] for label in sets))
    return [one for turn in turns for one in turn if one is not None][:count]


def read_gallery(folder: Path) -> Gallery | None:
    """The images of one gallery; None: its index is not there."""
    index = folder / "index.json"
    if not index.is_file():
        return None
    return [_read_entry(folder, row) for row in json.loads(index.read_text(encoding="utf-8"))]


def _galleries(folder: Path) -> dict[int, Gallery]:
    found = ((step, read_gallery(path)) for step, path in sorted(list_step_folders(folder).items()))
    return {step: gallery for step, gallery in found if gallery is not None}


def _read_entry(folder: Path, row: Mapping[str, Any]) -> Entry:
    clip = row.get("clip") and folder / row["clip"]
    about = (row["prompt"], row["sample_id"], row["group"], row["scores"])
    return Entry(folder / row["file"], *about, clip or None, row.get("set", ""))


def list_step_folders(folder: Path) -> dict[int, Path]:
    """Step -> ``step_<N>``; staging folders are hidden and never listed."""
    entries = folder.glob("step_*")
    matches = ((re.fullmatch(r"step_(\d+)", entry.name), entry) for entry in entries)
    return {int(match[1]): entry for match, entry in matches if match}


def _numbers(values: list[Any]) -> Sequence[float | None]:
    if set(map(type, values)) == {float} and all(map(math.isfinite, values)):
        return values  # nearly always, and much faster than one by one
    return list(map(read_number, values))


def read_number(value: Any) -> float | None:
    """A number of JSON; None for what is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
