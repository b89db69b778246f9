"""A folder of captioned images or videos: which files belong together, and why a file is left out.

Captions are files of the same name, rows of one table, or, in the layout of Cosmos-Predict, files of the same name in
the folder ``metas``. The files may be members of tars. No torch: `cosmos-rl check` looks at folders with it.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cosmos_rl.data.captions import CAPTION_SUFFIXES, TABLES, Caption, Row, read_caption, read_table
from cosmos_rl.data.shards import EMBEDDINGS, Member, find_root, find_shards, is_shard_file, list_members
from cosmos_rl.data.tar_files import SUFFIX as TAR
from cosmos_rl.data.texts import printable
from cosmos_rl.errors import UserError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
"""Endings of images that are read, in lower case."""
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
"""Endings of videos that are read, in lower case."""
METAS = "metas"
"""Folder of captions in the layout of Cosmos-Predict."""
_ABOUT_A_TAR = "_stats.json"
"""How img2dataset names what it writes about ``000.tar``: ``000_stats.json``."""
_SHOWN = 20
_SHOWN_WHEN_NONE_IS_LEFT = 5
_MAX_SKIPPED_SHARE = 0.5


class _Kind(NamedTuple):
    """What a folder is read for."""

    word: str
    suffixes: tuple[str, ...]
    folder: str
    """Where the files are in the layout of Cosmos-Predict."""


_IMAGES = _Kind("image", IMAGE_SUFFIXES, "images")
_VIDEOS = _Kind("video", VIDEO_SUFFIXES, "videos")


class Pair(NamedTuple):  # a tuple of texts costs half the time of a dataclass, and there may be a million
    """One image or video and its caption."""

    name: str
    """The stem of the file, with its path in the folder."""
    file: str
    """The image or video, relative to the folder."""
    prompt: str
    caption: str = ""
    """Where the caption was found: a file, or a line of a table."""
    image: str = ""
    """The image that is edited, for models that edit images, relative to the folder; empty: none is named."""


@dataclass
class _Files:
    """What lies in a folder, by stem."""

    media: dict[str, list[str]] = field(default_factory=dict)
    captions: dict[str, list[str]] = field(default_factory=dict)
    others: dict[str, list[str]] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    """By the name of the image or video."""
    lone: dict[str, str] = field(default_factory=dict)
    """What is said of a member of a tar that no sample reads, by its path; one that is edited is read."""

    def add(self, path: str, kind: _Kind, stem: str | None = None) -> None:
        """Sort in a file, by its stem or the given one."""
        own_stem, ending = os.path.splitext(path)
        self.sort_in(Member(stem or own_stem, ending.lower(), path), kind)

    def sort_in(self, file: Member, kind: _Kind) -> None:
        """Put a file to those of its kind."""
        group = self.others
        if file.ending in CAPTION_SUFFIXES:
            group = self.captions
        elif file.ending in kind.suffixes:
            group = self.media
        group.setdefault(file.stem, []).append(file.path)


def _describe_layout(kind: _Kind) -> str:
    """One sentence that says what a folder of pairs looks like."""
    return (
        f"expected {kind.word}s <name>{'|'.join(kind.suffixes)}, each with a caption "
        f'<name>.json ({{"prompt": "..."}}), .txt or .caption; or {" or ".join(TABLES)} with file_name and prompt; '
        f"or the folders {METAS} (<name>.txt) and {kind.folder}; or tars of such files"
    )


def scan_pairs(folder: Path, *, video: bool = False) -> tuple[list[Pair], list[str]]:
    """Pairs of captions and images (or videos) in ``folder`` by name, and one line for each that is left out.

    Raises:
        UserError: the folder does not exist or holds no usable pair.
    """
    kind = _choose_kind(video)
    if not folder.exists():
        raise UserError(f"{folder.absolute()}: no such folder; {_describe_layout(kind)}")
    files, problems = _find_files(folder, kind)
    root = find_root(folder)
    pairs: list[Pair] = []
    for stem in sorted({*files.media, *files.captions}, key=lambda stem: f"{stem}.json"):
        for found in _match(root, kind, files, stem):
            if isinstance(found, Pair):
                pairs.append(found)
            else:
                problems.append(found)
    edited = {os.path.normpath(pair.image) for pair in pairs if pair.image} if files.lone else set()
    problems += [text for path, text in files.lone.items() if path not in edited]
    if not pairs:
        raise UserError(
            f"{folder.absolute()}: no usable pair; {_describe_layout(kind)}; found {_summarise(folder)}"
            + _list_problems(problems, _SHOWN_WHEN_NONE_IS_LEFT)
        )
    return pairs, problems


def has_video_layout(folder: Path) -> bool:
    """Whether it is laid out as Cosmos-Predict's folders of captioned videos."""
    return (folder / METAS).is_dir() and (folder / _VIDEOS.folder).is_dir()


