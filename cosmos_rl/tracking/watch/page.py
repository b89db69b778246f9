"""The page of several runs, in parts that are drawn again when there is news."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.tracking.durations import format_duration
from cosmos_rl.tracking.report import load_environment, words
from cosmos_rl.tracking.report.curves import Charts
from cosmos_rl.tracking.report.inlined import Placed
from cosmos_rl.tracking.report.measures import list_main_keys, list_set_scores, measure, warnings
from cosmos_rl.tracking.report.record import Gallery
from cosmos_rl.tracking.watch.columns import LiveRecord
from cosmos_rl.tracking.watch.feed import KINDS, UNREADABLE, RunFeed, State, describe_problem, read_state

_AT_MOST_EVERY_S = 1.0
"""Between two looks at the folders, however many pages ask."""
_IMAGES = 12
"""Of one gallery."""


@dataclass(frozen=True)
class Shown:
    """One run as the page shows it."""

    number: int
    name: str
    record: LiveRecord
    state: State

    @property
    def spent(self) -> str:
        """Time of all steps and validations."""
        return format_duration(self.record.seconds, whole=True)

    @property
    def left(self) -> str:
        """The time left while it runs, by the newest steps; empty: unknown."""
        wanted, times = self.record.wanted_steps, [s for _, s in self.record.series("time/iteration").known[-10:]]
        if self.state.kind != "running" or not wanted or not times:
            return ""
        seconds = sum(times) / len(times) * max(wanted - self.record.steps, 0)
        return f"ETA {format_duration(seconds, whole=True)}"

    @property
    def newest(self) -> list[tuple[str, float]]:
        """Newest loss and rewards."""
        keys = ["train/loss_mean", "reward/mean", "val/loss_mean", "val/reward/mean"]
        keys += [row.key for row in list_set_scores(self.record) if row.key.endswith(("reward/mean", "loss_mean"))]
        ends = ((measure(key).title, self.record.series(key).ends) for key in keys)
        return [(title, found[1][1]) for title, found in ends if found]


@dataclass(frozen=True)
class ShownGallery:
    """A gallery of one run."""

    run: Shown
    kind: str
    step: int
    groups: Mapping[str, Sequence[Placed]]


class Watch:
    """Several runs and the page about them; for the threads of one server."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self._feeds = [RunFeed(run) for run in runs]
        self._lock = threading.Lock()
        self._looked = -_AT_MOST_EVERY_S
        self._parts: dict[str, str] = {}
        self._changed: dict[str, int] = {}
        """Part -> version of the page in which it changed."""
        self._version = 0
        self._stale = True
        """Something was read and is not drawn yet."""
        self._identity = f"{time.time():.6f}"

    @property
    def runs(self) -> list[RunFolder]:
        """The runs, by number."""
        return [feed.run for feed in self._feeds]

    def page(self) -> str:
        """The whole document; its parts fill themselves."""
        return load_environment().get_template("watch.html.jinja").render(parts=self._part_names())

    def poll(self, known: int) -> dict[str, Any]:
        """What has changed since version ``known`` of the page, as JSON."""
        with self._lock:
            if time.monotonic() - self._looked >= _AT_MOST_EVERY_S or self._has_more:
                self._look()
                self._looked = time.monotonic()
            parts = {name: self._parts[name] for name, version in self._changed.items() if version > known}
            about = {"server": self._identity, "version": self._version, "more": self._has_more}
            return {**about, "parts": parts}

    @property
    def _has_more(self) -> bool:
        return any(feed.has_more for feed in self._feeds)

    def _look(self) -> None:
        """Read what is new, and draw it."""
        for feed in self._feeds:
            self._stale |= feed.read()
        records = [feed.make_record() for feed in self._feeds]
        states = [_find_state(feed, record) for feed, record in zip(self._feeds, records, strict=True)]
        names = name_runs(records)
        shown = [Shown(i, *one) for i, one in enumerate(zip(names, records, states, strict=True))]
        parts = {"runs": _render("runs", runs=shown), "legend": _render("legend", runs=shown)}
        if self._stale:
            parts |= _draw_metrics(shown)
            parts["galleries"] = _render(
                "galleries", runs=shown, galleries=_list_galleries(shown), sources=_link_image(shown)
            )
        self._version += 1
        self._changed |= {name: self._version for name, html in parts.items() if self._parts.get(name) != html}
        self._parts |= parts
        self._stale = False

    def _part_names(self) -> list[str]:
        return ["runs", "legend", "alarms", *(f"section{i}" for i in range(4)), "galleries", "numbers", "others"]


