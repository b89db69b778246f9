"""Samples in tar files, as WebDataset makes them: which tars there are, and which of their members are one sample.

A sample is what has one key, the name of a member up to the first dot of its last part. Of parallel tars, one for each
kind of data, the members of one key in the tars of one name are a sample. No torch.
"""

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cosmos_rl.data.captions import CAPTION_SUFFIXES
from cosmos_rl.data.tar_files import COMPRESSED, SUFFIX, TarIndex, evict_indices, index_tar
from cosmos_rl.data.texts import parse_json, printable
from cosmos_rl.errors import UserError

INFO = 'a wdinfo file, {"root": "...", "data_list": ["000.tar", ...]}'
"""What a file names that lists tars."""
EMBEDDINGS = ("text_embedding", "t5_xxl")
"""Folders of pickled text features next to those of captions, which nobody here reads."""
_NOT_SAMPLES = re.compile(r"(^|/)__[^/]*__($|/)")
"""Names of members that WebDataset keeps for itself."""
_KEY = re.compile(r"((?:.*/)?[^./]+)(\.[^/]*)", re.DOTALL)
_DOTTED = "the key of a sample ends at the first dot of its name, so that"
_AT_ONCE = 8
_SHOWN = 5


@dataclass(frozen=True)
class Shards:
    """The tars of a data set."""

    root: Path
    tars: Mapping[str, Sequence[str]]
    """Names of the tars by the folder in ``root`` where they are; several folders: parallel tars of equal names."""
    expected: int | None = None
    """Samples that there should be, where that is written down."""


class Member(NamedTuple):
    """A file of a sample."""

    stem: str
    """What all files of the sample have in common: the tar's name and the key."""
    ending: str
    """From the first dot on, in lower case."""
    path: str
    """Relative to the root: ``000.tar/0001.jpg``."""


def is_shard_file(path: Path) -> bool:
    """Whether a file is a tar, or names tars."""
    if path.suffix == SUFFIX:
        return path.is_file()
    return path.suffix == ".json" and _read_info(path) is not None


def find_root(place: Path) -> Path:
    """The folder to which the paths of a data set's files are relative."""
    shards = find_shards(place) if place.is_file() else None
    return place if shards is None else shards.root


def find_shards(place: Path) -> Shards | None:
    """The tars of a folder or of its folders, the one that ``place`` is, or those that it names; None: there are none.

    Raises:
        UserError: tars are compressed, or a folder lacks one of those that others have.
    """
    if place.is_file():
        info = None
        if place.suffix == ".json":
            info = _read_info(place)
        return Shards(place.parent, {"": [place.name]}) if info is None else _follow_info(place, info)
    if found := _list_tars(place):
        return Shards(place, {"": found})
    tars = {name: found for name in _list_folders(place) if (found := _list_tars(place / name))}
    if not tars:
        return None
    _require_equal_names(place, tars)
    return Shards(place, tars)


def list_members(shards: Shards, media: Sequence[str]) -> tuple[list[Member], list[str], dict[str, str]]:
    """All files of samples, by tar and name; a line for each that cannot be used; and one, by its path, for each that
    nothing but the caption of a sample can name.

    Args:
        media: endings of what is learnt from, in lower case.

    Raises:
        UserError: a tar cannot be read, or parallel tars do not belong together.
    """
    places = {os.path.join(folder, name): name for folder, names in shards.tars.items() for name in names}
    indices, problems = _index_all(shards.root, list(places)), list[str]()
    found: dict[str, list[Member]] = {}
    for place, name in places.items():
        found[place] = list(_read_names(place, name, indices[place], problems))
        kinds = {member.ending for member in found[place]}
        if len(shards.tars) == 1 and not kinds & {*media, *CAPTION_SUFFIXES}:
            problems.append(f"{printable(place)}: has no sample; found {_summarise(found[place])}")
    if len(shards.tars) > 1:
        _require_parallel(shards, found, media)
    members = [member for place in places for member in found[place]]
    cut, parts = _split_dotted(members, media)
    problems += [
        f"{printable(file.path)}: {_DOTTED} the ending is {printable(file.ending)}, of a kind that is not read; "
        "rename it"
        for file in cut
    ]
    keys = {member.stem for member in members if member.ending in media}
    if shards.expected is not None and shards.expected != len(keys):
        problems.append(f"total_key_count: is {shards.expected}, and the tars have {len(keys)} samples")
    return members, problems, _name_lone(parts, len(keys))


