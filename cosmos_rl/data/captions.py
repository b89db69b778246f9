"""Captions of images and videos on disk: files alongside them, and one table for all. No torch."""

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cosmos_rl.data.tar_files import open_member, split_member
from cosmos_rl.data.texts import find_prompt_problem, find_text_problem, parse_json, printable
from cosmos_rl.errors import explain_decoding
from cosmos_rl.text_files import decode_text

CAPTION_SUFFIXES = (".json", ".txt", ".caption")
"""Endings of the files with one caption each."""
TABLES = ("metadata.jsonl", "metadata.csv")
"""Names of the files with a caption for each of many images or videos."""
_FILE_KEYS = ("file_name", "image", "video", "media_path")
_TEXT_KEYS = ("prompt", "text", "caption")
_LARGEST_CAPTION = 2**20
"""Bytes of a caption file."""
_READ_AT_ONCE = 2**13


class Caption(NamedTuple):
    """What a caption file says."""

    prompt: str
    image: str = ""
    """The image that is edited, for models that edit images: its file, relative to the folder."""


class Row(NamedTuple):
    """A line of a table."""

    source: str
    """For messages: ``metadata.csv, line 3``."""
    file: str
    """The image or video, relative to the folder."""
    caption: Caption


def read_caption(path: str) -> tuple[Caption | None, str | None]:
    """(what a caption file says, None) or (None, what is wrong).

    ``.json`` holds ``{"prompt": "..."}`` and perhaps ``image``; without ``prompt`` its ``text`` or ``caption`` counts.
    In other files the whole text counts, its lines joined by spaces.
    """
    try:
        content = _read_bytes(path)
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    if len(content) > _LARGEST_CAPTION:
        return None, f"is not a caption: it has more than {_LARGEST_CAPTION} bytes"
    if not path.lower().endswith(".json"):
        return _read_plain_text(content)
    row, problem = parse_json(content)
    if isinstance(row, Mapping) and _TEXT_KEYS[0] not in row:
        texts = {text for key in _TEXT_KEYS if isinstance(text := row.get(key), str)}
        row = {**row, _TEXT_KEYS[0]: texts.pop()} if len(texts) == 1 else row
    problem = problem or find_prompt_problem(row)
    if problem is not None or not isinstance(row, Mapping):
        return None, problem
    return Caption(row["prompt"], _find_image(row)), None


def _find_image(row: Mapping[str, object]) -> str:
    image = row.get("image")
    if isinstance(image, str) and image.strip() and find_text_problem(image) is None:
        return image
    return ""


def _read_plain_text(content: bytes) -> tuple[Caption | None, str | None]:
    try:
        text = decode_text(content)
    except UnicodeDecodeError as error:
        return None, explain_decoding(error)
    text = " ".join(line.strip() for line in text.splitlines() if line.strip())
    problem = find_prompt_problem({_TEXT_KEYS[0]: text})
    if problem is not None:
        return None, problem
    return Caption(text), None


def _read_bytes(caption: str) -> bytes:
    """A little more than a caption may have, at most. File objects would take half the time of a large folder."""
    place = split_member(caption)
    if place is not None:
        with open_member(*place) as file:
            return file.read(_LARGEST_CAPTION + 1)
    fd = os.open(caption, os.O_RDONLY)
    try:
        content = b""
        while len(content) <= _LARGEST_CAPTION and (part := os.read(fd, _READ_AT_ONCE)):
            content += part
        return content
    finally:
        os.close(fd)


def read_table(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of ``metadata.jsonl`` or ``metadata.csv``, and one line for each that cannot be used."""
    rows, problems = [], []
    try:
        text = decode_text(path.read_bytes())
    except UnicodeDecodeError as error:
        return [], [f"{path.name}: {explain_decoding(error)}"]
    except OSError as error:
        return [], [f"{path.name}: cannot be read ({error})"]
    lines = _csv_lines(text) if path.suffix == ".csv" else _json_lines(text)
    for number, raw in lines:
        source = f"{path.name}, line {number}"
        row, problem = _to_row(source, raw)
        if row is None:
            problems.append(f"{source}: {problem}")
        else:
            rows.append(row)
    return rows, problems


def _csv_lines(text: str) -> Iterator[tuple[int, object]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for raw in reader:
            yield reader.line_num, raw
    except csv.Error as error:
        yield reader.line_num, f"is not CSV ({error})"


def _json_lines(text: str) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            raw, problem = parse_json(line)
            yield number, problem or raw


def _to_row(source: str, raw: object) -> tuple[Row | None, str]:
    if isinstance(raw, str):
        return None, raw  # what is wrong with the line
    if not isinstance(raw, Mapping):
        return None, f"is not an object with {_FILE_KEYS[0]} and {_TEXT_KEYS[0]}"
    values = {key: value for key, value in raw.items() if isinstance(value, str) and value.strip()}
    image = ""
    if _FILE_KEYS[0] in values and values.get("image", values[_FILE_KEYS[0]]) != values[_FILE_KEYS[0]]:
        image = values.pop("image")
    files = {values[key] for key in _FILE_KEYS if key in values}
    texts = {values[key].strip() for key in _TEXT_KEYS if key in values}
    for found, keys in ((files, _FILE_KEYS), (texts, _TEXT_KEYS)):
        if len(found) != 1:
            count = "no text" if not found else f"{len(found)} different texts"
            shown = printable(json.dumps(list(raw)[:5], default=str, ensure_ascii=False))
            return None, f"has {count} under {', '.join(keys)}; its keys: {shown}"
    file, prompt = files.pop(), texts.pop()
    if os.path.isabs(file) or ".." in Path(file).parts:
        return None, f"{printable(file)} is not a path within the folder"
    problem = find_text_problem(prompt)
    if problem is not None:
        return None, problem
    return Row(source, os.path.normpath(file), Caption(prompt, image)), ""