def list_embedding_folders(folder: Path) -> list[str]:
    """The folders of text features that lie next to the captions."""
    return [name for name in EMBEDDINGS if (folder / name).is_dir()]


def load_pairs(folder: Path, *, video: bool = False) -> tuple[list[Pair], list[str], str]:
    """`scan_pairs`, and a text about what is left out (empty: nothing is).

    Raises:
        UserError: no usable pair, or more captions and images are left out than pairs used.
    """
    pairs, problems = scan_pairs(folder, video=video)
    layout = _describe_layout(_choose_kind(video))
    return pairs, problems, describe_left_out(folder, problems, f"{len(pairs)} pairs", len(pairs), layout)


def describe_left_out(place: Path, problems: Sequence[str], used: str, count: int, layout: str) -> str:
    """A text about files that are left out, next to `count` that are `used`; empty: none are.

    Raises:
        UserError: more are left out than used; it says what is expected.
    """
    if not problems:
        return ""
    text = f"{place}: {len(problems)} files are left out ({used} are used)" + _list_problems(problems, _SHOWN)
    if len(problems) > _MAX_SKIPPED_SHARE * (count + len(problems)):
        raise UserError(f"{text}\nMore files are left out than used; {layout}")
    return text


def count_pairs(folder: Path, *, video: bool) -> int:
    """How many images or videos have a caption; reads no caption file, so that some may turn out to be broken."""
    return len(list_captioned(folder, video=video))


def list_captioned(folder: Path, *, video: bool) -> list[str]:
    """The images or videos that have a caption, relative to the folder or the root of its tars; as `count_pairs`."""
    files, _ = _find_files(folder, _choose_kind(video))
    return [
        file for stem, found in files.media.items() for file in found if stem in files.captions or file in files.rows
    ]


def list_media(folder: Path, *, video: bool) -> list[Path]:
    """The images or videos in the layout of Cosmos-Predict: those in ``folder/images`` or ``folder/videos``.

    Raises:
        UserError: there are none.
    """
    kind = _choose_kind(video)
    place = folder / kind.folder
    names = list_names(place) if place.is_dir() else []
    found = [place / name for name in names if name.lower().endswith(kind.suffixes)]
    if not found:
        raise UserError(f"{place.absolute()}: no {kind.word} there; expected files {'|'.join(kind.suffixes)}")
    return found


def describe_pairs(pairs: Sequence[Pair], *, video: bool = False) -> str:
    """How many there are, and where their captions come from: ``12 images; captions: 8 .json, 4 .txt``."""
    tables = (pair.caption.partition(", line ") for pair in pairs)
    sources = Counter(name if line else os.path.splitext(name)[1].lower() for name, line, _ in tables)
    word, tars = _choose_kind(video).word, {tar for pair in pairs if (tar := find_tar(pair.file))}
    place = f" in {len(tars)} tars" if tars else ""
    captions = ", ".join(f"{n} {source}" for source, n in sorted(sources.items()))
    return f"{len(pairs)} {word}s{place}; captions: {captions}"


def digest_pairs(pairs: Sequence[Pair]) -> str:
    """16 hex digits of all names and captions."""
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(f"{pair.name}\0{pair.prompt}\0{pair.image}".encode())
    return digest.hexdigest()[:16]


def media_suffixes(*, video: bool) -> tuple[str, ...]:
    """Endings of the files that are read, in lower case."""
    return _choose_kind(video).suffixes


def _choose_kind(video: bool) -> _Kind:
    return _VIDEOS if video else _IMAGES


def _find_files(folder: Path, kind: _Kind) -> tuple[_Files, list[str]]:
    """Everything in the folder or its tars, and what is wrong with its tables."""
    if not folder.is_dir():
        return _find_members(folder, kind)
    files, problems = _find_loose_files(folder, kind)
    if not any(files.media.values()):  # a table may name files that are not there
        members, wrong = _find_members(folder, kind)
        if members.media or members.captions or wrong:
            return members, wrong + _name_loose_captions(folder, files)
        return files, problems
    tars = sorted(name for names in files.others.values() for name in names if name.endswith(TAR))
    return files, problems + [f"{printable(name)}: is not read, since {kind.word}s lie next to it" for name in tars]


def _find_members(place: Path, kind: _Kind) -> tuple[_Files, list[str]]:
    """Everything in tars, and what is wrong with them."""
    files, shards = _Files(), find_shards(place)
    if shards is None:
        return files, []
    members, problems, files.lone = list_members(shards, kind.suffixes)
    for member in members:
        files.sort_in(member, kind)
    return files, problems


