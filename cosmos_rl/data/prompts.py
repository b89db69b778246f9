"""Lists of prompts without pictures: what a record of one is, and the files they are read from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cosmos_rl.data.texts import parse_json, printable, prompt_problem, text_problem
from cosmos_rl.errors import UserError

_FORMS = {
    ".txt": "one prompt a line",
    ".jsonl": 'a line per prompt like {"prompt": "..."}',
    ".json": 'a JSON list of objects like {"prompt": "..."}',
}
SUFFIXES = tuple(_FORMS)
"""Endings of the files that `read_prompts` reads."""
_SHOWN = 10
"""Rows that a message names."""


@dataclass(frozen=True)
class PromptRecord:
    """A prompt and what is known about it."""

    prompt: str
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What the rewards get beside the text, such as the objects that a picture of `geneval` has to show."""


class PromptFile(Sequence[str]):
    """The texts of a file of prompts."""

    def __init__(self, path: str | Path) -> None:
        """Read the whole file.

        Raises:
            UserError: as `read_prompts`.
        """
        self.path = Path(path).expanduser()
        self._prompts = [record.prompt for record in read_prompts(self.path)]

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._prompts[index]


def prompts_digest(records: Sequence[PromptRecord]) -> str:
    """12 hex digits of the SHA-256 of all texts and metadata, in order."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record.prompt, dict(record.metadata)], sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:12]


def as_prompt_record(raw: object, index: int) -> PromptRecord:
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
    record = _of_mapping(raw)
    _check_texts(record, f"data set element {index}")
    return record


def _of_mapping(row: Mapping[str, Any]) -> PromptRecord:
    rest = {key: value for key, value in row.items() if key != "prompt"}
    metadata = rest.pop("metadata", None)
    if isinstance(metadata, Mapping):
        rest |= metadata
    elif metadata is not None:
        rest["metadata"] = metadata
    return PromptRecord(row["prompt"], MappingProxyType(rest))


def read_prompts(path: str | Path) -> list[PromptRecord]:
    """The prompts of a ``.txt`` (one a line), ``.jsonl`` or ``.json`` file in their order; blank lines are dropped.

    Raises:
        UserError: no such file, another form, or no prompt in it; the message names the line.
    """
    path = Path(path).expanduser()
    if path.suffix not in _FORMS:
        raise UserError(
            f"{printable(str(path.absolute()))}: is no file of prompts; known endings: {', '.join(SUFFIXES)}"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        expected = f"expected {_FORMS[path.suffix]}"
        raise UserError(f"{path.absolute()}: cannot be read ({why}); {expected}") from error
    return parse_prompts(text, str(path.absolute()), path.suffix)


def parse_prompts(text: str, name: str, suffix: str) -> list[PromptRecord]:
    """What `read_prompts` makes of the ``text`` of the file ``name``, whose ending ``suffix`` says its form."""
    expected = f"expected {_FORMS[suffix]}"
    rows: list[tuple[str, Any]]
    if suffix == ".txt":
        rows = [(f"line {i}", {"prompt": line.strip()}) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    elif suffix == ".jsonl":  # not splitlines: JSON may hold other line separators
        lines = ((f"line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip())
        rows = [(place, _json(line, f"{name}, {place}", expected)) for place, line in lines]
    else:
        content = _json(text, name, expected)
        if not isinstance(content, list):
            raise UserError(f"{name}: holds no list of prompts; {expected}")
        rows = [(f"row {number}", row) for number, row in enumerate(content)]
    if not rows:
        raise UserError(f"{name}: holds no list of prompts: it is empty; {expected}")
    _refuse_wrong(rows, name, expected)
    return [_of_mapping(row) for _, row in rows]


def _refuse_wrong(rows: Sequence[tuple[str, Any]], name: str, expected: str) -> None:
    """Raise `UserError` that names the rows without a usable text, with what is wrong with the first."""
    wrong = [(place, why) for place, row in rows if (why := _problem(row)) is not None]
    if not wrong:
        return
    places, more = ", ".join(place for place, _ in wrong[:_SHOWN]), ""
    if len(wrong) > _SHOWN:
        more = f" and {len(wrong) - _SHOWN} more"
    first, why = wrong[0]
    raise UserError(f'{name}: no text under "prompt" in {places}{more}; {expected} ({first} {why})')


def _problem(row: object) -> str | None:
    """What is wrong with a row; also a text beside the prompt must be one that can be written and sent."""
    problem = prompt_problem(row)
    if problem is not None or not isinstance(row, dict):
        return problem
    if not row["prompt"].strip():
        return "has an empty text under 'prompt'"
    return text_problem(json.dumps(row, ensure_ascii=False))


def _check_texts(record: PromptRecord, what: str) -> None:
    for text in (record.prompt, *(v for v in record.metadata.values() if isinstance(v, str))):
        problem = text_problem(text)
        if problem is not None:
            raise UserError(f"{what}: {printable(record.prompt[:40])!r}: {problem}")


def _json(text: str, name: str, expected: str) -> object:
    content, problem = parse_json(text)
    if problem is not None:
        raise UserError(f"{name}: {problem}; {expected}")
    return content
