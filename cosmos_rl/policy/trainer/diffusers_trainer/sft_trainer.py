"""Supervised fine-tuning by flow matching: captioned images -> a transformer (or its adapters)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cosmos_rl.data.items import Item, Readable
from cosmos_rl.data.streams import Batch, Skipped, Stream, load_batches
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.phase import count_parts, enter_phase
from cosmos_rl.optim.optimizer import Refusal
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.trainer.base import TaskBase, WriteExport
from cosmos_rl.policy.trainer.diffusers_trainer.buckets import Buckets
from cosmos_rl.policy.trainer.diffusers_trainer.noising import NoisedSamples, Noising
from cosmos_rl.policy.trainer.diffusers_trainer.validation import TestedSet, Totals, Validator, note_unreadable
from cosmos_rl.policy.trainer.task import Notify, StepReport, ValidationReport, merge_reports
from cosmos_rl.utils.logging import logger


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
    validation: Sequence[TestedSet] = ()
    """What the run is validated on."""
    buckets: Buckets | None = None
    """The sizes of the training data; None: all have one."""
    export: Callable[[], WriteExport] | None = None
    """Copies the weights as they are now; its result writes them into a step's folder. None: no export."""


class SFTTrainer(TaskBase):
    """The SFT task. One step = encode, noise at keyed sigmas, flow-matching loss over micro-batches, optimiser step."""

    terms: ClassVar[tuple[str, ...]] = ()
    """What the loss reports of each sample, in addition to its value."""

    def __init__(self, config: Config, context: Context, parts: SftParts) -> None:
        self.model: PipelineModel = parts.model
        self.noising = parts.noising
        self._pairs, self._buckets = parts.pairs, parts.buckets
        params = parts.model.trainable_parameters()
        super().__init__(config, context, params, parts.stream, parts.export)
        self._batches: Iterator[Batch] = iter(())
        bound = config.train.train_policy.max_skipped_frac
        self._skipped = note_unreadable(Skipped.of(parts.pairs, bound), parts.buckets)
        self.validators = [Validator(self, context, one) for one in parts.validation]
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

    def close(self) -> None:
        """End the processes that read data: they outlast a stop signal, and the end of this one would wait for them."""
        self._batches = iter(())

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
        totals, alone = Totals(self.terms), self._config.train.rank_invariant
        size, count = self._config.train.train_policy.mini_batch, len(batch.items)
        parts = self._prepare_alone(step, batch) if alone else self._prepare_together(step, batch)
        for first, samples in zip(range(0, count, size), parts, strict=True):
            count_parts(first, count)
            self.model.set_gradient_sync(alone or first + size >= count)
            micro_sum, micro_weight, terms = self.loss(samples)
            (micro_sum * self.optimizer.loss_factor).backward()
            self.collect_gradient()
            totals.add(micro_sum, micro_weight, terms)
        return totals

    def _prepare_together(self, step: int, batch: Batch) -> Iterator[NoisedSamples]:
        """The micro-batches of a step, encoded in one go."""
        job, count = self._config.train.train_policy, len(batch.items)
        ids = [p.sample_id for p in batch.positions]
        whole = self.prepare("train", step, ids, batch.items, job.caption_dropout)
        self.compare_peers("the noise and latents of their samples", whole.noise, whole.clean)
        for first in range(0, count, job.mini_batch):
            yield whole.rows(slice(first, first + job.mini_batch))

    def _prepare_alone(self, step: int, batch: Batch) -> Iterator[NoisedSamples]:
        """The samples of a step, each with bits that depend on no other one: encoders may give a sample other last bits
        in a batch of another size, and dropout is drawn for each sample."""
        dropout = self._config.train.train_policy.caption_dropout
        for position, item in zip(batch.positions, batch.items, strict=True):
            torch.manual_seed(randomness.torch_seed(self._seed, "dropout", step, position.sample_id))
            yield self.prepare("train", step, [position.sample_id], [item], dropout)

    def validate(self, step: int, notify: Notify) -> ValidationReport:
        """Held-out loss at fixed sigmas and noise, and images from fixed noise, both with the EMA weights if kept."""
        due = [one if one.chosen.is_due(step, self.total_steps) else None for one in self.validators]
        with self.use_averaged_weights(), torch.no_grad(), self.model.eval_mode():
            return merge_reports([None if one is None else one.run(notify) for one in due])

    def prepare(
        self, purpose: str, step: int, ids: Sequence[int], items: Sequence[Item], dropout: float
    ) -> NoisedSamples:
        """What ``loss`` takes of items; all draws are keyed, see ``Noising``."""
        return self.noising.prepare(purpose, step, ids, items, dropout)

    def loss(self, samples: Any) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """``(sum, weight)`` of what ``prepare`` made, and what else is reported of each sample, named in ``terms``."""
        return *samples.loss(self.model), {}

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
