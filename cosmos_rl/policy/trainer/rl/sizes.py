"""Which prompts a step of reinforcement learning takes, of which sets, and at which size it makes their samples."""

import hashlib
from collections.abc import Sequence
from typing import Any

from cosmos_rl.data.bucket_stream import BucketStream
from cosmos_rl.data.prompt_sizes import SIZED_SETS, list_sizes
from cosmos_rl.data.prompts import PromptRecord, digest_prompts
from cosmos_rl.data.set_schedule import SetSchedule
from cosmos_rl.data.set_stream import SetStream, group_by_set
from cosmos_rl.data.streams import MapStream, Position, Stream
from cosmos_rl.distributed import randomness
from cosmos_rl.errors import UserError
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
        self._digest: str | None = None  # of the sizes of all prompts, in order, which decide what a step takes
        drop_last = job.dataloader_drop_last and len(prompts) >= per_step
        self._sets: Any = "one"  # what decides which set gives a prompt, and digests of their prompts
        self.stream = self._build_stream(config, prompts, per_step, drop_last)
        self.sizes: tuple[Sides | None, ...] = (None,)
        """That steps may have; None: the configured one."""
        if diffusers.buckets is None:
            self._identity: Any = "all alike"
            return
        self.data_size = diffusers.inference_size
        self.sizes = diffusers.training_sizes
        named = list_sizes(prompts, diffusers.training_sizes)
        if any(named) and job.dataset.sets:
            raise UserError(f"train.train_policy.dataset.sets: {SIZED_SETS}")
        if not any(named):
            self._drawn = sorted(diffusers.training_sizes)
            self._identity = [list(size) for size in self._drawn]
            return
        sizes = [size or diffusers.inference_size for size in named]
        self.sizes = tuple(dict.fromkeys(sizes))
        options = {"shuffle": job.dataloader_shuffle, "drop_last": drop_last}
        self.stream = BucketStream.of_sizes(sizes, per_step, job.dataloader_seed, **options)
        self.stream.require_steps(config.train.epoch)
        self._identity = "of the prompts"
        self._digest = hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]

    def _build_stream(self, config: Config, prompts: Sequence[PromptRecord], per_step: int, drop_last: bool) -> Stream:
        job, steps = config.train.train_policy, config.train.max_num_steps
        sets, options = job.dataset.sets, (job.dataloader_seed, job.dataloader_shuffle)
        if not sets or steps is None:  # without an end, which the rules ask for, there are no sets
            return MapStream(len(prompts), per_step, *options, drop_last=drop_last)
        members = group_by_set(prompts, len(sets))
        digests = [digest_prompts([prompts[index] for index in own]) for own in members]
        described = zip(sets, members, digests, strict=True)
        self._sets = [job.dataset.mix]
        self._sets += [
            f"{one.shown_name}: {len(own)} prompts ({digest}), weight {one.weight!r}, {one.shown_steps}"
            for one, own, digest in described
        ]
        return SetStream(members, SetSchedule(sets, per_step, job.dataset.mix == "steps"), steps, *options)

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must have in common with its checkpoint."""
        return {
            "prompt sets (train.train_policy.dataset.sets)": self._sets,
            "sizes of the samples (policy.diffusers.buckets)": self._identity,
            "sizes of the prompts (policy.diffusers.buckets)": self._digest,
        }

    def choose(self, step: int, positions: Sequence[Position]) -> Sides | None:
        """Height and width of all samples of a step; None: the configured ones."""
        if not self._drawn:
            return positions[0].size
        u = float(randomness.uniform(self._seed, "size", step, [0])[0])
        return self._drawn[int(u * len(self._drawn))]
