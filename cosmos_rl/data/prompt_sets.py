"""Prompt sets by name, which are fetched once, and the prompts or captioned videos that a `dataset` table names."""

import contextlib
import difflib
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cosmos_rl.data.pair_files import has_video_layout
from cosmos_rl.data.prompts import SUFFIXES, PromptRecord, read_prompts
from cosmos_rl.data.published import PUBLISHED, PublishedFile, PublishedSet, find_difference
from cosmos_rl.data.shards import find_shards
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import DatasetConfig, PromptSetConfig
from cosmos_rl.storage.atomic import write_bytes
from cosmos_rl.storage.locks import hold_lock
from cosmos_rl.utils.logging import logger

_DEFAULT_CACHE = "~/.cache/cosmos_rl"
_WAIT_S = 300.0
"""Seconds to wait for another process that fetches the same file."""
_FETCH_S = 120.0
"""Seconds that a download may take."""
_LARGEST = 64 * 2**20
"""Bytes; the largest of the sets has 3 MB."""
_MOCK, _MOCK_PROMPTS, _MOCK_SIDE = "mock", 16, 64
"""The set of random images, how many it has, and their side in pixels."""

PromptSource = DatasetConfig | PromptSetConfig
"""A table that names one set of prompts."""

KNOWN = {**PUBLISHED, _MOCK: PublishedSet("{split}.jsonl", {})}
"""Prompt sets by `dataset.name`."""


def load_prompts(dataset: DatasetConfig, key: str, *, split: str) -> list[PromptRecord]:
    """The prompts that the table ``key`` asks for: those of ``local_dir``, else of the set ``name``, or one after the
    other those of several ``sets``, each record with the number of its set.

    Args:
        dataset: the table.
        key: its dotted name, for messages.
        split: which split to take when the table names none.

    Raises:
        UserError: nothing is named, an unknown set, a file that is missing or wrong, or a failed download.
    """
    if not dataset.sets:
        return _load_one(dataset, key, split)
    numbered = enumerate(list_sources(dataset, key))
    return [one for number, (source, place) in numbered for one in _load_numbered(source, place, split, number)]


def list_sources(dataset: DatasetConfig, key: str) -> Sequence[tuple[PromptSource, str]]:
    """Each table that names prompts, and its dotted name: those of ``sets``, or ``dataset`` itself."""
    if dataset.sets:
        return [(one, f"{key}.sets.{number}") for number, one in enumerate(dataset.sets)]
    return [(dataset, key)]


def _load_numbered(source: PromptSource, key: str, split: str, number: int) -> list[PromptRecord]:
    try:
        return [replace(record, prompt_set=number) for record in _load_one(source, key, split)]
    except UserError as error:
        raise UserError(name_set(error, key)) from error


def name_set(error: UserError, key: str) -> str:
    """The message about the prompts that the table ``key`` names, with the name of the table."""
    message = str(error)
    return message if message.startswith(key) else f"{key}: {message}"


def _load_one(dataset: PromptSource, key: str, split: str) -> list[PromptRecord]:
    found = prompt_file(dataset, key, split=split)
    if found is not None:
        return read_prompts(found)
    split = dataset.first_split or split
    path = _list_places(dataset.name, split)[0]
    if dataset.name == _MOCK:
        return _make_mock(path)
    return _fetch(PUBLISHED[dataset.name].splits[split], path)


def list_splits(name: str) -> list[str]:
    """The splits that a named set has."""
    return list(KNOWN[name].splits) or ["train", "test"]


def prompt_file(dataset: PromptSource, key: str, *, split: str) -> Path | None:
    """The file that `load_prompts` would read; None for a named set that has not been fetched yet.

    Raises:
        UserError: nothing is named, an unknown set or split, no such file, or another one than is published.
    """
    split = dataset.first_split or split
    if dataset.local_dir:
        return _find_own_file(Path(dataset.local_dir).expanduser(), split, f"{key}.local_dir")
    if not dataset.name:
        raise UserError(f"{key}.name: missing; allowed: one of {', '.join(KNOWN)}, or give a file as {key}.local_dir")
    _require_known(dataset.name, f"{key}.name")
    found = find_kept(dataset.name, split)
    published = KNOWN[dataset.name].splits.get(split)
    if found is None and split not in list_splits(dataset.name):
        raise UserError(
            f'{key}.split: found "{split}"; allowed: one of {", ".join(list_splits(dataset.name))}, or put your own '
            f"into {_list_places(dataset.name, split)[0]}"
        )
    if found is not None and published is not None:
        _require_published(published, found)
    return found


def _require_known(name: str, key: str) -> None:
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, n=1)
        hint = "".join(f"; did you mean {one}?" for one in near)
        raise UserError(f'{key}: found "{name}"; allowed: one of {", ".join(KNOWN)}{hint}')


