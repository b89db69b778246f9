"""Supervised fine-tuning by flow matching: captioned images -> a transformer (or its adapters)."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from cosmos_rl.data.given import Given, choose_own
from cosmos_rl.data.images import are_finite
from cosmos_rl.data.items import Item, Readable
from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.data.streams import Batch, Skipped, Stream, load_batches, read_held_out
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.phase import count_parts, enter_phase
from cosmos_rl.optim.optimizer import Refusal
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.trainer.base import TaskBase, WriteExport
from cosmos_rl.policy.trainer.data_parallel import gather_over_ranks, split_chunks
from cosmos_rl.policy.trainer.diffusers_trainer.buckets import Buckets
from cosmos_rl.policy.trainer.diffusers_trainer.noising import NoisedSamples, Noising
from cosmos_rl.policy.trainer.own_media import OwnMedia
from cosmos_rl.policy.trainer.task import Notify, StepReport, ValidationReport
from cosmos_rl.rollout.sampler import Giving, build_validation_samples
from cosmos_rl.tracking.media import Shown
from cosmos_rl.utils.logging import logger

MAX_VALIDATION_PROMPTS = 16
"""Images are sampled for at most so many distinct captions of a held-out folder."""


@dataclass(frozen=True)
class SftParts:
    """Everything that a step needs, already loaded."""

    model: PipelineModel
    pairs: Readable
    """Training data."""
    stream: Stream
    """Which pair is where in the run."""
    noising: Noising
    """Pairs -> what the loss takes."""
    held_out: Readable | None = None
    """Pairs of validation."""
    val_prompts: Sequence[PromptRecord] = ()
    """What validation samples images of, where it has no pairs."""
    buckets: Buckets | None = None
    """The sizes of the training data; None: all have one."""
    held_out_buckets: Buckets | None = None
    """The same of the pairs of validation."""
    export: Callable[[], WriteExport] | None = None
    """Copies the weights as they are now; its result writes them into a step's folder. None: no export."""


class Totals:
    """Sums over the samples of a step: of their losses, of their weights, and of what else is reported of them."""

    def __init__(self, terms: Sequence[str]) -> None:
        self._sums = dict.fromkeys(("loss", "weight", *terms), 0.0)

    def add(self, loss: Tensor, weight: Tensor, terms: Mapping[str, Tensor]) -> None:
        """Take in a micro-batch: summed loss and weight, and terms ``[B]``."""
        for name, value in (("loss", loss), ("weight", weight), *terms.items()):
            self._sums[name] += float(value.detach().sum())

    def mean(self) -> float:
        """Mean loss of this rank."""
        return self._sums["loss"] / max(self._sums["weight"], 1e-12)

    def reduce(self, context: Context) -> tuple[float, dict[str, float]]:
        """The weight of all ranks, and the means over it."""
        sums = dict(zip(self._sums, context.sum_over_ranks(list(self._sums.values())), strict=True))
        weight = sums.pop("weight")
        return weight, {name: value / max(weight, 1e-12) for name, value in sums.items()}


