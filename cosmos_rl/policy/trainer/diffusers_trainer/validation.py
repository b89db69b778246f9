"""Validation of fine-tuning: the loss of held-out pairs, and images of their captions or of prompts."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from cosmos_rl.data.given import Given, choose_own
from cosmos_rl.data.images import are_finite
from cosmos_rl.data.items import Item, Readable
from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.data.streams import Skipped, read_held_out
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.phase import count_parts
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.policy.config.validation_sets import ValidationSet
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.trainer.data_parallel import gather_over_ranks, split_chunks
from cosmos_rl.policy.trainer.diffusers_trainer.buckets import Buckets
from cosmos_rl.policy.trainer.diffusers_trainer.noising import Noising
from cosmos_rl.policy.trainer.own_media import OwnMedia
from cosmos_rl.policy.trainer.task import Notify, ValidationReport
from cosmos_rl.rollout.sampler import Giving, build_validation_samples
from cosmos_rl.tracking.media import Shown

MAX_VALIDATION_PROMPTS = 16
"""Images are sampled for at most so many distinct captions of a held-out folder."""


@dataclass(frozen=True)
class TestedSet:
    """A validation set, already opened: pairs or prompts."""

    chosen: ValidationSet
    pairs: Readable | None = None
    """What the loss is measured on."""
    prompts: Sequence[PromptRecord] = ()
    """What images are made of, where there are no pairs."""
    buckets: Buckets | None = None
    """The sizes of the pairs; None: all have one."""


class Totals:
    """Sums over the samples of a step: of their losses, of their weights, and of what else is reported of them."""

    def __init__(self, terms: Sequence[str]) -> None:
        self._values: dict[str, list[float]] = {name: [] for name in ("loss", "weight", *terms)}

    def add(self, loss: Tensor, weight: Tensor, terms: Mapping[str, Tensor]) -> None:
        """Take in a micro-batch: summed loss and weight, and terms ``[B]``."""
        for name, value in (("loss", loss), ("weight", weight), *terms.items()):
            self._values[name].append(float(value.detach().sum()))

    def mean(self) -> float:
        """Mean loss of this rank."""
        return sum(self._values["loss"]) / max(sum(self._values["weight"]), 1e-12)

    def reduce(self, context: Context) -> tuple[float, dict[str, float]]:
        """The weight of all ranks, and the means over it."""
        sums = dict(zip(self._values, context.sum_exactly(list(self._values.values())), strict=True))
        weight = sums.pop("weight")
        return weight, {name: value / max(weight, 1e-12) for name, value in sums.items()}


def note_unreadable(skipped: Skipped, buckets: Buckets | None) -> Skipped:
    """The same, with what was found to be unreadable while its size was looked up."""
    for index, reason in ({} if buckets is None else buckets.unreadable).items():
        skipped.note(index, reason)
    return skipped


class Judged(Protocol):
    """What is trained, as validation sees it."""

    model: PipelineModel
    noising: Noising
    terms: ClassVar[tuple[str, ...]]

    def prepare(self, purpose: str, step: int, ids: Sequence[int], items: Sequence[Item], dropout: float) -> Any:
        """What ``loss`` takes of items."""
        ...

    def loss(self, samples: Any) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """``(sum, weight)`` of what ``prepare`` made, and what else is reported of each sample."""
        ...


class Validator:
    """Judges the weights on one validation set."""

    def __init__(self, task: Judged, context: Context, tested: TestedSet) -> None:
        """``task``: what is trained."""
        self.chosen = tested.chosen
        self._task, self._model, self._context = task, task.model, context
        self._config = tested.chosen.config
        self._pairs, self._prompts, self._buckets = tested.pairs, tested.prompts, tested.buckets
        self._captions: list[str] | None = None
        self._first_frames: dict[str, Given] = {}
        bound = self._config.train.train_policy.max_skipped_frac
        skipped = Skipped.of(tested.pairs or (), bound, consequence="validation continues without")
        self._skipped = note_unreadable(skipped, tested.buckets)

    def run(self, notify: Notify) -> ValidationReport:
        """With the weights as they are; all ranks must call it."""
        if self._pairs is None:
            return ValidationReport(images=self._images(self._prompts))
        metrics = {**self.held_out_metrics(notify), "val/skipped": len(self._skipped.reasons)}
        prompts = self._held_out_prompts()
        images = self._images([PromptRecord(prompt) for prompt in prompts], self._own_frames(prompts))
        loss = metrics["val/loss_mean"]
        return ValidationReport(self.chosen.rename(metrics), images, objective=loss, loss=loss)

    def held_out_metrics(self, notify: Notify) -> dict[str, float]:
        """Mean loss and terms of the held-out samples; the same sigmas and noise at every call."""
        assert self._pairs is not None
        totals, about_set = Totals(self._task.terms), {"set": self.chosen.label} if self.chosen.label else {}
        chunks = list(self._held_out_chunks())
        for number, (size, ids, others) in enumerate(chunks):
            count_parts(number, len(chunks))
            notify("pre_per_step_validation_hook", {"batch_index": number, **about_set})
            read, items = read_held_out(self._pairs, ids, self._skipped)
            counts = bool(read)
            if not read:  # all ranks must meet in the forward pass
                read, items = self._read_any(self._pairs, others)
            if not read:  # on no rank, then
                continue
            with self._model.at_size(size):
                micro_sum, micro_weight, terms = self._task.loss(self._task.prepare("validation", 0, read, items, 0.0))
            if counts:
                totals.add(micro_sum, micro_weight, terms)
            score = float(micro_sum) / max(float(micro_weight), 1e-12)
            notify("post_per_step_validation_hook", {"batch_index": number, "val_score": score, **about_set})
        return {f"val/{name}_mean": value for name, value in totals.reduce(self._context)[1].items()}

    def _held_out_chunks(self) -> Iterator[tuple[Sides | None, list[int], Sequence[int]]]:
        """(size, this rank's held-out pairs of a forward pass, all of that size) for each pass; as many on every rank.

        A rank that has none left has a pass without any.
        """
        assert self._pairs is not None
        groups: list[tuple[Sides | None, Sequence[int]]] = [(None, range(len(self._pairs)))]
        if self._buckets is not None:
            groups = list(self._buckets.split())
        rank, ranks = self._context.dp_rank, self._context.dp_size
        for size, members in groups:
            for ids, counts in split_chunks(len(members), self._validation_size, rank, ranks):
                yield size, [members[i] for i in ids] if counts else [], members

    def _read_any(self, data: Readable, among: Sequence[int]) -> tuple[list[int], list[Item]]:
        """The first of some held-out pairs that can be read, and its position."""
        for index in among:
            read, items = read_held_out(data, [index], self._skipped)
            if read:
                return read, items
        return [], []

    def _held_out_prompts(self) -> list[str]:
        """Up to ``MAX_VALIDATION_PROMPTS`` distinct captions of the held-out pairs, in their order."""
        if self._captions is None:
            assert self._pairs is not None
            data = self._pairs
            # a data set that knows its captions need not decode its images for them
            prompts = data.prompts or (
                item.prompt for i in range(len(data)) for item in read_held_out(data, [i], self._skipped)[1]
            )
            usable = (prompt for prompt in dict.fromkeys(prompts) if data.find_refusal(prompt) is None)
            self._captions = list(itertools.islice(usable, MAX_VALIDATION_PROMPTS))
        return self._captions

    @property
    def _validation_size(self) -> int:
        """Items of one forward pass of validation."""
        return self._config.validation.batch_size or self._config.train.train_policy.mini_batch

    def _own_frames(self, prompts: Sequence[str]) -> dict[str, Given]:
        """For each caption the first frames of the first held-out video that has it, where the model takes any."""
        most, found = self._model.conditional_frames[1], self._first_frames
        assert self._pairs is not None
        for index in range(len(self._pairs)):
            if most == 0 or len(found) == len(prompts):
                break
            for item in read_held_out(self._pairs, [index], self._skipped)[1]:
                if item.prompt in prompts and item.prompt not in found:
                    count = self._model.count_given(most)
                    found[item.prompt] = choose_own(item, f"held-out {index}", most, count)
        return found

    def _images(
        self, records: Sequence[PromptRecord], own_frames: Mapping[str, Given] = MappingProxyType({})
    ) -> list[Shown]:
        """``validation.n_generation`` images per prompt; image k of prompt i has the same noise in every run.

        ``own_frames``: what they are conditioned on, by prompt, where the records do not say it.
        """
        config = self._config.policy.diffusers
        shape = self._model.latent_shape(*config.inference_size)
        give = Giving(self._model.conditional_frames)
        samples = build_validation_samples(records, self._config.validation.n_generation, give)

        def make(indices: Sequence[int], number: int) -> tuple[Tensor, Tensor]:
            noise = randomness.normal(shape, self._config.train.seed, "validation/picture", 0, indices)
            for row, sample in enumerate(samples[i] for i in indices):
                if sample.seed is not None:
                    noise[row] = torch.randn(shape, generator=torch.Generator().manual_seed(sample.seed))
            steps = config.sample.eval_num_steps or config.sample.num_steps
            prompts, negative = [samples[i].prompt for i in indices], [samples[i].negative for i in indices]
            guidance = config.sample.guidance_scale
            given = [own_frames.get(samples[i].prompt, samples[i].given) for i in indices]
            media = [self._task.noising.encoding.load_medium(one) for one in given if one is not None]
            found = self._model.sample(
                prompts, noise, num_steps=steps, guidance=guidance, negative=negative, media=media or None
            )
            return own_media.keep(indices, self._model.to_media(found)), are_finite(found)

        own_media = OwnMedia(self._context)
        with self._model.at_size(self.chosen.size):
            blank, finite = gather_over_ranks(len(samples), self._validation_size, self._context, make)
        rows, about = zip(samples, finite.tolist(), blank.tolist(), strict=True), (self._model.fps, self.chosen.label)
        return [
            Shown(own_media[i], one.prompt, one.sample_id, "fixed", {}, whole, empty, *about)
            for i, (one, whole, empty) in enumerate(rows)
        ]