def _index_all(root: Path, places: Sequence[str]) -> dict[str, TarIndex]:
    """Several at a time, since far disks answer slowly.

    Raises:
        UserError: some cannot be read; it names them.
    """

    def look(place: str) -> TarIndex | UserError:
        try:
            return index_tar(root / place)
        except UserError as error:
            return error

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        results = dict(zip(places, pool.map(look, places), strict=True))
    evict_indices()
    broken = [str(result) for result in results.values() if isinstance(result, UserError)]
    if broken:
        more = f"\n  and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
        raise UserError("\n  ".join([f"{len(broken)} of {len(places)} tars cannot be read:", *broken[:_SHOWN]]) + more)
    return {place: result for place, result in results.items() if isinstance(result, TarIndex)}


def _read_names(place: str, tar: str, index: TarIndex, problems: list[str]) -> Iterator[Member]:
    """The members that are files of samples, by name. ``tar``: its name in all folders of parallel tars."""
    repeated = set(index.repeated)
    for name in sorted(index.members):
        parts = _KEY.fullmatch(name)
        if parts is None or _NOT_SAMPLES.search(name) or any(part.startswith(".") for part in name.split("/")):
            continue
        if name in repeated:
            problems.append(f"{printable(place)}/{printable(name)}: is there more than once")
            continue
        yield Member(f"{tar}/{parts[1]}", parts[2].lower(), f"{place}/{name}")


def _name_lone(parts: Sequence[Member], samples: int) -> dict[str, str]:
    """A line for each part of a sample whose ending no other sample has, by its path: ``3.5mm.png`` next to ``3.png``.

    It may be a sample with a dot in its name. A part that several samples have, ``0001.seg.png``, is none. Nor are they
    where there is more than one for two samples: then parts have endings of their own, as ``0001.crop_000123.png``.
    """
    having = Counter(ending for _, ending in {(member.stem, member.ending) for member in parts})
    if 2 * sum(count == 1 for count in having.values()) > samples:
        return {}
    return {
        member.path: f"{printable(member.path)}: {_DOTTED} it is a part {printable(member.ending)} of "
        f"{printable(member.stem)}, which no other sample has, and is not read; rename it if it is of another sample"
        for member in parts
        if having[member.ending] == 1
    }


def _split_dotted(members: Sequence[Member], media: Sequence[str]) -> tuple[list[Member], list[Member]]:
    """Files that are read but for more dots in their name: those of no sample that is there, whose key was cut short,
    ``3.5mm.png``; and parts of a sample, ``0001.seg.png`` next to ``0001.png``."""
    known = (*media, *CAPTION_SUFFIXES)
    keys = {member.stem for member in members if member.ending in known}
    dotted = [member for member in members if member.ending not in known and member.ending.endswith(known)]
    kinds: dict[str, set[bool]] = {}  # by the name up to the last dot: whether a caption is there, and whether others
    for member in dotted:
        kinds.setdefault(_cut_at_last_dot(member), set()).add(member.ending.endswith(CAPTION_SUFFIXES))
    cut, parts = list[Member](), list[Member]()
    for member in dotted:
        is_cut = member.stem not in keys or len(kinds[_cut_at_last_dot(member)]) > 1
        (cut if is_cut else parts).append(member)
    return cut, parts


def _cut_at_last_dot(member: Member) -> str:
    return member.stem + os.path.splitext(member.ending)[0]


def _summarise(members: Sequence[Member]) -> str:
    counts = Counter(member.ending for member in members)
    return ", ".join(f"{count} {printable(ending)}" for ending, count in sorted(counts.items())) or "nothing"


# ---- parallel tars -----------------------------------------------------------------------------------------------


def _require_equal_names(root: Path, tars: Mapping[str, Sequence[str]]) -> None:
    everything = {name for names in tars.values() for name in names}
    for folder, names in tars.items():
        if missing := sorted(everything - set(names)):
            raise UserError(
                f"{root / folder}: has no {missing[0]}, which another folder of {root} has; of parallel tars each "
                "folder has one of every name; tars with samples of their own belong into one folder, or name their "
                "folders in [[train.train_policy.dataset.folders]]"
            )