class SFTTrainer(TaskBase):
    """The SFT task. One step = encode, noise at keyed sigmas, flow-matching loss over micro-batches, optimiser step."""

    terms: ClassVar[tuple[str, ...]] = ()
    """What the loss reports of each sample, in addition to its value."""

    def __init__(self, config: Config, context: Context, parts: SftParts) -> None:
        self.model: PipelineModel = parts.model
        self.noising = parts.noising
        self._pairs, self._held_out, self._val_prompts = parts.pairs, parts.held_out, parts.val_prompts
        self._buckets, self._held_out_buckets = parts.buckets, parts.held_out_buckets
        params = parts.model.trainable_parameters()
        super().__init__(config, context, params, parts.stream, parts.export)
        self._batches: Iterator[Batch] = iter(())
        self._captions: list[str] | None = None
        bound = config.train.train_policy.max_skipped_frac
        self._skipped = Skipped.of(parts.pairs, bound)
        self._first_frames: dict[str, Given] = {}
        self._val_skipped = Skipped.of(parts.held_out or (), bound, consequence="validation continues without")
        for skipped, buckets in ((self._skipped, parts.buckets), (self._val_skipped, parts.held_out_buckets)):
            for index, error in ({} if buckets is None else buckets.unreadable).items():
                skipped.note(index, error)
        self._describe()

    def start(self, step: int) -> None:
        """Open the data at 0-based ``step``."""
        self._batches = load_batches(
            self._pairs,
            self.stream,
            step,
            self.total_steps,
            rank=self._context.dp_rank,
            world_size=self._context.dp_size,
            num_workers=self._config.train.train_policy.dataloader_num_workers,
            prefetch_factor=self._config.train.train_policy.dataloader_prefetch_factor,
            skipped=self._skipped,
        )

    def train_step(self, step: int) -> StepReport:
        """One optimiser step on the batch at ``step``."""
        with enter_phase("reading data"):
            batch = next(self._batches)
        torch.manual_seed(randomness.torch_seed(self._seed, "dropout", step, self._context.dp_rank))
        self.model.transformer.train()
        with self.model.at_size(batch.positions[0].size):
            totals = self._accumulate(step, batch)
        (loss_max,) = self._context.max_over_ranks([totals.mean()])
        weight, means = totals.reduce(self._context)
        loss = means.pop("loss")
        result = self.apply_gradient(step, weight=weight, loss=loss, expects_gradient=loss > 0.0)
        metrics = {
            "train/loss_mean": loss,
            "train/loss_max": loss_max,
            **{f"train/{name}_mean": value for name, value in means.items()},
            "optim/grad_norm": result.grad_norm,
            "optim/learning_rate": result.learning_rate,
            "train/epoch": self.epoch(step),
            "data/skipped": len(self._skipped.reasons),
            "optim/zero_gradients": float(result.refusal is Refusal.ZERO),
            **self.optimizer.metrics(),
        }
        rates = [item.fps for item in batch.items if item.fps is not None]
        if rates:
            metrics["data/fps_mean"] = sum(rates) / len(rates)
        return StepReport(metrics, result.refusal)

    def _accumulate(self, step: int, batch: Batch) -> Totals:
        """The gradient of a step, micro-batch by micro-batch."""
        job, totals, count = self._config.train.train_policy, Totals(self.terms), len(batch.items)
        ids, size = [p.sample_id for p in batch.positions], job.mini_batch
        whole = self.prepare("train", step, ids, batch.items, job.caption_dropout)
        for first in range(0, count, size):
            count_parts(first, count)
            self.model.set_gradient_sync(first + size >= count)
            micro_sum, micro_weight, terms = self.loss(whole.rows(slice(first, first + size)))
            (micro_sum * self.optimizer.loss_factor).backward()
            totals.add(micro_sum, micro_weight, terms)
        return totals

    def validate(self, step: int, notify: Notify) -> ValidationReport:
        """Held-out loss at fixed sigmas and noise, and images from fixed noise, both with the EMA weights if kept."""
        if self._held_out is None and not self._val_prompts:
            return ValidationReport()
        with self.use_averaged_weights(), torch.no_grad(), self.model.eval_mode():
            if self._held_out is None:
                return ValidationReport(images=self._images(self._val_prompts))
            metrics = {**self.held_out_metrics(notify), "val/skipped": len(self._val_skipped.reasons)}
            prompts = self._held_out_prompts()
            images = self._images([PromptRecord(prompt) for prompt in prompts], self._own_frames(prompts))
            return ValidationReport(metrics, images, objective=metrics["val/loss_mean"])

    def prepare(
        self, purpose: str, step: int, ids: Sequence[int], items: Sequence[Item], dropout: float
    ) -> NoisedSamples:
        """What ``loss`` takes of items; all draws are keyed, see ``Noising``."""
        return self.noising.prepare(purpose, step, ids, items, dropout)

    def loss(self, samples: Any) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """``(sum, weight)`` of what ``prepare`` made, and what else is reported of each sample, named in ``terms``."""
        return *samples.loss(self.model), {}

    def held_out_metrics(self, notify: Notify) -> dict[str, float]:
        """Mean loss and terms of the held-out samples; the same sigmas and noise at every call."""
        assert self._held_out is not None
        totals = Totals(self.terms)
        chunks = list(self._held_out_chunks())
        for number, (size, ids, others) in enumerate(chunks):
            count_parts(number, len(chunks))
            notify("pre_per_step_validation_hook", {"batch_index": number})
            read, items = read_held_out(self._held_out, ids, self._val_skipped)
            counts = bool(read)
            if not read:  # all ranks must meet in the forward pass
                read, items = self._read_any(self._held_out, others)
            if not read:  # on no rank, then
                continue
            with self.model.at_size(size):
                micro_sum, micro_weight, terms = self.loss(self.prepare("validation", 0, read, items, 0.0))
            if counts:
                totals.add(micro_sum, micro_weight, terms)
            score = float(micro_sum) / max(float(micro_weight), 1e-12)
            notify("post_per_step_validation_hook", {"batch_index": number, "val_score": score})
        return {f"val/{name}_mean": value for name, value in totals.reduce(self._context)[1].items()}

    def _held_out_chunks(self) -> Iterator[tuple[Sides | None, list[int], Sequence[int]]]:
        """(size, this rank's held-out pairs of a forward pass, all of that size) for each pass; as many on every rank.

        A rank that has none left has a pass without any.
        """
        assert self._held_out is not None
        groups: list[tuple[Sides | None, Sequence[int]]] = [(None, range(len(self._held_out)))]
        if self._held_out_buckets is not None:
            groups = list(self._held_out_buckets.split())
        rank, ranks = self._context.dp_rank, self._context.dp_size
        for size, members in groups:
            for ids, counts in split_chunks(len(members), self._validation_size, rank, ranks):
                yield size, [members[i] for i in ids] if counts else [], members

    def _read_any(self, data: Readable, among: Sequence[int]) -> tuple[list[int], list[Item]]:
        """The first of some held-out pairs that can be read, and its position."""
        for index in among:
            read, items = read_held_out(data, [index], self._val_skipped)
            if read:
                return read, items
        return [], []

    def _held_out_prompts(self) -> list[str]:
        """Up to ``MAX_VALIDATION_PROMPTS`` distinct captions of the held-out pairs, in their order."""
        if self._captions is None:
            assert self._held_out is not None
            data = self._held_out
            # a data set that knows its captions need not decode its images for them
            prompts = data.prompts or (
                item.prompt for i in range(len(data)) for item in read_held_out(data, [i], self._val_skipped)[1]
            )
            usable = (prompt for prompt in dict.fromkeys(prompts) if data.find_refusal(prompt) is None)
            self._captions = list(itertools.islice(usable, MAX_VALIDATION_PROMPTS))
        return self._captions

    @property
    def _validation_size(self) -> int:
        """Items of one forward pass of validation."""
        return self._config.validation.batch_size or self._config.train.train_policy.mini_batch

    def fingerprint(self) -> dict[str, Any]:
        """What the positions in the data and the draws depend on."""
        sft = self._config.train.train_policy
        return {
            "sizes of the samples (policy.diffusers.buckets)": self._buckets.digest if self._buckets else "all alike",
            "seed": self._seed,
            "global_batch_size": self.stream.batch,
            "dataset_length": self.stream.length,
            "data (digest of names and captions)": self._pairs.digest,
            "dataloader_seed": sft.dataloader_seed,
            "dataloader_shuffle": sft.dataloader_shuffle,
            "dataloader_drop_last": sft.dataloader_drop_last,
            "trained denoisers (policy.diffusers.trained_denoiser)": sorted(self.model.denoisers),
        }

    # ---- inside ------------------------------------------------------------------------------------------------

    def _own_frames(self, prompts: Sequence[str]) -> dict[str, Given]:
        """For each caption the first frames of the first held-out video that has it, where the model takes any."""
        most, found = self.model.conditional_frames[1], self._first_frames
        assert self._held_out is not None
        for index in range(len(self._held_out)):
            if most == 0 or len(found) == len(prompts):
                break
            for item in read_held_out(self._held_out, [index], self._val_skipped)[1]:
                if item.prompt in prompts and item.prompt not in found:
                    count = self.model.count_given(most)
                    found[item.prompt] = choose_own(item, f"held-out {index}", most, count)
        return found

    def _images(
        self, records: Sequence[PromptRecord], own_frames: Mapping[str, Given] = MappingProxyType({})
    ) -> list[Shown]:
        """``validation.n_generation`` images per prompt; image k of prompt i has the same noise in every run.

        ``own_frames``: what they are conditioned on, by prompt, where the records do not say it.
        """
        config = self._config.policy.diffusers
        shape = self.model.latent_shape(*config.inference_size)
        give = Giving(self.model.conditional_frames)
        samples = build_validation_samples(records, self._config.validation.n_generation, give)

        def make(indices: Sequence[int], number: int) -> tuple[Tensor, Tensor]:
            noise = randomness.normal(shape, self._seed, "validation/picture", 0, indices)
            for row, sample in enumerate(samples[i] for i in indices):
                if sample.seed is not None:
                    noise[row] = torch.randn(shape, generator=torch.Generator().manual_seed(sample.seed))
            steps = config.sample.eval_num_steps or config.sample.num_steps
            prompts, negative = [samples[i].prompt for i in indices], [samples[i].negative for i in indices]
            guidance = config.sample.guidance_scale
            given = [own_frames.get(samples[i].prompt, samples[i].given) for i in indices]
            media = [self.noising.encoding.load_medium(one) for one in given if one is not None]
            found = self.model.sample(
                prompts, noise, num_steps=steps, guidance=guidance, negative=negative, media=media or None
            )
            return own_media.keep(indices, self.model.to_media(found)), are_finite(found)

        own_media = OwnMedia(self._context)
        blank, finite = gather_over_ranks(len(samples), self._validation_size, self._context, make)
        rows = zip(samples, finite.tolist(), blank.tolist(), strict=True)
        return [
            Shown(own_media[i], one.prompt, one.sample_id, "fixed", finite=whole, blank=empty, fps=self.model.fps)
            for i, (one, whole, empty) in enumerate(rows)
        ]

    def _describe(self) -> None:
        count = sum(p.numel() for p in self.params.values())
        policy = self._config.policy
        chosen = any((policy.freeze_pattern, policy.trainable_pattern, policy.trainable_map))
        what = "whole transformer"
        if chosen:
            what = "chosen part of the transformer"
        if policy.lora is not None:
            what = "LoRA adapter"
        logger.info(
            f"Training the {what} of {self.model.model_str}: {count:,} parameters on {self._context.device}, compute "
            f"in {self._config.train.param_dtype}; {self.stream.length} samples, {self.stream.batch} per step, "
            f"{self.stream.steps_until(1)} steps per epoch, {self.total_steps} steps"
        )
