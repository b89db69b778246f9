"""Preferences on disk: for a prompt, an image or a video that was chosen and one that was rejected.

Either two folders with files of the same names, the captions alongside the chosen ones, or a `.jsonl` file. No torch:
`cosmos-rl check` looks at them.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.data.pair_files import (
    Pair,
    count_pairs,
    describe_left_out,
    find_tar,
    list_names,
    media_suffixes,
    scan_pairs,
)
from cosmos_rl.data.texts import find_prompt_problem, parse_json, printable
from cosmos_rl.errors import UserError, explain_decoding
from cosmos_rl.text_files import read_text

TABLE_SUFFIX = ".jsonl"
"""Ending of a file of preferences."""
_MEMBERS = ("chosen", "rejected")
_SCORES = ("score_chosen", "score_rejected")
_TABLE = 'a line each like {"prompt": "...", "chosen": "a.png", "rejected": "b.png"}'
_FOLDERS = (
    "expected a folder of captioned images or videos, which are the chosen ones, and as rejected_dir a folder with a "
    "file of the same name for each"
)


@dataclass(frozen=True)
class Preferences:
    """The members of all preferences, in the same order."""

    chosen_folder: Path
    chosen: Sequence[Pair]
    rejected_folder: Path
    rejected: Sequence[Pair]
    """With the prompts of the chosen ones."""
    ties: int = 0
    """Rows that were dropped, as their scores are equal."""
    left_out: str = ""
    """A text about what else is left out; empty: nothing is."""

    def describe(self) -> str:
        """How many there are, and where they were found."""
        dropped = ""
        if self.ties:
            dropped = f"; {self.ties} with equal scores are left out"
        return f"{self.chosen_folder}: {len(self.chosen)} preferences{dropped}"


def load_preferences(source: str | Path, rejected_dir: str, *, video: bool = False) -> Preferences:
    """All that can be used of a folder with its ``rejected_dir``, or of a `.jsonl` file.

    Raises:
        UserError: nothing can be used, or more is left out than used.
    """
    place = Path(source).expanduser()
    if place.suffix == TABLE_SUFFIX and not place.is_dir():
        return _read_table(place, rejected_dir, video)
    return _match_folders(place, _find_rejected(place, rejected_dir), video)


def _find_rejected(place: Path, rejected_dir: str) -> Path:
    """The folder of the rejected ones that belongs to the folder ``place``."""
    if not rejected_dir:
        raise UserError(f"{place.absolute()}: has no rejected_dir; {_FOLDERS}, or a {TABLE_SUFFIX} file with {_TABLE}")
    rejected = Path(rejected_dir).expanduser()
    if not rejected.is_dir():
        raise UserError(f"rejected_dir {rejected.absolute()}: no such folder; {_FOLDERS}")
    return rejected


def count_preferences(source: str | Path, rejected_dir: str, *, video: bool) -> int:
    """How many there may be; opens no image and no caption, so that some may turn out not to be usable.

    Raises:
        UserError: the table or the folder of the rejected ones is none.
    """
    place = Path(source).expanduser()
    if place.is_file():
        return len(_read_table(place, rejected_dir, video).chosen)
    rejected = _find_rejected(place, rejected_dir)
    return min(count_pairs(place, video=video), sum(map(len, _media_by_stem(rejected, video).values())))


def is_preference_table(source: str | Path) -> bool:
    """Whether it is a file of preferences rather than one of prompts, by its first row."""
    place = Path(source).expanduser()
    if place.suffix != TABLE_SUFFIX or not place.is_file():
        return False
    with place.open(encoding="utf-8-sig", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    row, _ = parse_json(first)
    return isinstance(row, Mapping) and not {*_MEMBERS}.isdisjoint(row)


# ---- two folders -------------------------------------------------------------------------------------------------


def _match_folders(folder: Path, rejected_folder: Path, video: bool) -> Preferences:
    if folder.exists() and folder.samefile(rejected_folder):
        raise UserError(f"rejected_dir {rejected_folder.absolute()}: is the folder of the chosen ones; {_FOLDERS}")
    pairs, problems = scan_pairs(folder, video=video)
    if find_tar(pairs[0].file):
        raise UserError(f"{folder.absolute()}: has its samples in tars; preferences are read from folders: unpack them")
    chosen, rejected = list[Pair](), list[Pair]()
    for pair in pairs:
        parent, name = os.path.split(pair.file)
        stem = os.path.splitext(name)[0]
        found = _media_by_stem(rejected_folder / parent, video).get(stem, [])
        if len(found) != 1:
            problems.append(f"{printable(pair.file)}: {len(found)} rejected files have its name")
            continue
        chosen.append(pair)
        rejected.append(pair._replace(file=os.path.join(parent, found[0]), image=""))
    _media_by_stem.cache_clear()  # files may be added before the next look
    if not chosen:
        raise UserError(f"{rejected_folder.absolute()}: has no file with the name of a chosen one; {_FOLDERS}")
    left_out = describe_left_out(folder, problems, f"{len(chosen)} preferences", len(chosen), _FOLDERS)
    return Preferences(folder, chosen, rejected_folder, rejected, left_out=left_out)


@functools.cache
def _media_by_stem(folder: Path, video: bool) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    if folder.is_dir():
        for name in list_names(folder):
            stem, ending = os.path.splitext(name)
            if ending.lower() in media_suffixes(video=video):
                found.setdefault(stem, []).append(name)
    return found


# ---- a table -----------------------------------------------------------------------------------------------------


def _read_table(table: Path, rejected_dir: str, video: bool) -> Preferences:
    if rejected_dir:
        raise UserError(f"{table.absolute()}: names its rejected files itself; leave rejected_dir out")
    try:
        text = read_text(table)
    except UnicodeDecodeError as error:
        raise UserError(f"{table.absolute()}: {explain_decoding(error)}; expected {_TABLE}") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{table.absolute()}: cannot be read ({why}); expected {_TABLE}") from error
    rows, problems, ties = list[tuple[Pair, Pair]](), list[str](), 0
    for source, raw in _lines(text):
        problem = _find_problem(raw, table.parent, video)
        if problem is not None:
            problems.append(f"{source} {problem}")
        elif isinstance(raw, Mapping) and raw.get(_SCORES[0]) is not None and raw[_SCORES[0]] == raw.get(_SCORES[1]):
            ties += 1
        elif isinstance(raw, Mapping):
            rows.append(_to_pairs(raw, f"{table.name}, {source}"))
    if not rows:
        first = "".join(f"\n  {problem}" for problem in problems[:5])
        raise UserError(f"{table.absolute()}: holds no usable preference; expected {_TABLE}{first}")
    left_out = describe_left_out(table, problems, f"{len(rows)} preferences", len(rows), f"expected {_TABLE}")
    chosen, rejected = ([row[member] for row in rows] for member in range(2))
    return Preferences(table.parent, chosen, table.parent, rejected, ties, left_out)


def _lines(text: str) -> Iterator[tuple[str, object]]:
    """(where, what the line holds or why it holds nothing)."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            raw, problem = parse_json(line)
            yield f"line {number}", problem or raw


