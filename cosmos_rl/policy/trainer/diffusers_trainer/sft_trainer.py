"""Supervised fine-tuning by flow matching: captioned images -> a transformer (or its adapters)."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.data.images import are_finite
from cosmos_rl.data.items import BadSample, Item, Part, Readable, list_captions
from cosmos_rl.data.prompts import PromptRecord, check_sampling, find_unused_keys, to_prompt_record
from cosmos_rl.data.streams import Batch, MapStream, Skipped, load_batches, read_held_out
from cosmos_rl.data.text_lengths import find_refusal
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.optim.optimizer import Refusal
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.plan import plan_sft
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.trainer.base import TaskBase, count_steps
from cosmos_rl.policy.trainer.data_parallel import gather_over_ranks, split_chunks
from cosmos_rl.policy.trainer.diffusers_trainer.common import (
    build_model,
    open_dataset,
    prepare_export,
)
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding
from cosmos_rl.policy.trainer.diffusers_trainer.noising import Noising
from cosmos_rl.policy.trainer.task import Notify, StepReport, ValidationReport
from cosmos_rl.rollout.sampler import build_validation_samples
from cosmos_rl.tracking.media import Shown
from cosmos_rl.utils.logging import logger

MAX_VALIDATION_PROMPTS = 16
"""Images are sampled for at most so many distinct captions of a held-out folder."""


class SFTTrainer(TaskBase):
    """The SFT task. One step = encode, noise at keyed sigmas, flow-matching loss over micro-batches, optimiser step."""

    def __init__(self, config: Config, context: Context, *, dataset: Any, val_dataset: Any = None) -> None:
        """Load the model, open the data, build the optimiser.

        Raises:
            UserError: data or model do not fit the configuration.
        """
        self._config = config
        self._context = context
        self._seed = config.train.seed
        self._dataset = open_dataset(dataset, config, "dataset")
        self._val_dataset: Any = None
        self._val_records: list[PromptRecord] | None = None
        if config.validation.enable:
            self._val_dataset = self._split_off_held_out(val_dataset)
            self._val_records = self._load_validation_records()
        sft, key = config.train.train_policy, "train.global_batch_size"
        if config.train.global_batch_size is None:
            key = "train.train_batch_per_replica x ranks"
        batch = plan_sft(config).total
        self.stream = MapStream(
            len(self._dataset), batch, sft.dataloader_seed, sft.dataloader_shuffle, sft.dataloader_drop_last, key
        )
        model = build_model(config, context, rest_on_cpu=sft.cached_latents or sft.cached_text)
        self.model: DiffuserModel = model
        steps = self.stream.steps_per_epoch
        super().__init__(
            config,
            context,
            model.trainable_parameters(),
            count_steps(steps, config),
            steps,
            lambda: prepare_export(model, keep=context.is_main),
        )
        self.encoding = Encoding(model, config)
        self._noising = Noising(model, self.encoding, config)
        self._batches: Iterator[Batch] = iter(())
        self._val_prompts: list[str] | None = None
        self._skipped = Skipped(len(self._dataset), sft.max_skipped_frac)
        held_out = 0
        if self._val_dataset is not None:
            held_out = len(self._val_dataset)
        self._val_skipped = Skipped(held_out, sft.max_skipped_frac, consequence="validation continues without")
        self._items, self._val_items = self._wrap_readable()
        self._describe()

    def _wrap_readable(self) -> tuple[Readable, Readable]:
        """Training and validation data without the captions that no tokenizer takes; long ones are counted."""
        encoders, empty = self.model.build_token_counters(), ()
        self.model.warns_of_cuts = self._context.is_main
        if self._context.is_main:
            self.model.warn_about_truncation(list_captions(self._dataset), "captions")
            validation = [(repr(record.prompt[:40]), record.prompt) for record in self._val_records or ()]
            self.model.warn_about_truncation(validation or list_captions(self._val_dataset), "validation captions")
        return Readable(self._dataset, encoders), Readable(self._val_dataset or empty, encoders)

    def _split_off_held_out(self, val_dataset: Any) -> Any:
        """The validation data: what is given, else the first ``dataset.test_size`` training samples, taken out."""
        share = self._config.train.train_policy.dataset.test_size
        if share is None or self._config.validation.dataset.local_dir:
            return open_dataset(val_dataset, self._config, "val_dataset")
        if callable(val_dataset) and not hasattr(val_dataset, "__getitem__"):
            val_dataset = val_dataset(self._config)
        if val_dataset is not None:
            raise UserError(
                f"train.train_policy.dataset.test_size = {share} holds out training samples, and the script gives a "
                "val_dataset: unset one of them, or set validation.dataset.local_dir, then val_dataset counts"
            )
        length = len(self._dataset)
        if isinstance(share, int):
            count = share
        else:
            count = round(share * length)
        if not 0 < count < length:
            raise UserError(
                f"train.train_policy.dataset.test_size = {share}: takes {count} of {length} samples; it must leave "
                "some for training and some for validation"
            )
        held_out = Part(self._dataset, 0, count)
        self._dataset = Part(self._dataset, count, length)
        return held_out

    def start(self, step: int) -> None:
        """Open the data at 0-based ``step``."""
        self._batches = load_batches(
            self._items,
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
        batch = next(self._batches)
        torch.manual_seed(randomness.torch_seed(self._seed, "dropout", step, self._context.dp_rank))
        self.model.transformer.train()
        dropout = self._config.train.train_policy.caption_dropout
        whole = self._noising.prepare("train", step, [p.sample_id for p in batch.positions], batch.items, dropout)
        size = self._config.train.train_policy.mini_batch
        own_sum, own_weight, count = 0.0, 0.0, len(batch.items)
        for first in range(0, count, size):
            self.model.set_gradient_sync(first + size >= count)
            micro_sum, micro_weight = whole.rows(slice(first, first + size)).loss(self.model)
            (micro_sum * self.optimizer.loss_factor).backward()
            own_sum, own_weight = own_sum + float(micro_sum.detach()), own_weight + float(micro_weight)
        loss_sum, weight = self._context.sum_over_ranks([own_sum, own_weight])
        (loss_max,) = self._context.max_over_ranks([own_sum / max(own_weight, 1e-12)])
        loss = loss_sum / max(weight, 1e-12)
        result = self.apply_gradient(step, weight=weight, loss=loss, expects_gradient=loss > 0.0)
        metrics = {
            "train/loss_mean": loss,
            "train/loss_max": loss_max,
            "optim/grad_norm": result.grad_norm,
            "optim/learning_rate": result.learning_rate,
            "train/epoch": self.epoch(step),
            "data/skipped": len(self._skipped.reasons),
            "optim/zero_gradients": float(result.refusal is Refusal.ZERO),
            **self.optimizer.metrics(),
        }
        return StepReport(metrics, result.refusal)

    def validate(self, step: int, notify: Notify) -> ValidationReport:
        """Held-out loss at fixed sigmas and noise, and images from fixed noise, both with the EMA weights if kept."""
        if self._val_dataset is None:
            return ValidationReport()
        with self.use_averaged_weights(), torch.no_grad(), self.model.eval_mode():
            if self._val_records is not None:
                return ValidationReport(images=self._images(self._val_records))
            metrics = {"val/loss_mean": self.held_out_loss(notify), "val/skipped": len(self._val_skipped.reasons)}
            images = self._images([PromptRecord(prompt) for prompt in self._held_out_prompts()])
            return ValidationReport(metrics, images, objective=metrics["val/loss_mean"])

    def _load_validation_records(self) -> list[PromptRecord] | None:
        """The validation prompts; None where validation has pairs."""
        data = self._val_dataset
        try:
            first = data[0]
        except BadSample:  # an image, named when its turn comes
            return None
        if isinstance(first, Item) or (isinstance(first, Mapping) and "visual" in first):
            return None
        records = [to_prompt_record(raw, i) for i, raw in enumerate(getattr(data, "records", data))]
        check_sampling(records, self._config.policy.diffusers.sample.guidance_scale)
        unused = find_unused_keys(records)
        if unused:
            logger.warning(f"validation prompts: keys of rows that have no effect: {', '.join(unused)}")
        return records

    def held_out_loss(self, notify: Notify) -> float:
        """Mean flow-matching loss of the held-out pairs; the same sigmas and noise at every call."""
        total, weight = 0.0, 0.0
        rank, ranks = self._context.dp_rank, self._context.dp_size
        chunks = split_chunks(len(self._val_dataset), self._validation_size, rank, ranks)
        for number, (ids, counts) in enumerate(chunks):
            notify("pre_per_step_validation_hook", {"batch_index": number})
            read, items = read_held_out(self._val_items, ids, self._val_skipped)
            counts = counts and bool(read)
            for other in range(len(self._val_dataset)) if not read else ():  # all ranks must meet in the forward pass
                read, items = read_held_out(self._val_items, [other], self._val_skipped)
                if read:
                    break
            micro_sum, micro_weight = self._noising.prepare("validation", 0, read, items, 0.0).loss(self.model)
            if counts:
                total, weight = total + float(micro_sum), weight + float(micro_weight)
            score = float(micro_sum) / max(float(micro_weight), 1e-12)
            notify("post_per_step_validation_hook", {"batch_index": number, "val_score": score})
        total, weight = self._context.sum_over_ranks([total, weight])
        return total / max(weight, 1e-12)

    def _held_out_prompts(self) -> list[str]:
        """Up to ``MAX_VALIDATION_PROMPTS`` distinct captions of the held-out pairs, in their order."""
        if self._val_prompts is None:
            data = self._val_dataset
            # a data set that knows its captions need not decode its images for them
            prompts = getattr(data, "prompts", None) or (
                item.prompt
                for i in range(len(data))
                for item in read_held_out(self._val_items, [i], self._val_skipped)[1]
            )
            encoders = self.model.build_token_counters()
            usable = (prompt for prompt in dict.fromkeys(prompts) if find_refusal(prompt, encoders) is None)
            self._val_prompts = list(itertools.islice(usable, MAX_VALIDATION_PROMPTS))
        return self._val_prompts

    @property
    def _validation_size(self) -> int:
        """Items of one forward pass of validation."""
        return self._config.validation.batch_size or self._config.train.train_policy.mini_batch

    def fingerprint(self) -> dict[str, Any]:
        """What the positions in the data and the draws depend on."""
        sft = self._config.train.train_policy
        return {
            "seed": self._seed,
            "global_batch_size": self.stream.batch,
            "dataset_length": self.stream.length,
            "data (digest of names and captions)": getattr(self._dataset, "digest", None),
            "dataloader_seed": sft.dataloader_seed,
            "dataloader_shuffle": sft.dataloader_shuffle,
            "dataloader_drop_last": sft.dataloader_drop_last,
        }

    # ---- inside ------------------------------------------------------------------------------------------------

    def _images(self, records: Sequence[PromptRecord]) -> list[Shown]:
        """``validation.n_generation`` images per prompt; image k of prompt i has the same noise in every run."""
        config = self._config.policy.diffusers
        shape = self.model.latent_shape(*config.inference_size)
        samples = build_validation_samples(records, self._config.validation.n_generation)

        def make(indices: Sequence[int], number: int) -> tuple[Tensor, Tensor]:
            noise = randomness.normal(shape, self._seed, "validation/picture", 0, indices)
            for row, sample in enumerate(samples[i] for i in indices):
                if sample.seed is not None:
                    noise[row] = torch.randn(shape, generator=torch.Generator().manual_seed(sample.seed))
            steps = config.sample.eval_num_steps or config.sample.num_steps
            prompts, negative = [samples[i].prompt for i in indices], [samples[i].negative for i in indices]
            guidance = config.sample.guidance_scale
            found = self.model.sample(prompts, noise, num_steps=steps, guidance=guidance, negative=negative)
            return self.model.to_media(found), are_finite(found)

        images, finite = gather_over_ranks(len(samples), self._validation_size, self._context, make)
        rows = zip(images, samples, finite.tolist(), strict=True)
        return [
            Shown(image, one.prompt, one.sample_id, "fixed", finite=whole, fps=self.model.fps)
            for image, one, whole in rows
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
            f"{self.stream.steps_per_epoch} steps per epoch, {self.total_steps} steps"
        )