def _name_loose_captions(folder: Path, files: _Files) -> list[str]:
    """A line for each caption and table next to tars, but not for a file that is about the tars."""
    captions = {name for names in files.captions.values() for name in names}
    captions -= {name.removesuffix(TAR) + _ABOUT_A_TAR for names in files.others.values() for name in names}
    loose = [name for name in captions if not is_shard_file(folder / name)]
    tables = [name for name in TABLES if (folder / name).is_file()]
    return [f"{printable(name)}: is not read, since the samples are in tars" for name in sorted(loose) + tables]


def _find_loose_files(folder: Path, kind: _Kind) -> tuple[_Files, list[str]]:
    files, problems = _Files(), []
    for name in list_names(folder):
        if name not in TABLES:
            files.add(name, kind)
    if (folder / METAS).is_dir() and (folder / kind.folder).is_dir():
        for name in list_names(folder / kind.folder):
            files.add(f"{kind.folder}/{name}", kind)
        for name in list_names(folder / METAS):
            files.add(f"{METAS}/{name}", kind, f"{kind.folder}/{os.path.splitext(name)[0]}")
    for table in TABLES:
        if (folder / table).is_file():
            rows, wrong = read_table(folder / table)
            problems += wrong
            problems += [text for row in rows if (text := _place_row(folder, kind, files, row))]
    return files, problems


def list_names(folder: Path) -> list[str]:
    """Names of the files in a folder, sorted, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file())


def _place_row(folder: Path, kind: _Kind, files: _Files, row: Row) -> str | None:
    """Put a row of a table to its file; what is wrong where there is none."""
    stem, ending = os.path.splitext(row.file)
    if ending.lower() not in kind.suffixes:
        return f"{row.source}: {printable(row.file)} is of a kind that is not read"
    known = files.media.setdefault(stem, [])
    if row.file not in known:
        if not (folder / row.file).is_file():
            return f"{row.source}: has no {kind.word} {printable(row.file)}"
        known.append(row.file)
    files.rows.setdefault(row.file, []).append(row)
    return None


def _match(folder: Path, kind: _Kind, files: _Files, stem: str) -> Iterator[Pair | str]:
    """The pairs of one stem, and what is wrong with files that are in none."""
    media, captions = files.media.get(stem, []), files.captions.get(stem, [])
    if captions and len(media) != 1:
        problem = f"has {len(media)} {kind.word}s"
        if not media:
            problem = f"has no {kind.word}" + _describe_unread(files.others.get(stem), kind)
        yield from (f"{printable(caption)}: {problem}" for caption in captions)
        return
    texts: dict[str, Caption] = {}  # by where they are
    broken = []
    for caption in captions:
        text, problem = read_caption(f"{folder}/{caption}")
        if text is None:
            broken.append(f"{printable(caption)}: {problem}")
        else:
            texts[printable(caption)] = text
    yield from broken
    for file in media:
        found = texts
        if file in files.rows:
            found = texts | {row.source: row.caption for row in files.rows[file]}
        if len({text._replace(prompt=" ".join(text.prompt.split())) for text in found.values()}) > 1:
            yield f"{printable(file)}: {' and '.join(found)} have different captions"
        elif found and not broken:
            source, text = next(iter(found.items()))
            tar = find_tar(file)
            image = f"{tar}/{text.image}" if tar and text.image else text.image
            yield Pair(printable(stem), file, text.prompt, source, image)
        elif not broken:
            yield f"{printable(file)}: has no caption {_name_captions(stem)}" + _describe_unread(
                files.others.get(stem), kind
            )


def find_tar(file: str) -> str:
    """The tar that the file of a pair is in; empty: it is in none."""
    tar, inside, _ = file.partition(f"{TAR}/")
    return tar + TAR if inside else ""


def _name_captions(stem: str) -> str:
    first, *middle, last = CAPTION_SUFFIXES
    return f"{printable(stem)}{first}, {', '.join(middle)} or {last}"


def _describe_unread(names: Sequence[str] | None, kind: _Kind) -> str:
    if not names:
        return ""
    hint = ""
    if kind is _IMAGES and any(name.lower().endswith(VIDEO_SUFFIXES) for name in names):
        hint = " without policy.diffusers.is_video = true"
    return f"; {', '.join(map(printable, names))} is of a kind that is not read{hint}"


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
    if not folder.is_dir():
        return f"1 {folder.suffix}"
    entries = sorted(folder.iterdir())
    kinds = Counter(entry.suffix or printable(entry.name) for entry in entries if entry.is_file())
    parts = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
    folders = [printable(entry.name) for entry in entries if entry.is_dir()]
    if folders:
        parts.append(f"{len(folders)} folders ({', '.join(folders[:5])})")
    return ", ".join(parts) or "nothing"
