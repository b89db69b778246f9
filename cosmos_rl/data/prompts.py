"""Lists of prompts without images: what a record of one is, and the files they are read from."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cosmos_rl.data.pair_files import load_pairs
from cosmos_rl.data.shards import find_root, is_shard_file
from cosmos_rl.data.texts import find_prompt_problem, find_text_problem, parse_json, printable
from cosmos_rl.errors import UserError, explain_decoding
from cosmos_rl.text_files import read_text

_FORMS = {
    ".txt": "one prompt a line",
    ".jsonl": 'a line per prompt like {"prompt": "..."}',
    ".json": 'a JSON list of objects like {"prompt": "..."}',
    ".tsv": 'columns between tabs, of which the first line names one "prompt"',
}
SUFFIXES = tuple(_FORMS)
"""Endings of the files that `read_prompts` reads."""
_SHOWN = 10
"""Rows that a message names."""
_SAMPLING_KEYS = ("negative_prompt", "seed")
"""Keys of a row that say how its validation images are sampled."""
BEGINNING = "first_frames_of"
"""Key of a row that names a video which its samples may begin like."""
MEDIA_KEYS = ("image", "video", BEGINNING)
"""Keys of a row that name a file, relative to the file of prompts."""
_NUMBERS = ("seed", "height", "width")
"""Keys of a row that have whole numbers, which a file of columns writes as text."""
_MOST_SEED = 2**63


@dataclass(frozen=True)
class PromptRecord:
    """A prompt and what is known about it."""

    prompt: str
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What the rewards get in addition to the text, such as the objects that an image of `geneval` has to show."""
    folder: Path | None = field(default=None, compare=False)
    """Where files that the metadata name are, if their paths are relative."""
    place: str = field(default="", compare=False)
    """File and line of the prompt, for messages."""
    prompt_set: int = 0
    """Index in ``train.train_policy.dataset.sets``; 0 where there is one set."""

    @property
    def negative_prompt(self) -> str:
        """What guidance leads away from in validation."""
        return self.metadata.get("negative_prompt") or ""

    @property
    def seed(self) -> int | None:
        """Seed of the start noise of the first validation image; the k-th after it has seed + k. None: the run's."""
        return self.metadata.get("seed")


class PromptFile(Sequence[str]):
    """The texts of a file of prompts."""

    def __init__(self, path: str | Path) -> None:
        """Read the whole file.

        Raises:
            UserError: as `read_prompts`.
        """
        self.path = Path(path).expanduser()
        self.records = read_prompts(self.path)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.records[index].prompt