def _find_problem(raw: object, folder: Path, video: bool) -> str | None:
    """What is wrong with a row; None: it can be used."""
    if isinstance(raw, str):
        return raw
    problem = find_prompt_problem(raw)
    if problem is not None or not isinstance(raw, Mapping):
        return problem
    for member in _MEMBERS:
        problem = _find_file_problem(raw.get(member), member, folder, video)
        if problem is not None:
            return problem
    if _place(folder, raw["chosen"]).samefile(_place(folder, raw["rejected"])):
        return f"has one file as chosen and as rejected: {printable(raw['chosen'])}"
    return _find_score_problem([raw.get(key) for key in _SCORES])


def _find_file_problem(name: object, member: str, folder: Path, video: bool) -> str | None:
    if not isinstance(name, str) or not name:
        return f'has no text under "{member}"'
    if os.path.splitext(name)[1].lower() not in media_suffixes(video=video):
        return f"names {printable(name)} as {member}, which is of a kind that is not read"
    if not _place(folder, name).is_file():
        return f"names {printable(name)} as {member}, which is not there"
    return None


def _find_score_problem(scores: Sequence[object]) -> str | None:
    if scores == [None, None]:
        return None
    numbers = [value for value in scores if isinstance(value, int | float) and not isinstance(value, bool)]
    shown = " and ".join(json.dumps(value, default=str) for value in scores)
    if len(numbers) != 2:
        return f"has {shown} as {' and '.join(_SCORES)}; allowed: two numbers, or neither"
    if not numbers[0] >= numbers[1]:
        return f"has {shown} as {' and '.join(_SCORES)}: the rejected one is better"
    return None


def _place(folder: Path, name: str) -> Path:
    return folder / Path(name).expanduser()


def _to_pairs(row: Mapping[str, str], source: str) -> tuple[Pair, Pair]:
    chosen, rejected = (os.path.expanduser(row[member]) for member in _MEMBERS)
    about = (row["prompt"], source)
    return tuple(Pair(printable(os.path.splitext(name)[0]), name, *about) for name in (chosen, rejected))  # pyright: ignore[reportReturnType]
