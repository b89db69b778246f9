"""What `cosmos-rl check --env` reports about texts that a run would cut. No torch: tokenizers come from files."""

from collections.abc import Sequence
from pathlib import Path

from cosmos_rl.data.pair_files import scan_pairs
from cosmos_rl.data.preference_files import is_preference_table, load_preferences
from cosmos_rl.data.prompt_sets import list_sources, prompt_file
from cosmos_rl.data.prompts import is_prompt_file, read_prompts
from cosmos_rl.data.text_lengths import Named, describe_truncation, load_encoders
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.pipeline_files import Unknown, locate_base
from cosmos_rl.policy.config import Config, DatasetConfig
from cosmos_rl.policy.config.jobs import DataForm, job_kind
from cosmos_rl.policy.config.validation_sets import list_validation_sets


def text_notes(config: Config, data: DataForm | None) -> list[str]:
    """A line for each set of texts of which some are longer than the text encoders take, where that can be known."""
    if data is None:
        return []
    try:
        folder = locate_base(config.policy)
        encoders = load_encoders(folder, config.policy.diffusers.max_prompt_length)
    except (Unknown, OSError, ValueError, KeyError):
        return []  # what cannot be read here the run reads by another way
    noun = job_kind(config).items
    sets = {noun: (config.train.train_policy.dataset, "train")}
    for one in list_validation_sets(config):
        sets[f"validation {noun} {one.label}".strip()] = (one.config.validation.dataset, "test")
    video = config.policy.diffusers.is_video
    lines = (
        describe_truncation(_texts(dataset, data, split, video=video), encoders, name)
        for name, (dataset, split) in sets.items()
    )
    return [line for line in lines if line]


def _texts(dataset: DatasetConfig, data: DataForm, split: str, *, video: bool) -> Sequence[Named]:
    """Empty where `inspect_environment` has found something wrong, or there is nothing to read."""
    try:
        if data == "prompts":
            files = [prompt_file(source, key, split=split) for source, key in list_sources(dataset, "")]
            return [one for file in files for one in _prompts(file)]
        of_preferences = data == "preferences" and is_preference_table(dataset.local_dir)
        if split == "test" and is_prompt_file(dataset.local_dir) and not of_preferences:
            return _prompts(Path(dataset.local_dir))
        if not dataset.listed:
            return []
        if data == "preferences":
            found = load_preferences(dataset.local_dir, dataset.rejected_dir, video=video)
            return [(pair.caption, pair.prompt) for pair in found.chosen]
        folders = [Path(one.local_dir).expanduser() for one in dataset.listed]
        pairs = [pair for place in folders for pair in scan_pairs(place, video=video)[0]]
        return [(pair.caption, pair.prompt) for pair in pairs]
    except UserError:
        return []


def _prompts(file: Path | None) -> Sequence[Named]:
    if file is None:
        return []
    return [(repr(record.prompt[:40]), record.prompt) for record in read_prompts(file)]