def _require_parallel(shards: Shards, found: Mapping[str, Sequence[Member]], media: Sequence[str]) -> None:
    """
    Raises:
        UserError: several folders have what is learnt from, or in tars of one name nothing has a caption of its key.
    """
    folders = {folder: [os.path.join(folder, name) for name in names] for folder, names in shards.tars.items()}
    holding = [f for f, places in folders.items() if any(m.ending in media for place in places for m in found[place])]
    if len(holding) > 1:
        raise UserError(
            f"{shards.root}: the tars of {' and '.join(holding)} all have {'|'.join(media)}; keep those of one of them"
        )
    for name in next(iter(shards.tars.values())):
        members = [member for folder in folders for member in found[os.path.join(folder, name)]]
        pictures = [member for member in members if member.ending in media]
        captions = [member for member in members if member.ending in CAPTION_SUFFIXES]
        keys = {member.stem for member in pictures}
        if pictures and captions and not any(caption.stem in keys for caption in captions):
            raise UserError(
                f"{shards.root}: the parallel tars {printable(name)} do not belong together: the first members are "
                f"{printable(pictures[0].path)} and {printable(captions[0].path)}, and no key is in both; members are "
                "matched by their keys, whatever their order"
            )


# ---- where tars are ----------------------------------------------------------------------------------------------


def _list_tars(folder: Path) -> list[str]:
    """
    Raises:
        UserError: there are only compressed ones of a name.
    """
    with os.scandir(folder) as entries:
        names = {entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file()}
    for name in sorted(names):
        ending = next((ending for ending in COMPRESSED if name.endswith(ending)), None)
        if ending is not None and name.removesuffix(ending) + SUFFIX not in names:
            raise UserError(
                f"{folder / name}: is compressed, and samples are read from any place of a tar; unpack it: "
                f"{COMPRESSED[ending]} {shlex.quote(str(folder))}/*{ending}"
            )
    return sorted(name for name in names if name.endswith(SUFFIX))


def _list_folders(place: Path) -> list[str]:
    """Without text features, which are pickled."""
    with os.scandir(place) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    return [name for name in names if name not in EMBEDDINGS]


def find_info_problem(path: Path) -> str:
    """Why nothing can be read from a file that may be meant as a wdinfo file; empty: it can, or has another ending."""
    if path.suffix != ".json":
        return ""
    try:
        return parse_json(path.read_bytes())[1] or ""
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _read_info(path: Path) -> Mapping[str, object] | None:
    """What a wdinfo file holds; None: it is something else, such as a list of prompts."""
    try:
        with path.open("rb") as file:
            start = file.read(2**10).lstrip(b"\xef\xbb\xbf \t\r\n")
            if not start.startswith(b"{"):
                return None
            file.seek(0)
            content, _ = parse_json(file.read())
    except OSError:
        return None  # whoever reads it says why
    return content if isinstance(content, Mapping) and "data_list" in content else None


def _follow_info(path: Path, info: Mapping[str, object]) -> Shards:
    names, root, expected = info["data_list"], info.get("root", ""), info.get("total_key_count")
    where = printable(str(path.absolute()))
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{where}: data_list: allowed: a list of names of tars; expected {INFO}")
    if not isinstance(root, str) or not isinstance(expected, int | None):
        raise UserError(f"{where}: root: allowed: a folder, and total_key_count: a number; expected {INFO}")
    if "://" in root:
        text = "S3 is not supported yet; copy the tars to a local folder"
        raise UserError(f'{where}: root = "{printable(root)}": {text}')
    wrong = [name for name in names if os.path.isabs(name) or ".." in Path(name).parts or not name.endswith(SUFFIX)]
    if wrong:
        raise UserError(f'{where}: data_list: "{printable(wrong[0])}": allowed: paths in root that end in {SUFFIX}')
    base = path.parent / Path(root).expanduser()
    if not base.is_dir():
        raise UserError(f'{where}: root = "{printable(root)}": {printable(str(base.absolute()))} is not there')
    folders = ["", *_list_folders(base)]
    tars = {folder: list(names) for folder in folders if (base / folder / names[0]).is_file()}
    missing = [base / folder / name for folder in tars for name in names if not (base / folder / name).is_file()]
    if missing or not tars:
        absent = missing[0] if missing else base / names[0]
        raise UserError(f"{where}: data_list: {printable(str(absent.absolute()))} is not there")
    return Shards(base, tars, expected)
