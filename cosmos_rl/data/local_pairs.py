"""Data set of a folder of captioned images or videos, which may be in tars."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cosmos_rl.data.images import DECODING, load_image
from cosmos_rl.data.items import BadSample, Item
from cosmos_rl.data.pair_files import Pair, describe_pairs, digest_pairs, list_embedding_folders, load_pairs
from cosmos_rl.data.picture_sizes import Measured, measure_file
from cosmos_rl.data.prompts import PromptFile, is_prompt_file
from cosmos_rl.data.shards import find_root
from cosmos_rl.data.tar_files import describe_version
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.buckets import Sides, choose_size
from cosmos_rl.policy.config.jobs import job_kind
from cosmos_rl.utils.logging import logger

_DECODED_BYTES = 256 * 2**20
"""Decoded media up to this size are kept: a small data set is decoded once, a large one hardly notices."""


class LocalPairs(Sequence[Item]):
    """Data set of captioned images or videos, which are decoded when they are asked for.

    Of a video with more frames than needed each position of the run gets a window of its own.
    """

    def __init__(
        self,
        folder: str | Path,
        height: int,
        width: int,
        *,
        frames: int | None = None,
        seed: int = 0,
        pairs: Sequence[Pair] | None = None,
        sizes: Sequence[Sides] = (),
        like: "LocalPairs | None" = None,
    ) -> None:
        """Read the captions of ``folder``; elements come out as ``[3, (frames,) height, width]``.

        Args:
            frames: of the videos to read; None: the folder holds images.
            seed: of the draw of windows.
            pairs: what to read; None: all that the folder holds.
            sizes: each element comes out at the one of the nearest aspect ratio; empty: all at ``height``, ``width``.
            like: each element comes out at the size of that one's in place.

        Raises:
            UserError: no usable pair in the folder, or more captions and images without a partner than pairs.
        """
        self.folder = Path(folder).expanduser()
        self._size, self._sizes, self._like = (height, width), sizes, like
        self._measured: dict[int, Measured] = {}
        self._frames, self._seed = frames, seed
        self._decoded: dict[int, Item] = {}
        self._bytes = 0
        self.problems: Sequence[str] = ()
        if pairs is not None:
            self.pairs = pairs
            return
        video = frames is not None
        self.pairs, self.problems, left_out = load_pairs(self.folder, video=video)
        self.folder = find_root(self.folder)
        logger.info(f"{self.folder}: {describe_pairs(self.pairs, video=video)}")
        if left_out:
            logger.warning(left_out)
        for name in list_embedding_folders(self.folder):
            logger.info(f"{self.folder / name} is not needed: captions are encoded by the model's own text encoder")

    @classmethod
    def of_config(cls, folder: str | Path, config: Config) -> "LocalPairs":
        """The folder with the sizes that a job trains on."""
        return cls(folder, *config.policy.diffusers.inference_size, **reading(config))

    @property
    def prompts(self) -> list[str]:
        """All captions, in the order of the pairs; nothing is decoded for them."""
        return [pair.prompt for pair in self.pairs]

    @property
    def names(self) -> list[str]:
        """Where the captions are, in the same order."""
        return [pair.caption for pair in self.pairs]

    @property
    def edited(self) -> list[str]:
        """The images that the captions name to be edited, in the same order; empty where there is none."""
        return [pair.image and str(self.folder / pair.image) for pair in self.pairs]

    @functools.cached_property
    def digest(self) -> str:
        """Of names and captions, in the order of the pairs."""
        return digest_pairs(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.take(index, None)

    def take(self, index: int, sample_id: int | None) -> Item:
        """A pair; of a long video the window of position ``sample_id``, or the one in its middle (None)."""
        whole = self._decoded.get(index)
        if whole is not None:
            return whole
        with self._name_file(index):
            return self._read(index, sample_id)

    def _read(self, index: int, sample_id: int | None) -> Item:
        pair = self.pairs[index]
        size = self.bucket_of(index)
        source = self._describe(pair.file, 0, size)  # before it is read: if it is written meanwhile it is another one
        if self._frames is None:
            item = Item(load_image(self.folder / pair.file, *size), pair.prompt, pair.name, source=source)
            if pair.image:
                item = replace(item, edits=self.folder / pair.image)
            return self._keep(index, item)
        from cosmos_rl.data.videos import load_clip

        clip = load_clip(self.folder / pair.file, self._frames, *size, self._window_of(sample_id))
        source = source and self._describe(pair.file, clip.start, size)
        item = Item(clip.visual, pair.prompt, pair.name, clip.fps, source)
        if clip.windows == 1:
            return self._keep(index, item)
        return item

    def identify(self, index: int, sample_id: int | None) -> Item | None:
        """What ``take`` would give, without its image or video; None: the file cannot be looked at.

        Raises:
            BadSample: it is a video that is broken or too short.
        """
        pair, start, fps = self.pairs[index], 0, None
        if self._frames is not None:
            from cosmos_rl.data.videos import find_window

            with self._name_file(index):
                window = find_window(self.folder / pair.file, self._frames, self._window_of(sample_id))
            start, fps = window.start, window.fps
        source = self._describe(pair.file, start, self.bucket_of(index))
        if source is None:
            return None
        return Item(torch.empty(0), pair.prompt, pair.name, fps, source)

    def measure(self, index: int) -> Measured:
        """A file's height and width.

        Raises:
            UserError: it cannot be read.
        """
        found = self._measured.get(index)
        if found is None:
            found = measure_file(self.folder, self.pairs[index].file, video=self._frames is not None)
            self._measured[index] = found
        return found

    def bucket_of(self, index: int) -> Sides:
        """Height and width at which an element comes out.

        Raises:
            BadSample: they depend on the file, which cannot be read.
        """
        if self._like is not None:
            return self._like.bucket_of(index)
        if not self._sizes:
            return self._size
        with self._name_file(index):
            try:
                return choose_size(self.measure(index).sides, self._sizes)
            except UserError as error:
                raise BadSample(str(error)) from error

    @contextlib.contextmanager
    def _name_file(self, index: int) -> Iterator[None]:
        """Let a `BadSample` say which file it is about."""
        try:
            yield
        except BadSample as error:
            error.file = error.file or str(self.folder / self.pairs[index].file)
            raise

    def _window_of(self, sample_id: int | None) -> Callable[[int], int]:
        from cosmos_rl.data.videos import start_of_middle

        if sample_id is None:
            return start_of_middle
        return random.Random(f"{self._seed}/window/{sample_id}").randrange

    def _describe(self, file: str, start: int, size: Sides) -> str | None:
        version = describe_version(self.folder / file)
        return version and f"{version}/{size}/{self._frames or 1} from {start}/{DECODING}"

    def _keep(self, index: int, item: Item) -> Item:
        """Remember what is the same at every call, while there is room."""
        if self._bytes + item.visual.nbytes <= _DECODED_BYTES:
            self._decoded[index] = item
            self._bytes += item.visual.nbytes
        return item


def reading(config: Config) -> dict[str, Any]:
    """Keywords of how a job reads its media."""
    diffusers = config.policy.diffusers
    how: dict[str, Any] = {"frames": diffusers.train_frames if diffusers.is_video else None, "seed": config.train.seed}
    if diffusers.buckets is not None and not job_kind(config).online:
        how["sizes"] = diffusers.training_sizes
    return how


def load_held_out_data(config: Config) -> LocalPairs | PromptFile | None:
    """The pairs or the prompts in `validation.dataset.local_dir`; None without validation or where none is named."""
    source = config.validation.dataset.local_dir
    if not config.validation.enable or not source:
        return None
    if is_prompt_file(source):
        return PromptFile(source)
    return LocalPairs.of_config(source, config)
