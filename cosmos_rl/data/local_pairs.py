"""A flat folder of pairs ``<name>.json`` (``{"prompt": "..."}``) and ``<name>.jpg|.jpeg|.png|.webp``."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from cosmos_rl.data.images import SUFFIXES, load_picture
from cosmos_rl.data.items import Item
from cosmos_rl.errors import UserError
from cosmos_rl.utils.logging import logger

_SHOWN = 20
_MAX_SKIPPED_SHARE = 0.5
_DECODED_BYTES = 256 * 2**20
"""Decoded pictures up to this size are kept: a small data set is decoded once, a large one hardly notices."""


@dataclass(frozen=True)
class Pair:
    """One picture and its caption."""

    name: str
    picture: Path
    prompt: str


def expected_layout() -> str:
    """One sentence that says what a folder of pairs looks like."""
    return f'expected a flat folder of pairs <name>.json ({{"prompt": "..."}}) and <name>{"|".join(SUFFIXES)}'


def scan_pairs(folder: Path) -> tuple[list[Pair], list[str]]:
    """Pairs in ``folder`` sorted by name, and one line for each caption or picture that has no partner or is invalid.

    Raises:
        UserError: the folder does not exist or holds no usable pair.
    """
    if not folder.is_dir():
        raise UserError(f"{folder.absolute()}: no such folder; {expected_layout()}")
    files = sorted(entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))
    pictures: dict[str, list[Path]] = {}
    for path in files:
        if path.suffix.lower() in SUFFIXES:
            pictures.setdefault(path.name.removesuffix(path.suffix), []).append(path)
    pairs, problems = [], []
    captions = [path for path in files if path.suffix == ".json"]
    for caption in captions:
        name = caption.name.removesuffix(".json")
        found = pictures.pop(name, [])
        prompt, problem = _read_prompt(caption)
        if len(found) != 1:
            problem = problem or ("has no picture" if not found else f"has {len(found)} pictures")
        if problem is None and prompt is not None:
            pairs.append(Pair(name, found[0], prompt))
        else:
            problems.append(f"{caption.name}: {problem}")
    problems += [
        f"{path.name}: has no caption {name}.json" for name, paths in sorted(pictures.items()) for path in paths
    ]
    if not pairs:
        raise UserError(f"{folder.absolute()}: no usable pair; {expected_layout()}; found {_summary(folder)}")
    return pairs, problems


def _read_prompt(caption: Path) -> tuple[str | None, str | None]:
    """(prompt, None) or (None, what is wrong)."""
    try:
        content = json.loads(caption.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        return None, f"is not valid JSON ({error})"
    if not isinstance(content, dict) or not isinstance(content.get("prompt"), str):
        return None, 'has no string under the key "prompt"'
    return content["prompt"], None


def _summary(folder: Path) -> str:
    """What the folder holds, by kind: ``3 .txt, 2 folders (metas, videos)``."""
    entries = sorted(folder.iterdir())
    kinds = Counter(entry.suffix or entry.name for entry in entries if entry.is_file())
    parts = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
    folders = [entry.name for entry in entries if entry.is_dir()]
    if folders:
        parts.append(f"{len(folders)} folders ({', '.join(folders[:5])})")
    return ", ".join(parts) or "nothing"


class LocalPairs(Sequence[Item]):
    """Data set of captioned pictures; pictures are decoded when they are asked for."""

    def __init__(self, folder: str | Path, height: int, width: int) -> None:
        """Read all captions of ``folder``; pictures come out as ``[3, height, width]``.

        Raises:
            UserError: no usable pair, or more captions and pictures without a partner than pairs.
        """
        self.folder = Path(folder).expanduser()
        self._size = (height, width)
        self._decoded: dict[int, Tensor] = {}
        self.pairs, self.problems = scan_pairs(self.folder)
        if self.problems:
            lines = "\n  ".join(self.problems[:_SHOWN])
            text = (
                f"{self.folder}: {len(self.problems)} files are left out ({len(self.pairs)} pairs are used):\n  {lines}"
            )
            if len(self.problems) > _SHOWN:
                text += f"\n  and {len(self.problems) - _SHOWN} more"
            if len(self.problems) > _MAX_SKIPPED_SHARE * (len(self.pairs) + len(self.problems)):
                raise UserError(f"{text}\nMore is left out than used; {expected_layout()}")
            logger.warning(text)

    @property
    def prompts(self) -> list[str]:
        """All captions, in the order of the pairs; no picture is decoded for them."""
        return [pair.prompt for pair in self.pairs]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        pair = self.pairs[index]
        visual = self._decoded.get(index)
        if visual is None:
            visual = load_picture(pair.picture, *self._size)
            if (len(self._decoded) + 1) * visual.nbytes <= _DECODED_BYTES:
                self._decoded[index] = visual
        return Item(visual=visual, prompt=pair.prompt, name=pair.name)
