"""A data set of several folders, each with repeats, a weight of its loss, and flips."""

import bisect
import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from cosmos_rl.data.items import Item
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.data.picture_sizes import Measured
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, FolderConfig
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.utils.logging import logger

T = TypeVar("T")
_FLIPPED = "/flipped"


class Folders(Sequence[Item]):
    """The samples of several folders, one folder after the other, those of a folder as often as it says.

    Of a folder that is flipped each position of the run mirrors its sample or not, by a draw that is keyed by the seed
    and the position. Without a position, as in validation, nothing is mirrored and all weigh 1.
    """

    def __init__(self, parts: Sequence[LocalPairs], settings: Sequence[FolderConfig], seed: int) -> None:
        """
        Raises:
            UserError: a sample that is to be flipped comes with the image that it was made of.
        """
        self._parts, self._settings, self._seed = parts, settings, seed
        counts = [len(pairs) * folder.repeats for pairs, folder in zip(parts, settings, strict=True)]
        self._ends = list(itertools.accumulate(counts))
        for pairs, folder, count in zip(parts, settings, counts, strict=True):
            if folder.flip and any(pairs.edited):
                raise UserError(
                    f"{pairs.folder}: flip = true mirrors an image and not the one that it was made of; set it to false"
                )
            logger.info(
                f"{pairs.folder}: {len(pairs)} samples x {folder.repeats} = {count} of the {self._ends[-1]} of an "
                f"epoch, with a loss weight of {folder.weight:g}{', half of them flipped' if folder.flip else ''}"
            )

    @classmethod
    def of_config(cls, config: Config) -> "Folders":
        """What `[train.train_policy.dataset]` names."""
        settings = config.train.train_policy.dataset.listed
        return cls([LocalPairs.of_config(one.local_dir, config) for one in settings], settings, config.train.seed)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.take(index, None)

    def take(self, index: int, sample_id: int | None) -> Item:
        """See `cosmos_rl.data.items.take`."""
        number, inside = self._locate(index)
        item = self._parts[number].take(inside, sample_id)
        if self._is_flipped(number, sample_id):
            item = replace(item, visual=item.visual.flip(-1), source=item.source and item.source + _FLIPPED)
        return replace(item, weight=self._weight(number, sample_id))

    def identify(self, index: int, sample_id: int | None) -> Item | None:
        """See `cosmos_rl.data.items.identify`."""
        number, inside = self._locate(index)
        item = self._parts[number].identify(inside, sample_id)
        if item is None:
            return None
        source = item.source
        if source is not None and self._is_flipped(number, sample_id):
            source += _FLIPPED
        return replace(item, source=source, weight=self._weight(number, sample_id))

    def measure(self, index: int) -> Measured:
        """A file's height and width, see `LocalPairs.measure`."""
        number, inside = self._locate(index)
        return self._parts[number].measure(inside)

    def bucket_of(self, index: int) -> Sides:
        """Height and width at which an element comes out, see `LocalPairs.bucket_of`."""
        number, inside = self._locate(index)
        return self._parts[number].bucket_of(inside)

    def first_index_of(self, index: int) -> int:
        """The first index of the sample at ``index``, which comes as often as its folder is repeated."""
        number, inside = self._locate(index)
        return (self._ends[number - 1] if number else 0) + inside

    @property
    def prompts(self) -> list[str]:
        """All captions, in order."""
        return self._list(lambda pairs: pairs.prompts)

    @property
    def names(self) -> list[str]:
        """Where the captions are, in the same order."""
        return self._list(lambda pairs: pairs.names)

    @property
    def edited(self) -> list[str]:
        """The images that the captions name to be edited, in the same order."""
        return self._list(lambda pairs: pairs.edited)

    @property
    def digest(self) -> str:
        """Of names and captions, and of how the folders are taken."""
        parts = zip(self._parts, self._settings, strict=True)
        text = "/".join(f"{pairs.digest} {one.repeats} {one.weight} {one.flip}" for pairs, one in parts)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _list(self, read: Callable[[LocalPairs], list[T]]) -> list[T]:
        parts = zip(self._parts, self._settings, strict=True)
        return [one for pairs, folder in parts for one in read(pairs) * folder.repeats]

    def _locate(self, index: int) -> tuple[int, int]:
        """(number of the folder, index in it)."""
        number = bisect.bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        return number, (index - first) % len(self._parts[number])

    def _weight(self, number: int, sample_id: int | None) -> float:
        return 1.0 if sample_id is None else self._settings[number].weight

    def _is_flipped(self, number: int, sample_id: int | None) -> bool:
        if sample_id is None or not self._settings[number].flip:
            return False
        return random.Random(f"{self._seed}/flip/{sample_id}").random() < 0.5


def load_training_pairs(config: Config) -> LocalPairs | Folders:
    """The data set of `[train.train_policy.dataset]`: a folder of pairs, or several.

    Raises:
        UserError: none is named, or one holds no usable pair.
    """
    dataset = config.train.train_policy.dataset
    if not dataset.listed:
        raise UserError("train.train_policy.dataset.local_dir: missing; give the folder of training images")
    if dataset.folders or dataset.flip:
        return Folders.of_config(config)
    return LocalPairs.of_config(dataset.local_dir, config)
