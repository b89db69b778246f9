"""`cosmos-rl prompts`, and which prompts a configuration names, with their digests. No torch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from cosmos_rl.data.prompt_sets import (
    KNOWN,
    PromptSource,
    fetch_set,
    find_kept,
    list_sources,
    list_splits,
    prompt_file,
    read_bytes,
)
from cosmos_rl.data.prompts import PromptRecord, digest_prompts, is_prompt_file, read_prompts
from cosmos_rl.data.published import PublishedFile, compute_digest, find_difference
from cosmos_rl.data.shards import is_shard_file
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.flags import FlagParser
from cosmos_rl.policy.config import Config, ValidationDatasetConfig
from cosmos_rl.policy.config.jobs import job_kind
from cosmos_rl.policy.config.validation_sets import list_validation_sets

_SHOWN_DIGITS = 12


@dataclass(frozen=True)
class PromptList:
    """Prompts that a table of the configuration names."""

    source: str
    """A named set and its split, or a path."""
    digest: str
    """Of the bytes of the file; of a folder of videos: of the captions."""
    prompts: int | None
    """None: not known before they are fetched."""
    limit: int | None = None
    """So many of them are taken at most; None: all."""


def prompts(argv: Sequence[str]) -> int:
    """List the prompt sets that a configuration can name, with their digests and whether they are in the cache."""
    parser = FlagParser(prog="cosmos-rl prompts", description=prompts.__doc__)
    parser.add_argument("--fetch", metavar="NAME", help="fetch all splits of this set into the cache, for later")
    given = parser.parse_args(argv)
    if given.fetch is not None:
        for split, records in fetch_set(given.fetch, "--fetch").items():
            print(f"{find_kept(given.fetch, split)}: {len(records):,} prompts")
        _print_twice([given.fetch])
        return 0
    rows = [("name", "split", "prompts", "digest", "here", "source"), *_list_rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    _print_twice(list(KNOWN))
    return 0


def _print_twice(names: Sequence[str]) -> None:
    """A line for each set that is published with one file for several splits."""
    for name in names:
        splits: dict[str, list[str]] = {}
        for split, published in KNOWN[name].splits.items():
            splits.setdefault(published.digest, []).append(split)
        for same in splits.values():
            if len(same) > 1:
                print(f"{name}: {' and '.join(same)} are the same file: scores on one are about prompts of the other")


def _list_rows() -> Iterator[tuple[str, ...]]:
    for name, known in KNOWN.items():
        for split in list_splits(name):
            published, path = known.splits.get(split), find_kept(name, split)
            if published is None:
                yield name, split, "", "", "no" if path is None else "yes", "made at its first use"
                continue
            here = "no"
            if path is not None:
                here = "differs" if find_difference(published, read_bytes(path)) else "yes"
            count = "" if published.prompts is None else f"{published.prompts:,}"
            yield name, split, count, _shorten(published.digest), here, known.source


def _shorten(digest: str) -> str:
    form, _, digits = digest.partition(":")
    return f"{form}:{digits[:_SHOWN_DIGITS]}"


def list_prompts(config: Config) -> dict[str, PromptList]:
    """The prompts that the configuration names, by the dotted name of the table; those that are amiss are left out."""
    return {key: one for key, (one, _) in read_lists(config).items()}


def read_lists(config: Config) -> dict[str, tuple[PromptList, Sequence[PromptRecord]]]:
    """`list_prompts`, each list with its records; of a set that has not been fetched yet there are none."""
    found = {}
    for key, dataset, split in _list_tables(config):
        with suppress(UserError):  # reported by `inspect_environment`; for a script's own data any word may stand there
            limit = dataset.limit if isinstance(dataset, ValidationDatasetConfig) else None
            one, records = _read(dataset, key, split)
            found[key] = replace(one, limit=limit), records
    return found


def record_prompts(config: Config) -> dict[str, object]:
    """`list_prompts` as it is written into ``run.json``."""
    return {key: asdict(one) for key, one in list_prompts(config).items()}


def prompt_lines(config: Config) -> list[str]:
    """What `cosmos-rl check` says of them."""
    lines, online = [], job_kind(config).data == "prompts"
    for key, (one, records) in read_lists(config).items():
        count = "not fetched yet" if one.prompts is None else f"{one.prompts:,} prompts"
        if one.limit is not None:
            count += f", of which at most {one.limit:,} are taken"
        lines.append(f"{key}: {one.source}, {count}, {_shorten(one.digest)}")
        if online and (known := _describe_metadata(records)):
            lines.append(f"{key}: metadata for the rewards: {known}")
    return lines


def _describe_metadata(records: Sequence[PromptRecord]) -> str:
    """The keys that rows have besides the prompt, and how many rows where not all have one."""
    counts = Counter(key for record in records for key in record.metadata)
    return ", ".join(
        str(key) if count == len(records) else f"{key} ({count:,} of {len(records):,} prompts)"
        for key, count in sorted(counts.items(), key=lambda item: str(item[0]))
    )


def _list_tables(config: Config) -> Iterator[tuple[str, PromptSource, str]]:
    """(dotted name, table, split unless it names one) of the tables that may name prompts."""
    online = job_kind(config).data == "prompts"
    if online:
        for source, key in list_sources(config.train.train_policy.dataset, "train.train_policy.dataset"):
            yield key, source, "train"
    for one in list_validation_sets(config):
        held_out = one.config.validation.dataset
        if online or (held_out.local_dir and is_prompt_file(held_out.local_dir)):
            yield f"{one.key}.dataset", held_out, "test"


def _read(dataset: PromptSource, key: str, split: str) -> tuple[PromptList, Sequence[PromptRecord]]:
    path, published = prompt_file(dataset, key, split=split), _find_published(dataset, split)
    source = str(path)
    if not dataset.local_dir:
        source = f"{dataset.name}, {dataset.first_split or split}"
    if path is None:
        if published is None:
            raise UserError(f"{key}: there are no such prompts yet")
        return PromptList(source, published.digest, published.prompts), ()
    records = read_prompts(path)
    if path.is_dir() or is_shard_file(path):
        digest = f"texts:{digest_prompts(records)}"
    else:
        digest = compute_digest(read_bytes(path), published.digest if published is not None else "")
    return PromptList(source, digest, len(records)), records


def _find_published(dataset: PromptSource, split: str) -> PublishedFile | None:
    if dataset.local_dir or dataset.name not in KNOWN:
        return None
    return KNOWN[dataset.name].splits.get(dataset.first_split or split)