def _find_state(feed: RunFeed, record: LiveRecord) -> State:
    """How a run is, also where its folder cannot be read: the other runs are shown all the same."""
    problem = feed.problem
    if not problem:
        try:
            return read_state(feed.run, record)
        except UNREADABLE as error:
            problem = describe_problem(feed.run.ended.name, error)
    return State("unreadable", f"cannot be read at the moment ({problem}); shown is what was read before")


def _draw_metrics(shown: Sequence[Shown]) -> dict[str, str]:
    """Everything that only changes with the metrics."""
    charts = Charts([one.record for one in shown])
    sections = charts.sections()
    keys = dict.fromkeys(key for one in shown for key in list_main_keys(one.record))
    parts = {f"section{i}": _render("section", section=section) for i, section in enumerate(sections)}
    return {
        **parts,
        "others": _render("section", section=charts.collect_others()),
        "alarms": _render("alarms", runs=shown, texts=[warnings(one.record) for one in shown]),
        "numbers": _render("numbers", runs=shown, rows=[(key, measure(key)) for key in keys]),
    }


def name_runs(records: Sequence[LiveRecord]) -> list[str]:
    """Titles of the runs, with the names of their folders where titles are not enough."""
    titles = [words.find_title(record) for record in records]
    return [
        title if titles.count(title) == 1 else f"{title}, {record.root.name}"
        for title, record in zip(titles, records, strict=True)
    ]


def _render(part: str, **values: Any) -> str:
    macro = getattr(load_environment().get_template("watch_parts.html.jinja").make_module(values), f"{part}_")
    return str(macro())


def _list_galleries(shown: Sequence[Shown]) -> list[ShownGallery]:
    """Newest first; those of one step side by side."""
    found = [
        ShownGallery(one, kind, step, _group(gallery))
        for one in shown
        for kind in KINDS
        for step, gallery in getattr(one.record, kind).items()
    ]
    return sorted(found, key=lambda gallery: (-gallery.step, KINDS.index(gallery.kind), gallery.run.number))


def _group(gallery: Gallery) -> dict[str, list[Placed]]:
    groups: dict[str, list[Placed]] = {}
    for one in gallery:
        placed = groups.setdefault(one.of_set or one.group, [])
        if len(placed) < _IMAGES:
            placed.append(Placed(one, 0))
    return groups


def _link_image(shown: Sequence[Shown]) -> Any:
    """What the templates ask for an image: its address, and that of its video."""
    numbers = {one.record.root: one.number for one in shown}

    def find(placed: Placed) -> tuple[Markup | None, Markup | None]:
        file, clip = placed.entry.file, placed.entry.clip
        root = numbers[file.parents[3]]
        links = (f"runs/{root}/{'/'.join(one.parts[-4:])}" if one else None for one in (file, clip))
        return tuple(Markup("{}").format(link) if link else None for link in links)  # pyright: ignore[reportReturnType]

    return find


def find_image(runs: Sequence[RunFolder], number: int, place: Sequence[str]) -> Path | None:
    """The file of a gallery; None where there is none inside the folder of media."""
    if number >= len(runs):
        return None
    media = runs[number].media.resolve()
    file = media.joinpath(*place).resolve()
    if file.is_relative_to(media) and file.is_file():
        return file
    return None
