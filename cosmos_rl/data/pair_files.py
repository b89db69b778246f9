"""A flat folder of pairs ``<name>.json`` (``{"prompt": "..."}``) and ``<name>.jpg|.jpeg|.png|.webp``.

Which files belong together, and why a file is left out. No torch: `cosmos-rl check` looks at folders with it.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.data.texts import find_prompt_problem, parse_json, printable
from cosmos_rl.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
"""Endings of images that are read, in lower case."""
_LARGEST_CAPTION = 2**20
"""Bytes of a caption file."""
_READ_AT_ONCE = 2**13
_SHOWN = 20
_SHOWN_WHEN_NONE_IS_LEFT = 5
_MAX_SKIPPED_SHARE = 0.5


@dataclass(frozen=True)
class Pair:
    """One image and its caption."""

    name: str
    file: str
    """The image's name in the folder."""
    prompt: str


def describe_layout() -> str:
    """One sentence that says what a folder of pairs looks like."""
    return f'expected a flat folder of pairs <name>.json ({{"prompt": "..."}}) and <name>{"|".join(SUFFIXES)}'


def scan_pairs(folder: Path) -> tuple[list[Pair], list[str]]:
    """Pairs in ``folder`` sorted by name, and one line for each caption or image that has no partner or is invalid.

    Raises:
        UserError: the folder does not exist or holds no usable pair.
    """
    if not folder.is_dir():
        raise UserError(f"{folder.absolute()}: no such folder; {describe_layout()}")
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file())
    images, others = _group_by_stem(names)
    pairs, problems = [], []
    for caption in (name for name in names if name.endswith(".json")):
        stem = caption.removesuffix(".json")
        found = images.pop(stem, [])
        prompt, problem = _read_prompt(os.path.join(folder, caption))
        if prompt is not None and len(found) == 1:
            pairs.append(Pair(printable(stem), found[0], prompt))
            continue
        if problem is None:
            problem = f"has {len(found)} images"
            if not found:
                problem = "has no image" + _describe_unread(others.get(stem))
        problems.append(f"{printable(caption)}: {problem}")
    problems += [
        f"{printable(name)}: has no caption {printable(stem)}.json" + _describe_unread(others.get(stem))
        for stem, found in sorted(images.items())
        for name in found
    ]
    if not pairs:
        raise UserError(
            f"{folder.absolute()}: no usable pair; {describe_layout()}; found {_summarise(folder)}"
            + _list_problems(problems, _SHOWN_WHEN_NONE_IS_LEFT)
        )
    return pairs, problems


def load_pairs(folder: Path) -> tuple[list[Pair], list[str], str]:
    """`scan_pairs`, and a text about what is left out (empty: nothing is).

    Raises:
        UserError: no usable pair, or more captions and images are left out than pairs used.
    """
    pairs, problems = scan_pairs(folder)
    if not problems:
        return pairs, problems, ""
    text = f"{folder}: {len(problems)} files are left out ({len(pairs)} pairs are used)" + _list_problems(
        problems, _SHOWN
    )
    if len(problems) > _MAX_SKIPPED_SHARE * (len(pairs) + len(problems)):
        raise UserError(f"{text}\nMore files are left out than used; {describe_layout()}")
    return pairs, problems, text


def digest_pairs(pairs: Sequence[Pair]) -> str:
    """16 hex digits of all names and captions."""
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(f"{pair.name}\0{pair.prompt}\0".encode())
    return digest.hexdigest()[:16]


def _group_by_stem(names: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Stem -> the images of that name, and stem -> its files of kinds that are not read."""
    images: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    for name in names:
        stem, dot, ending = name.rpartition(".")
        if ending != "json" or not dot:
            kind = images if dot + ending.lower() in SUFFIXES else others
            kind.setdefault(stem if dot else name, []).append(name)
    return images, others


def _describe_unread(names: Sequence[str] | None) -> str:
    if not names:
        return ""
    return f"; {', '.join(map(printable, names))} is of a kind that is not read"


def _read_prompt(caption: str) -> tuple[str | None, str | None]:
    """(prompt, None) or (None, what is wrong)."""
    try:
        content = _content(caption)
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    if len(content) > _LARGEST_CAPTION:
        return None, f"is not a caption: it has more than {_LARGEST_CAPTION} bytes"
    row, problem = parse_json(content)
    problem = problem or find_prompt_problem(row)
    if problem is not None or not isinstance(row, Mapping):
        return None, problem
    return row["prompt"], None


def _content(caption: str) -> bytes:
    """A little more than a caption may have, at most. File objects would take half the time of a large folder."""
    fd = os.open(caption, os.O_RDONLY)
    try:
        content = b""
        while len(content) <= _LARGEST_CAPTION and (part := os.read(fd, _READ_AT_ONCE)):
            content += part
        return content
    finally:
        os.close(fd)


def _list_problems(problems: Sequence[str], shown: int) -> str:
    """The first problems, a line each."""
    if not problems:
        return ""
    more = ""
    if len(problems) > shown:
        more = f"\n  and {len(problems) - shown} more"
    return ":\n  " + "\n  ".join(problems[:shown]) + more


def _summarise(folder: Path) -> str:
    """What the folder holds, by kind: ``3 .txt, 2 folders (metas, videos)``."""
    entries = sorted(folder.iterdir())
    kinds = Counter(entry.suffix or printable(entry.name) for entry in entries if entry.is_file())
    parts = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
    folders = [printable(entry.name) for entry in entries if entry.is_dir()]
    if folders:
        parts.append(f"{len(folders)} folders ({', '.join(folders[:5])})")
    return ", ".join(parts) or "nothing"