def digest_prompts(records: Sequence[PromptRecord]) -> str:
    """12 hex digits of the SHA-256 of all texts and metadata, in order."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record.prompt, dict(record.metadata)], sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:12]


def find_file(record: PromptRecord) -> Path | None:
    """The image or the video that a record names; None: it names none."""
    for key in MEDIA_KEYS:
        named = record.metadata.get(key)
        if isinstance(named, str) and named:
            return (record.folder or Path()) / Path(named).expanduser()
    return None


def check_sampling(records: Sequence[PromptRecord], guidance: float) -> None:
    """Raise `UserError` when a record says how its validation images are sampled, and that cannot be done."""
    for number, record in enumerate(records):
        what = f"validation prompt {number} ({printable(record.prompt[:40])!r})"
        negative, seed = (record.metadata.get(key) for key in _SAMPLING_KEYS)
        if negative is not None and not isinstance(negative, str):
            raise UserError(f"{what}: negative_prompt: found {negative!r}; allowed: a text")
        if negative and guidance <= 1.0:
            raise UserError(
                f"{what}: negative_prompt acts through guidance, and policy.diffusers.sample.guidance_scale = "
                f"{guidance:g} switches that off; raise it above 1, or leave the key out"
            )
        whole = isinstance(seed, int) and not isinstance(seed, bool)
        if seed is not None and not (whole and 0 <= seed < _MOST_SEED):
            raise UserError(f"{what}: seed: found {seed!r}; allowed: a whole number from 0 on, below 2^63")


def find_unused_keys(records: Sequence[PromptRecord], *, used: Sequence[str] = _SAMPLING_KEYS) -> list[str]:
    """Keys of rows other than ``prompt`` and ``used``, sorted."""
    return sorted({key for record in records for key in record.metadata} - set(used))


def find_sampling_keys(records: Sequence[PromptRecord]) -> list[str]:
    """Those of the keys that act in validation alone which a record has."""
    return [key for key in _SAMPLING_KEYS if any(key in record.metadata for record in records)]


def locate_metadata(records: Sequence[PromptRecord]) -> list[tuple[str, Mapping[str, Any]]]:
    """Where each prompt stands, and its metadata."""
    return [(one.place or f"prompt {number}", one.metadata) for number, one in enumerate(records)]


def to_prompt_record(raw: object, index: int) -> PromptRecord:
    """An element of any data set of prompts: a text, a record, or a mapping with ``prompt``.

    The other keys of a mapping become the metadata, or what stands under ``metadata`` when that is a mapping itself.

    Raises:
        UserError: the element has another form.
    """
    if isinstance(raw, PromptRecord | str):
        record = PromptRecord(raw) if isinstance(raw, str) else raw
        _check_texts(record, f"data set element {index}")
        return record
    if not isinstance(raw, Mapping) or not isinstance(raw.get("prompt"), str):
        found = sorted(map(str, raw)) if isinstance(raw, Mapping) else type(raw).__name__
        raise UserError(f'data set element {index}: need a text or a mapping with a text "prompt", found {found}')
    record = _from_mapping(raw, f"data set element {index}")
    _check_texts(record, f"data set element {index}")
    return record


def _from_mapping(row: Mapping[str, Any], place: str) -> PromptRecord:
    rest = {key: value for key, value in row.items() if key != "prompt"}
    metadata = rest.pop("metadata", None)
    if isinstance(metadata, Mapping):
        rest |= metadata
    elif metadata is not None:
        rest["metadata"] = metadata
    return PromptRecord(row["prompt"], MappingProxyType(rest), place=place)


def is_prompt_file(where: str | Path) -> bool:
    """Whether validation data at ``where`` is a list of prompts, not a folder of pairs."""
    path = Path(where).expanduser()
    if is_shard_file(path):
        return False
    # those of Path raise below a folder that may not be entered
    return os.path.isfile(path) or (path.suffix in _FORMS and not os.path.isdir(path))


def read_prompts(path: str | Path) -> list[PromptRecord]:
    """The prompts of a ``.txt`` (one a line), ``.jsonl``, ``.json`` or ``.tsv`` file in order; blank lines are dropped.

    Of a folder or tars of captioned videos the captions, each with its video.

    Raises:
        UserError: no such file, another form, or no prompt in it; the message names the line.
    """
    path = Path(path).expanduser()
    if path.is_dir() or is_shard_file(path):
        pairs, _, _ = load_pairs(path, video=True)
        rows = [PromptRecord(pair.prompt, MappingProxyType({BEGINNING: pair.file})) for pair in pairs]
        return [replace(record, folder=find_root(path).absolute()) for record in rows]
    if path.suffix not in _FORMS:
        raise UserError(
            f"{printable(str(path.absolute()))}: is not a prompt file; known endings: {', '.join(SUFFIXES)}"
        )
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path.absolute()}: {explain_decoding(error)}; expected {_FORMS[path.suffix]}") from error
    except OSError as error:
        why = error.strerror or str(error)
        expected = f"expected {_FORMS[path.suffix]}"
        raise UserError(f"{path.absolute()}: cannot be read ({why}); {expected}") from error
    records = parse_prompts(text, str(path.absolute()), path.suffix)
    return [replace(record, folder=path.absolute().parent) for record in records]


def parse_prompts(text: str, name: str, suffix: str) -> list[PromptRecord]:
    """What `read_prompts` makes of the ``text`` of the file ``name``, whose ending ``suffix`` says its form."""
    expected = f"expected {_FORMS[suffix]}"
    rows: list[tuple[str, Any]]
    if suffix == ".txt":
        rows = [(f"line {i}", {"prompt": line.strip()}) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    elif suffix == ".jsonl":  # not splitlines: JSON may hold other line separators
        lines = ((f"line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip())
        rows = [(where, _parse_line(line, f"{name}, {where}", expected)) for where, line in lines]
    elif suffix == ".tsv":
        rows = _parse_columns(text)
    else:
        content = _parse_line(text, name, expected)
        if not isinstance(content, list):
            raise UserError(f"{name}: holds no list of prompts; {expected}")
        rows = [(f"row {number}", row) for number, row in enumerate(content)]
    if not rows:
        raise UserError(f"{name}: holds no list of prompts: it is empty; {expected}")
    _refuse_wrong(rows, name, expected)
    return [_from_mapping(row, f"{name}, {where}") for where, row in rows]


def _parse_columns(text: str) -> list[tuple[str, Any]]:
    """Rows by the names in the first line, in lower case; nothing is quoted, and what is empty is left out."""
    lines = [(number, line.rstrip("\r").split("\t")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    names = [name.strip().lower() for name in lines[0][1]] if lines else []
    rows = []
    for number, values in lines[1:]:
        cells = [(name, value.strip()) for name, value in zip(names, values, strict=False)]
        rows.append((f"line {number}", {name: _read_cell(name, value) for name, value in cells if value}))
    return rows


def _read_cell(name: str, value: str) -> str | int:
    """Whole numbers where a row's key has one; any other text is left for the checks of the key."""
    if name in _NUMBERS and value.isascii() and value.isdigit():
        return int(value)
    return value


def _refuse_wrong(rows: Sequence[tuple[str, Any]], name: str, expected: str) -> None:
    """Raise `UserError` that names the rows without a usable text, with what is wrong with the first."""
    wrong = [(where, why) for where, row in rows if (why := _find_problem(row)) is not None]
    if not wrong:
        return
    where_wrong, more = ", ".join(where for where, _ in wrong[:_SHOWN]), ""
    if len(wrong) > _SHOWN:
        more = f" and {len(wrong) - _SHOWN} more"
    first, why = wrong[0]
    raise UserError(f'{name}: no text under "prompt" in {where_wrong}{more}; {expected} ({first} {why})')


def _find_problem(row: object) -> str | None:
    """What is wrong with a row; any other text in it must also be one that can be written and sent."""
    problem = find_prompt_problem(row)
    if problem is not None or not isinstance(row, dict):
        return problem
    return find_text_problem(json.dumps(row, ensure_ascii=False))


def _check_texts(record: PromptRecord, what: str) -> None:
    for text in (record.prompt, *(v for v in record.metadata.values() if isinstance(v, str))):
        problem = find_text_problem(text)
        if problem is not None:
            raise UserError(f"{what}: {printable(record.prompt[:40])!r}: {problem}")


def _parse_line(text: str, name: str, expected: str) -> object:
    content, problem = parse_json(text)
    if problem is not None:
        raise UserError(f"{name}: {problem}; {expected}")
    return content
