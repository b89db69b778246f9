"""What `cosmos-rl check --env` reports about pictures of which training cuts off much. No torch."""

from collections.abc import Sequence
from pathlib import Path

from cosmos_rl.data.pair_files import Pair, scan_pairs
from cosmos_rl.data.picture_sizes import (
    Measured,
    describe_buckets,
    describe_cuts,
    measure_all,
    measure_file,
    measure_some,
)
from cosmos_rl.data.preference_files import load_preferences
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.jobs import DataForm


def size_notes(config: Config, data: DataForm | None) -> list[str]:
    """Lines about the pictures of the training data; none where it is not in files, or cannot be read."""
    folder, pairs = _find_pairs(config, data)
    video = config.policy.diffusers.is_video
    noun, sizes = "videos" if video else "images", config.policy.diffusers.training_sizes

    def measure(index: int) -> Measured:
        return measure_file(folder, pairs[index].file, video=video)

    lines = []
    if config.policy.diffusers.buckets is None:
        found = measure_some(len(pairs), measure)
    else:
        found = [one for one in measure_all(len(pairs), measure) if isinstance(one, Measured)]
        lines += describe_buckets(found, sizes, noun)
    cut = describe_cuts(found, sizes, len(pairs), noun)
    return [*lines, f"warning: {cut}"] if cut else lines


def _find_pairs(config: Config, data: DataForm | None) -> tuple[Path, Sequence[Pair]]:
    dataset, video = config.train.train_policy.dataset, config.policy.diffusers.is_video
    if data not in ("pairs", "preferences") or not dataset.local_dir:
        return Path(), []
    try:
        if data == "preferences":
            found = load_preferences(dataset.local_dir, dataset.rejected_dir, video=video)
            return found.chosen_folder, found.chosen
        folder = Path(dataset.local_dir).expanduser()
        return folder, scan_pairs(folder, video=video)[0]
    except UserError:
        return Path(), []  # `inspect_environment` says what is wrong
