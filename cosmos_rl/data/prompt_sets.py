"""Prompt sets by name, which are fetched once, and the prompts or captioned videos that a `dataset` table names."""

import contextlib
import difflib
import io
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.data.pair_files import has_video_layout
from cosmos_rl.data.prompts import SUFFIXES, PromptRecord, parse_prompts, read_prompts
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import DatasetConfig
from cosmos_rl.storage.atomic import write_bytes
from cosmos_rl.storage.locks import hold_lock
from cosmos_rl.utils.logging import logger

_DEFAULT_CACHE = "~/.cache/cosmos_rl"
_NFT = "https://raw.githubusercontent.com/NVlabs/DiffusionNFT/main/dataset"
_VIDEO_PROMPTS = "https://raw.githubusercontent.com/XueZeyue/DanceGRPO/main/assets/video_prompts.txt"
_WAIT_S = 300.0
"""Seconds to wait for another process that fetches the same file."""
_FETCH_S = 120.0
"""Seconds that a download may take."""
_LARGEST = 64 * 2**20
"""Bytes; the largest of the sets has 3 MB."""
_MOCK, _MOCK_PROMPTS, _MOCK_SIDE = "mock", 16, 64
"""The set of random images, how many it has, and their side in pixels."""


@dataclass(frozen=True)
class _Known:
    """A prompt set that others publish."""

    file: str
    """Its file name, with the split in braces."""
    urls: dict[str, str]
    """Split -> where it is published."""


def _known_nft_set(name: str, file: str) -> _Known:
    return _Known(file, {split: f"{_NFT}/{name}/{file.format(split=split)}" for split in ("train", "test")})


KNOWN = {
    "pickscore": _known_nft_set("pickscore", "{split}.txt"),
    "ocr": _known_nft_set("ocr", "{split}.txt"),
    "geneval": _known_nft_set("geneval", "{split}_metadata.jsonl"),
    "dance_grpo_t2v": _Known("{split}.txt", {"train": _VIDEO_PROMPTS, "test": _VIDEO_PROMPTS}),
    _MOCK: _Known("{split}.jsonl", {"train": "", "test": ""}),
}
"""Prompt sets by `dataset.name`."""


def load_prompts(dataset: DatasetConfig, key: str, *, split: str) -> list[PromptRecord]:
    """The prompts that the table ``key`` asks for: those of ``local_dir``, else the set ``name``.

    Args:
        dataset: the table.
        key: its dotted name, for messages.
        split: which split to take when the table names none.

    Raises:
        UserError: nothing is named, an unknown set, a file that is missing or wrong, or a failed download.
    """
    found = prompt_file(dataset, key, split=split)
    if found is not None:
        return read_prompts(found)
    split, known = _choose_split(dataset, split), KNOWN[dataset.name]
    path = _list_places(dataset.name, split)[0]
    if split not in known.urls:
        raise UserError(
            f'{key}.split: found "{split}"; allowed: one of {", ".join(known.urls)}, or put your own into {path}'
        )
    if dataset.name == _MOCK:
        return _make_mock(path)
    return _fetch(known.urls[split], path)


def prompt_file(dataset: DatasetConfig, key: str, *, split: str) -> Path | None:
    """The file that `load_prompts` would read; None for a named set that has not been fetched yet.

    Raises:
        UserError: nothing is named, an unknown set, or no such file.
    """
    split = _choose_split(dataset, split)
    if dataset.local_dir:
        return _find_own_file(Path(dataset.local_dir).expanduser(), split, f"{key}.local_dir")
    if not dataset.name:
        raise UserError(f"{key}.name: missing; allowed: one of {', '.join(KNOWN)}, or give a file as {key}.local_dir")
    if dataset.name not in KNOWN:
        near = difflib.get_close_matches(dataset.name, KNOWN, n=1)
        hint = "".join(f"; did you mean {name}?" for name in near[:1])
        raise UserError(f'{key}.name: found "{dataset.name}"; allowed: one of {", ".join(KNOWN)}{hint}')
    return next((path for path in _list_places(dataset.name, split) if path.is_file()), None)


def _choose_split(dataset: DatasetConfig, default: str) -> str:
    splits = [dataset.split] if isinstance(dataset.split, str) else dataset.split
    return next(iter(splits), "") or default


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
    if found is None and has_video_layout(path):
        return path
    if found is None:
        raise UserError(
            f'{key} = "{path}": no prompts there for the split "{split}"; expected {" or ".join(names)}, '
            "or the folders metas and videos"
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


def _fetch(url: str, path: Path) -> list[PromptRecord]:
    """Download a prompt file unless another process has done so meanwhile; only a whole and readable one is kept."""
    import httpx  # late: a tenth of a second, and only a download needs it

    with _lock_download(path):
        if path.is_file():
            return read_prompts(path)
        logger.info("fetching %s", url)
        try:
            content = _download(url)
            text = content.decode("utf-8-sig")
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise UserError(
                f"{path} is not there, and {url} cannot be fetched ({type(error).__name__}: {error}); without a "
                "network, copy the file to that place yourself"
            ) from error
        records = parse_prompts(text, url, path.suffix)
        write_bytes(path, content)
        return records


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
