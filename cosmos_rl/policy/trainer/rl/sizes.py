"""Which prompts a step of reinforcement learning takes, and at which size it makes their samples."""

import hashlib
from collections.abc import Sequence
from typing import Any

from cosmos_rl.data.bucket_stream import BucketStream
from cosmos_rl.data.prompt_sizes import list_sizes
from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.data.streams import MapStream, Position, Stream
from cosmos_rl.distributed import randomness
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.buckets import Sides


class SizedPrompts:
    """The stream of prompts and the sizes of its steps: all samples of a step have one.

    Where rows name sizes a step takes prompts of one size, and those that name none have ``inference_size``; else each
    step draws one of the sizes, keyed by the run's seed and its number.
    """

    def __init__(self, config: Config, prompts: Sequence[PromptRecord], per_step: int) -> None:
        """
        Raises:
            UserError: a row names a size that is not configured, or prompts and batch do not fit.
        """
        job, diffusers = config.train.train_policy, config.policy.diffusers
        self._seed = config.train.seed
        self._drawn: Sequence[Sides] = ()
        self.data_size: Sides | None = None
        """Height and width of real samples; None: those of all samples."""
        self.digest: str | None = None
        """Of the sizes of all prompts, in order, which decide what a step takes; None: rows name none."""
        drop_last = job.dataloader_drop_last and len(prompts) >= per_step
        self.stream: Stream = MapStream(
            len(prompts), per_step, job.dataloader_seed, job.dataloader_shuffle, drop_last=drop_last
        )
        if diffusers.buckets is None:
            self.identity: Any = "all alike"
            return
        self.data_size = diffusers.inference_size
        named = list_sizes(prompts, diffusers.training_sizes)
        if not any(named):
            self._drawn = sorted(diffusers.training_sizes)
            self.identity = [list(size) for size in self._drawn]
            return
        sizes = [size or diffusers.inference_size for size in named]
        options = {"shuffle": job.dataloader_shuffle, "drop_last": drop_last}
        self.stream = BucketStream.of_sizes(sizes, per_step, job.dataloader_seed, **options)
        self.stream.require_steps(config.train.epoch)
        self.identity = "of the prompts"
        self.digest = hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]

    def choose(self, step: int, positions: Sequence[Position]) -> Sides | None:
        """Height and width of all samples of a step; None: the configured ones."""
        if not self._drawn:
            return positions[0].size
        u = float(randomness.uniform(self._seed, "size", step, [0])[0])
        return self._drawn[int(u * len(self._drawn))]