def _require_published(published: PublishedFile, path: Path) -> None:
    if difference := find_difference(published, read_bytes(path)):
        raise UserError(
            f"{path}: {difference}; move it away, then the published one is fetched, or set local_dir = "
            f'"{path}" in place of name to use this one'
        )


def find_kept(name: str, split: str) -> Path | None:
    """Where a split of a named set lies, whatever is in it; None: it has not been fetched."""
    return next((path for path in _list_places(name, split) if path.is_file()), None)


def read_bytes(path: Path) -> bytes:
    """The content of a file of prompts.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path.absolute()}: cannot be read ({error.strerror or error})") from error


def fetch_set(name: str, key: str) -> dict[str, list[PromptRecord]]:
    """All splits of a named set, each fetched or made where it is not there.

    Raises:
        UserError: no such set, a failed download, or another file than is published.
    """
    _require_known(name, key)
    tables = {split: DatasetConfig(name=name, split=split) for split in list_splits(name)}
    return {split: load_prompts(table, key, split=split) for split, table in tables.items()}


def _list_places(name: str, split: str) -> list[Path]:
    """Where a named set may lie; the first is where it is put when it is fetched."""
    set_in = os.environ.get("COSMOS_CACHE_DIR") or _DEFAULT_CACHE
    roots = dict.fromkeys((set_in, _DEFAULT_CACHE))
    return [Path(root).expanduser() / "diffusion_nft" / name / KNOWN[name].file.format(split=split) for root in roots]


def _find_own_file(path: Path, split: str, key: str) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f'{key} = "{path}": {path.absolute()} does not exist; give a file or a folder of prompts')
    names = [f"{split}{suffix}" for suffix in SUFFIXES] + [f"{split}_metadata.jsonl"]
    found = next((path / name for name in names if (path / name).is_file()), None)
    if found is None and (has_video_layout(path) or find_shards(path) is not None):
        return path
    if found is None:
        raise UserError(
            f'{key} = "{path}": no prompts there for the split "{split}"; expected {" or ".join(names)}, '
            "or the folders metas and videos, or tars of videos"
        )
    return found


def _make_mock(path: Path) -> list[PromptRecord]:
    """Prompts that start from images of noise, to try a setup without data."""
    import numpy as np  # late, as in `_fetch`
    from PIL import Image

    with _lock_download(path):
        if path.is_file():
            return read_prompts(path)
        rows, random = [], np.random.default_rng(0)
        for number in range(_MOCK_PROMPTS):
            pixels = random.integers(0, 256, (_MOCK_SIDE, _MOCK_SIDE, 3), dtype=np.uint8)
            content = io.BytesIO()
            Image.fromarray(pixels).save(content, "PNG")
            write_bytes(path.with_name(f"{number}.png"), content.getvalue())
            rows.append(json.dumps({"prompt": f"placeholder {number}", "image": f"{number}.png"}))
        write_bytes(path, "\n".join(rows).encode())
    return read_prompts(path)


def _fetch(published: PublishedFile, path: Path) -> list[PromptRecord]:
    """Download a prompt file unless another process has done so meanwhile; only the published one is kept."""
    import httpx  # late: a tenth of a second, and only a download needs it

    url = published.url

    with _lock_download(path):
        if path.is_file():
            _require_published(published, path)
            return read_prompts(path)
        logger.info("fetching %s", url)
        try:
            content = _download(url)
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise UserError(
                f"{path} is not there, and {url} cannot be fetched ({type(error).__name__}: {error}); without a "
                "network, copy the file to that place yourself"
            ) from error
        if difference := find_difference(published, content):
            raise UserError(
                f"{url}: what was received {difference}; it was not kept: try again, and if it stays so, put the "
                "published file into "
                f"{path}, or set local_dir to a file of your own"
            )
        write_bytes(path, content)
    return read_prompts(path)


def _download(url: str) -> bytes:
    import httpx

    parts, size, until = [], 0, time.monotonic() + _FETCH_S
    with httpx.stream("GET", url, follow_redirects=True, timeout=20.0) as answer:
        answer.raise_for_status()
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > _LARGEST or time.monotonic() > until:
                raise ValueError(f"larger than {_LARGEST} bytes or slower than {_FETCH_S:g} s")
        expected = answer.headers.get("content-length")
        if expected and "content-encoding" not in answer.headers and int(expected) != size:
            raise ValueError(f"received only {size} of {expected} bytes")
    return b"".join(parts)


@contextlib.contextmanager
def _lock_download(path: Path) -> Iterator[None]:
    """Within the block no other process on this machine fetches ``path``; the end of the process frees it too."""
    lock = path.with_name(f".{path.name}.lock")
    stuck = f"{path}: another process has been fetching it for {_WAIT_S:g} s; is it stuck?"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(lock, _WAIT_S, stuck))
        except OSError as error:
            raise UserError(f"{lock.parent}: cannot be written ({error.strerror}); set COSMOS_CACHE_DIR") from error
        yield
