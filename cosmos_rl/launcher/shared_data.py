"""Whether validation has samples that the run trains on: what `cosmos-rl check` and a launch say of it. No torch."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from cosmos_rl.data.pair_files import list_captioned, scan_pairs
from cosmos_rl.data.preference_files import is_preference_table, load_preferences
from cosmos_rl.data.prompts import PromptRecord, find_file, is_prompt_file
from cosmos_rl.data.shards import find_root
from cosmos_rl.data.subsets import choose_indices
from cosmos_rl.data.tar_files import index_tar, open_member, split_member
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.prompt_lists import read_lists
from cosmos_rl.policy.config import Config, DatasetConfig, ValidationDatasetConfig
from cosmos_rl.policy.config.jobs import job_kind
from cosmos_rl.policy.config.validation_sets import list_validation_sets

_COMPARED = 2**20
"""Bytes: files of one size that begin with the same ones are taken for the same."""


def shared_notes(config: Config) -> list[str]:
    """A line for each validation set with samples that are trained on too, as far as the configuration names them."""
    if not config.validation.enable:
        return []
    if job_kind(config).data == "prompts":
        return list(_compare_prompts(config))
    return list(_compare_media(config))


def _compare_prompts(config: Config) -> Iterator[str]:
    """By their texts; a named set that has not been fetched yet by the digest of its file."""
    lists = read_lists(config)
    training = [key for key in lists if key.startswith("train.")]
    digests = {lists[key][0].digest for key in training}
    unread = {lists[key][0].digest for key in training if not lists[key][1]}
    known = {_identify(record) for key in training for record in lists[key][1]}
    for key, dataset in _list_validation(config).items():
        if key not in lists:
            continue
        one, records = lists[key]
        taken = None if one.prompts is None else choose_indices(one.prompts, dataset.limit, spread=dataset.spread)
        total = None if taken is None else len(taken)
        shared = sum(_identify(records[i]) in known for i in taken or ()) if records else 0
        if one.digest in (unread if records else digests):
            shared = total
        if shared is None or shared > 0:
            yield _describe(key, shared, total, "prompt", "scores")


def _list_validation(config: Config) -> dict[str, ValidationDatasetConfig]:
    """The tables of the validation sets, by their dotted names."""
    return {f"{one.key}.dataset": one.config.validation.dataset for one in list_validation_sets(config)}


def _identify(record: PromptRecord) -> tuple[str, str]:
    """A text with the image or video that its samples start from: captions of several videos may be the same."""
    file = find_file(record)
    return record.prompt, "" if file is None else os.path.realpath(file)


def _describe(key: str, shared: int | None, total: int | None, noun: str, judged: str) -> str:
    amount, verb, them = f"all {noun}s", "are", "them"
    if shared is not None and total is not None:
        amount = f"{shared:,} of {total:,} {noun}{'' if total == 1 else 's'}"
        if shared == 1:
            verb, them = "is", "it"
    return f"{key}: {amount} {verb} in the training data too; {judged} on {them} are not those of unseen {noun}s"


# ---- images and videos -------------------------------------------------------------------------------------------


def _compare_media(config: Config) -> Iterator[str]:
    """By the files, whatever their names and captions."""
    noun = "video" if config.policy.diffusers.is_video else "image"
    tested = dict[str, list[str]]()
    for key, dataset in _list_validation(config).items():
        files = _list_files(config, dataset)
        if files:
            tested[key] = [files[i] for i in choose_indices(len(files), dataset.limit, spread=dataset.spread)]
    if not tested:
        return
    trained = _Files(_list_files(config, config.train.train_policy.dataset))
    for key, files in tested.items():
        if shared := sum(map(trained.holds, files)):
            yield _describe(key, shared, len(files), noun, f"losses and {noun}s")


def _list_files(config: Config, dataset: DatasetConfig) -> list[str]:
    """Of a table of training or validation; of preferences the chosen ones. Empty: it names none, or is amiss."""
    video, found = config.policy.diffusers.is_video, list[str]()
    source = dataset.local_dir
    with suppress(UserError, OSError):  # reported by `inspect_environment`
        if job_kind(config).data == "preferences" and source and not _names_prompts(source):
            files = load_preferences(source, dataset.rejected_dir, video=video)
            return [str(files.chosen_folder / pair.file) for pair in files.chosen]
        for one in () if source and is_prompt_file(source) else dataset.listed:
            place = Path(one.local_dir).expanduser()
            root = find_root(place)
            found += [str(root / name) for name in _list_names(place, dataset, video)]
    return found


def _list_names(place: Path, dataset: DatasetConfig, video: bool) -> list[str]:
    """In the order of a run and without what a run leaves out, where it takes some of them; that reads all captions."""
    if isinstance(dataset, ValidationDatasetConfig) and dataset.limit is not None:
        return [pair.file for pair in scan_pairs(place, video=video)[0]]
    return list_captioned(place, video=video)


def _names_prompts(source: str) -> bool:
    return is_prompt_file(source) and not is_preference_table(source)


class _Files:
    """Files that are trained on."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._places: set[tuple[object, ...]] = set()
        self._by_size: dict[int, list[str]] = {}
        self._starts: dict[str, bytes] = {}
        for path in paths:
            with suppress(OSError):  # a run says what cannot be read
                place, size = _locate(path)
                self._places.add(place)
                self._by_size.setdefault(size, []).append(path)

    def holds(self, path: str) -> bool:
        """Whether a file is one of them, or a copy of one."""
        with suppress(OSError):
            place, size = _locate(path)
            if place in self._places:
                return True
            alike = self._by_size.get(size)
            if alike:
                start = _digest_start(path)
                return any(self._digest(other) == start for other in alike)
        return False

    def _digest(self, path: str) -> bytes:
        if path not in self._starts:
            self._starts[path] = _digest_start(path)
        return self._starts[path]


def _locate(path: str) -> tuple[tuple[object, ...], int]:
    """(what is the same for a file by whatever path, its size in bytes)."""
    member = split_member(path)
    found = os.stat(member[0] if member else path)
    if member is None:
        return (found.st_dev, found.st_ino), found.st_size
    return (found.st_dev, found.st_ino, member[1]), index_tar(Path(member[0])).members[member[1]][1]


def _digest_start(path: str) -> bytes:
    member = split_member(path)
    with open_member(*member) if member else open(path, "rb") as file:
        return hashlib.sha256(file.read(_COMPARED)).digest()
