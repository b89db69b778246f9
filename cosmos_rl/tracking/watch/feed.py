"""What is new in a run folder since it was last read, and how the run is."""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl.errors import UserError
from cosmos_rl.storage.run_folder import RunFolder, is_worked_on
from cosmos_rl.tracking.durations import format_duration
from cosmos_rl.tracking.metrics import parse_line
from cosmos_rl.tracking.report.record import Gallery, list_step_folders, read_description, read_gallery
from cosmos_rl.tracking.watch.columns import Columns, LiveRecord

KINDS = ("validation", "rollout")
UNREADABLE = (OSError, ValueError, KeyError, TypeError, UserError)
"""What files raise that are only half there, are replaced at the moment, or hold something else than they should."""
_AT_ONCE = 2**23
"""Bytes that are read in one go, so that the page of a long run is there before all of it is read."""
_NEWEST = 4
"""Galleries of each kind that are shown."""
_STOPPED = (75, 130)
_REASON = 500
"""Characters of a reason that are shown."""
_SILENT_S = 60.0
"""No news for so long, or for a few steps, is worth a word."""


@dataclass(frozen=True)
class State:
    """How a run is."""

    kind: str
    """"running", "waiting", "finished", "stopped", "failed" or "unreadable"."""
    text: str


class RunFeed:
    """One run, read piece by piece."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._columns = Columns()
        self._offset, self._last_line = 0, b""
        self._written = -math.inf  # when the metrics were, seconds
        self.problem = ""
        """Why something could not be read the last time; it is tried again."""
        self.has_more = False
        """Whether a further read finds more at once."""
        self._description: dict[str, Any] = {"config": {}, "config_text": "", "started": {}}
        self._described: tuple[float, ...] = ()
        self._galleries: dict[Path, tuple[float, Gallery]] = {}

    def read(self) -> bool:
        """Take in what is new; whether anything is.

        What cannot be read, as a file that is just being copied, stays as it was, and ``problem`` says why.
        """
        news, self.problem = False, ""
        parts = {
            "config.toml or run.json": self._read_description,
            self.run.metrics.name: self._read_metrics,
            self.run.media.name: self._read_galleries,
        }
        for what, read in parts.items():
            try:
                news |= read()
            except UNREADABLE as error:
                self.problem = describe_problem(what, error)
        return news

    def make_record(self) -> LiveRecord:
        """The run as far as it was read."""
        return LiveRecord(
            root=self.run.root,
            **self._description,
            rows=(),
            validation=self._of_kind("validation"),
            rollout=self._of_kind("rollout"),
            age_s=time.time() - self._written,
            columns=self._columns.read(),
            last_step=self._columns.last_step,
            spent_s=self._columns.seconds,
        )

    def _read_description(self) -> bool:
        files = [folder / name for folder in (self.run.root, self.run.next) for name in ("config.toml", "run.json")]
        described = tuple(file.stat().st_mtime for file in files if file.is_file())
        if described == self._described:
            return False
        self._description, self._described = read_description(self.run), described
        return True

    def _read_metrics(self) -> bool:
        """New whole lines; a resume or a rewind has cut the file back, and then it is read from its start."""
        self.has_more = False
        if not self.run.metrics.is_file():
            return self._forget()
        with self.run.metrics.open("rb") as file:
            file.seek(self._offset - len(self._last_line))
            changed = file.read(len(self._last_line)) != self._last_line and self._forget()
            file.seek(self._offset)
            piece = file.read(_AT_ONCE)
            self._written = os.fstat(file.fileno()).st_mtime
            self.has_more = len(piece) == _AT_ONCE
        lines = piece[: piece.rfind(b"\n") + 1].splitlines(keepends=True)
        if not lines:
            return changed
        self._offset += sum(map(len, lines))
        self._last_line = lines[-1]
        for row in filter(None, map(parse_line, lines)):
            self._columns.add(row)
        return True

    def _forget(self) -> bool:
        """Start from nothing; whether anything was known."""
        known = self._offset > 0
        self._columns, self._offset, self._last_line = Columns(), 0, b""
        self._written = -math.inf
        return known

    def _read_galleries(self) -> bool:
        """The newest galleries of each kind; one that a resume has replaced is read again."""
        found: dict[Path, tuple[float, Gallery]] = {}
        for kind in KINDS:
            folders = list_step_folders(self.run.media / kind)
            for step in sorted(folders, reverse=True)[:_NEWEST]:
                folder = folders[step]
                changed = folder.stat().st_mtime
                known = self._galleries.get(folder)
                gallery = known[1] if known and known[0] == changed else read_gallery(folder)
                if gallery is not None:
                    found[folder] = (changed, gallery)
        news = {folder: when for folder, (when, _) in found.items()} != {f: w for f, (w, _) in self._galleries.items()}
        self._galleries = found
        return news

    def _of_kind(self, kind: str) -> Mapping[int, Gallery]:
        found = {folder: gallery for folder, (_, gallery) in self._galleries.items() if folder.parent.name == kind}
        return {int(folder.name.removeprefix("step_")): gallery for folder, gallery in found.items()}


def read_state(run: RunFolder, record: LiveRecord) -> State:
    """How the run is, by what its folder and this machine say."""
    if run.ended.is_file():
        ended = json.loads(run.ended.read_text(encoding="utf-8"))
        return describe_end(ended["code"], str(ended.get("reason", "")))
    if record.finished:
        return State("finished", "finished")
    worked_on = is_worked_on(run)
    if worked_on is False:
        return State("failed", "ended before its last step: no process works on it any more")
    usual_s = max((seconds for _, seconds in record.series("time/iteration").known[-10:]), default=0.0)
    if record.steps and record.age_s > max(_SILENT_S, 5 * usual_s):
        return State("waiting", f"no news for {format_duration(record.age_s, whole=True)}")
    if record.steps or worked_on:
        return State("running", "running" if record.steps else "no step is done yet")
    if run.next.is_dir() or run.has_begun:
        return State("waiting", "no step is done yet")
    return State("waiting", "nothing is there yet")


def describe_problem(what: str, error: Exception) -> str:
    """One line about what cannot be read."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{what}: {kind}{error}"[:_REASON]


def describe_end(code: int, reason: str) -> State:
    """The state of a run whose command has ended with this exit code."""
    if code == 0:
        return State("finished", "finished")
    if code in _STOPPED:
        return State("stopped", "stopped and saved; --train.resume=true continues it")
    return State("failed", f"failed: {reason[:_REASON]}" if reason else f"failed with exit code {code}")
