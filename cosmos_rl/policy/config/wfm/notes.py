"""What became of the keys of an older configuration, for people."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cosmos_rl.policy.config.problems import format_value


@dataclass(frozen=True)
class Note:
    """What one key of the older form became."""

    old: str
    new: str = ""
    """Dotted key of the present form; empty: there is none."""
    text: str = ""
    """What changes with it, or why there is none."""
    value: object = None
    """What it became."""
    lost: bool = False
    """It had an effect that is lost."""


@dataclass(frozen=True)
class Translation:
    """A configuration of the present form, and where it came from."""

    tables: Mapping[str, Any]
    notes: tuple[Note, ...]
    given: frozenset[str] = field(repr=False)
    """Keys that the older file has; the others are defaults."""

    def describe(self) -> list[str]:
        """Lines about the keys of the file: what they became, what is lost, and what is ignored for which reason."""
        became, lost, ignored = dict[str, list[str]](), list[str](), dict[str, list[str]]()
        for note in self.notes:
            if note.old not in self.given:
                continue
            if note.lost:
                lost.append(f"no counterpart: {note.old}: {note.text}")
            elif note.new:
                became.setdefault(_show(note), []).append(note.old)
            else:
                ignored.setdefault(note.text, []).append(note.old)
        lines = [*_group(became, "{keys} -> {what}"), *lost, *_group(ignored, "ignored ({what}): {keys}")]
        return [*lines, "defaults of the older form are set as well: `cosmos-rl translate` prints them all"]


def _group(keys: Mapping[str, list[str]], form: str) -> Iterator[str]:
    return (form.format(keys=", ".join(names), what=what) for what, names in keys.items())


def _show(note: Note) -> str:
    line = f"{note.new} = {format_value(note.value)}"
    if note.text:
        line += f"  ({note.text})"
    return line
