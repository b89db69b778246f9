"""Data set of preferences: captioned images or videos, each with one that was rejected for the same caption."""

from collections.abc import Sequence
from dataclasses import replace

from cosmos_rl.data.items import Item
from cosmos_rl.data.local_pairs import LocalPairs, reading
from cosmos_rl.data.picture_sizes import Measured
from cosmos_rl.data.preference_files import Preferences, is_preference_table, load_preferences
from cosmos_rl.data.prompts import PromptFile, is_prompt_file
from cosmos_rl.policy.config import Config, DatasetConfig
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.utils.logging import logger


class PreferencePairs(Sequence[Item]):
    """Two data sets of captioned images or videos, read as one: an element is a chosen item with its rejected one.

    Both members have the same size and crop, and where their videos are equally long the same window.
    """

    def __init__(self, chosen: LocalPairs, rejected: LocalPairs) -> None:
        self._chosen, self._rejected = chosen, rejected

    @classmethod
    def of_files(cls, files: Preferences, config: Config) -> "PreferencePairs":
        """What the files hold, with the sizes that a job trains on."""
        logger.info(files.describe())
        if files.left_out:
            logger.warning(files.left_out)
        size, how = config.policy.diffusers.inference_size, reading(config)
        chosen = LocalPairs(files.chosen_folder, *size, **how, pairs=files.chosen)
        return cls(chosen, LocalPairs(files.rejected_folder, *size, **how, pairs=files.rejected, like=chosen))

    @classmethod
    def of_config(cls, dataset: DatasetConfig, config: Config) -> "PreferencePairs":
        """What `local_dir` and `rejected_dir` name.

        Raises:
            UserError: they hold no usable preference.
        """
        video = config.policy.diffusers.is_video
        return cls.of_files(load_preferences(dataset.local_dir, dataset.rejected_dir, video=video), config)

    @property
    def prompts(self) -> list[str]:
        """All captions, in order; nothing is decoded for them."""
        return self._chosen.prompts

    @property
    def names(self) -> list[str]:
        """Where the captions are, in the same order."""
        return self._chosen.names

    @property
    def edited(self) -> list[str]:
        """The images that the captions name to be edited, in the same order; empty where there is none."""
        return self._chosen.edited

    @property
    def digest(self) -> str:
        """Of names and captions of both members, in order."""
        return self._chosen.digest + self._rejected.digest

    def measure(self, index: int) -> Measured:
        """The chosen file's height and width."""
        return self._chosen.measure(index)

    def bucket_of(self, index: int) -> Sides:
        """Height and width at which both members come out."""
        return self._chosen.bucket_of(index)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.take(index, None)

    def take(self, index: int, sample_id: int | None) -> Item:
        """See `cosmos_rl.data.items.take`."""
        return replace(self._chosen.take(index, sample_id), rejected=self._rejected.take(index, sample_id))

    def identify(self, index: int, sample_id: int | None) -> Item | None:
        """See `cosmos_rl.data.items.identify`."""
        chosen = self._chosen.identify(index, sample_id)
        rejected = self._rejected.identify(index, sample_id)
        if chosen is None or rejected is None:
            return None
        return replace(chosen, rejected=rejected)


def load_held_out_preferences(config: Config) -> PreferencePairs | PromptFile | None:
    """The preferences or the prompts in `validation.dataset`; None without validation or where none are named."""
    dataset = config.validation.dataset
    if not config.validation.enable or not dataset.local_dir:
        return None
    if is_prompt_file(dataset.local_dir) and not is_preference_table(dataset.local_dir):
        return PromptFile(dataset.local_dir)
    return PreferencePairs.of_config(dataset, config)
