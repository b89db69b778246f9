"""What `cosmos-rl check --env` reports about pictures of which training cuts off much. No torch."""

from pathlib import Path

from cosmos_rl.data.pair_files import scan_pairs
from cosmos_rl.data.picture_sizes import (
    Measured,
    describe_buckets,
    describe_cuts,
    measure_all,
    measure_file,
    measure_some,
    name_pictures,
)
from cosmos_rl.data.preference_files import load_preferences
from cosmos_rl.data.shards import find_root
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.jobs import DataForm


def size_notes(config: Config, data: DataForm | None) -> list[str]:
    """Lines about the pictures of the training data; none where it is not in files, or cannot be read."""
    files = _find_files(config, data)
    video = config.policy.diffusers.is_video
    noun, sizes = name_pictures(config), config.policy.diffusers.training_sizes

    def measure(index: int) -> Measured:
        return measure_file(*files[index], video=video)

    lines, in_buckets = [], config.policy.diffusers.buckets is not None
    if not in_buckets:
        found = measure_some(len(files), measure)
    else:
        found = [one for one in measure_all(len(files), measure) if isinstance(one, Measured)]
        lines += describe_buckets(found, sizes, noun)
    cut = describe_cuts(found, sizes, len(files), noun, in_buckets=in_buckets)
    return [*lines, f"warning: {cut}"] if cut else lines


def _find_files(config: Config, data: DataForm | None) -> list[tuple[Path, str]]:
    """(folder, file) of each picture, as often as the run takes it in an epoch."""
    dataset, video = config.train.train_policy.dataset, config.policy.diffusers.is_video
    try:
        if data == "preferences" and dataset.local_dir:
            found = load_preferences(dataset.local_dir, dataset.rejected_dir, video=video)
            return [(found.chosen_folder, pair.file) for pair in found.chosen]
        if data == "pairs":
            found = []
            for one in dataset.listed:
                place = Path(one.local_dir).expanduser()
                pairs, root = scan_pairs(place, video=video)[0], find_root(place)
                found += [(root, pair.file) for pair in pairs] * one.repeats
            return found
    except UserError:
        pass  # `inspect_environment` says what is wrong
    return []
