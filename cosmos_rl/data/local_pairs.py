"""Data set of a flat folder of pairs ``<name>.json`` (``{"prompt": "..."}``) and ``<name>.jpg|.jpeg|.png|.webp``."""

import functools
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from cosmos_rl.data.images import load_image
from cosmos_rl.data.items import Item
from cosmos_rl.data.pair_files import digest_pairs, load_pairs
from cosmos_rl.data.prompts import PromptFile, is_prompt_file
from cosmos_rl.policy.config import Config
from cosmos_rl.utils.logging import logger

_DECODED_BYTES = 256 * 2**20
"""Decoded images up to this size are kept: a small data set is decoded once, a large one hardly notices."""


class LocalPairs(Sequence[Item]):
    """Data set of captioned images; images are decoded when they are asked for."""

    def __init__(self, folder: str | Path, height: int, width: int) -> None:
        """Read all captions of ``folder``; images come out as ``[3, height, width]``.

        Raises:
            UserError: no usable pair, or more captions and images without a partner than pairs.
        """
        self.folder = Path(folder).expanduser()
        self._size = (height, width)
        self._decoded: dict[int, Tensor] = {}
        self.pairs, self.problems, left_out = load_pairs(self.folder)
        if left_out:
            logger.warning(left_out)

    @property
    def prompts(self) -> list[str]:
        """All captions, in the order of the pairs; no image is decoded for them."""
        return [pair.prompt for pair in self.pairs]

    @property
    def names(self) -> list[str]:
        """The caption files, in the same order."""
        return [f"{pair.name}.json" for pair in self.pairs]

    @functools.cached_property
    def digest(self) -> str:
        """Of names and captions, in the order of the pairs."""
        return digest_pairs(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        pair = self.pairs[index]
        visual = self._decoded.get(index)
        if visual is None:
            visual = load_image(self.folder / pair.file, *self._size)
            if (len(self._decoded) + 1) * visual.nbytes <= _DECODED_BYTES:
                self._decoded[index] = visual
        return Item(visual=visual, prompt=pair.prompt, name=pair.name)


def load_held_out_data(config: Config) -> LocalPairs | PromptFile | None:
    """The pairs or the prompts in `validation.dataset.local_dir`; None without validation or where none is named."""
    source = config.validation.dataset.local_dir
    if not config.validation.enable or not source:
        return None
    if is_prompt_file(source):
        return PromptFile(source)
    return LocalPairs(source, *config.policy.diffusers.inference_size)
