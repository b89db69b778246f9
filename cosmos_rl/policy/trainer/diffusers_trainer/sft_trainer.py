"""Supervised fine-tuning by flow matching: captioned pictures -> a transformer (or its adapters)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.data.images import to_uint8
from cosmos_rl.data.items import Item, as_item
from cosmos_rl.data.streams import Batch, MapStream, load_batches
from cosmos_rl.diffusion.schedule import density, index_from_density
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.sharding import Sharding
from cosmos_rl.errors import UserError
from cosmos_rl.optim.ema import Ema
from cosmos_rl.optim.optimizer import StepResult
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_ema, build_optimizer, prepare_export
from cosmos_rl.policy.trainer.task import Pictures, StepReport, ValidationReport
from cosmos_rl.utils.logging import logger

MAX_VALIDATION_PROMPTS = 16
"""Pictures are sampled for at most so many distinct captions of a held-out folder."""


class SFTTrainer:
    """The SFT task. One step = encode, noise at keyed levels, flow-matching loss over micro-batches, optimiser step."""

    def __init__(self, config: Config, context: Context, *, dataset: Any, val_dataset: Any = None) -> None:
        """Load the model, open the data, build the optimiser.

        Raises:
            UserError: data or model do not fit the configuration.
        """
        self._config = config
        self._context = context
        self._seed = config.train.seed
        self._dataset = _opened(dataset, config, "dataset")
        self._val_dataset = _opened(val_dataset, config, "val_dataset") if config.validation.enable else None
        batch = config.train.global_batch_size or config.train.train_batch_per_replica * context.world_size
        sft = config.train.train_policy
        self.stream = MapStream(
            len(self._dataset), batch, sft.dataloader_seed, sft.dataloader_shuffle, sft.dataloader_drop_last
        )
        self.total_steps = self.stream.steps_per_epoch * config.train.epoch
        if config.train.max_num_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_num_steps)
        torch.manual_seed(randomness.key(self._seed, "init"))  # what a library draws while it builds the model
        self.model: DiffuserModel = ModelRegistry.build_diffusers_model(
            config,
            param_dtype=config.train.param_dtype,
            device=context.device,
            gradient_checkpointing=config.policy.model_gradient_checkpointing,
            seed=self._seed,
            sharding=None if context.mesh is None else Sharding(context.mesh),
        )
        self.params: Mapping[str, torch.nn.Parameter] = self.model.trainable()
        self.optimizer = build_optimizer(self.params, config.train, self.total_steps)
        self.ema: Ema | None = build_ema(self.params, config.train)
        self._batches: Iterator[Batch] = iter(())
        self._val_prompts: list[str] | None = None
        self._describe()

    def start(self, step: int) -> None:
        """Open the data at 0-based ``step``."""
        self._batches = load_batches(
            self._dataset,
            self.stream,
            step,
            self.total_steps,
            rank=self._context.dp_rank,
            world_size=self._context.dp_size,
            num_workers=self._config.train.train_policy.dataloader_num_workers,
        )

    def train_step(self, step: int) -> StepReport:
        """One optimiser step on the batch at ``step``."""
        batch = next(self._batches)
        torch.manual_seed(randomness.key(self._seed, "dropout", step, self._context.dp_rank))
        self.model.transformer.train()
        own_sum, weight = 0.0, float(self.stream.batch)
        micros = list(_split(batch, self._config.train.train_policy.mini_batch))
        for number, micro in enumerate(micros, 1):
            self.model.synchronise_gradients(number == len(micros))
            micro_sum, _ = self._loss(step, micro)
            # sharded gradients are averaged over the ranks, so each rank's share is scaled up first
            (micro_sum * self._context.dp_size / weight).backward()
            own_sum += float(micro_sum.detach())
        (loss_sum,) = self._context.sum_over_ranks([own_sum])
        (loss_max,) = self._context.max_over_ranks([own_sum / len(batch.items)])
        loss = loss_sum / weight
        result = self.optimizer.step(step) if loss == loss and abs(loss) != float("inf") else self._skip(step)
        if result.applied and self.ema is not None:
            self.ema.update(step)
        metrics = {
            "train/loss_avg": loss,
            "train/loss_max": loss_max,
            "optimizer/grad_norm": result.grad_norm,
            "train/learning_rate": result.learning_rate,
            "train/epoch": step // self.stream.steps_per_epoch,
        }
        return StepReport(metrics=metrics, applied=result.applied)

    def validate(self, step: int) -> ValidationReport:
        """Held-out loss at fixed levels and noise, and pictures from fixed noise, both with the EMA weights if kept."""
        if self._val_dataset is None:
            return ValidationReport()
        swap: AbstractContextManager[None] = self.ema.swapped_in() if self.ema is not None else nullcontext()
        with swap, torch.no_grad(), self.model.evaluating():
            if isinstance(self._val_dataset[0], str):
                return ValidationReport(pictures=self._pictures(list(self._val_dataset)))
            return ValidationReport({"val/avg_loss": self.held_out_loss()}, self._pictures(self._held_out_prompts()))

    def held_out_loss(self) -> float:
        """Mean flow-matching loss of the held-out pairs; the same levels and noise at every call."""
        total, weight = 0.0, 0.0
        for ids, counts in self._dealt(len(self._val_dataset)):
            items = [as_item(self._val_dataset[i], i) for i in ids]
            micro_sum, micro_weight = self._flow_loss("validation", 0, ids, items, dropout=0.0)
            if counts:
                total, weight = total + float(micro_sum), weight + float(micro_weight)
        total, weight = self._context.sum_over_ranks([total, weight])
        return total / weight

    def _held_out_prompts(self) -> list[str]:
        """Up to ``MAX_VALIDATION_PROMPTS`` distinct captions of the held-out pairs, in their order."""
        if self._val_prompts is None:
            found: dict[str, None] = {}
            for i in range(len(self._val_dataset)):
                found[as_item(self._val_dataset[i], i).prompt] = None
                if len(found) == MAX_VALIDATION_PROMPTS:
                    break
            self._val_prompts = list(found)
        return self._val_prompts

    def _dealt(self, count: int) -> Iterator[tuple[list[int], bool]]:
        """Positions 0 ... count - 1 dealt to this rank in chunks; (positions, do they count).

        Every rank gets as many chunks, since sharded forward passes must meet: one that has none left repeats its
        first position, and that chunk does not count.
        """
        size = self._config.validation.batch_size or self._config.train.train_policy.mini_batch
        rank, world = self._context.dp_rank, self._context.dp_size
        own = list(range(rank, count, world))
        rounds = -(-(-(-count // world)) // size)
        for number in range(rounds):
            chunk = own[number * size : (number + 1) * size]
            yield chunk or [rank % count], bool(chunk)

    def prepare_export(self) -> Callable[[Path], None]:
        """Copy the weights to export (EMA if kept) in ``train.param_dtype``."""
        with self.ema.swapped_in() if self.ema is not None else nullcontext():
            return prepare_export(self.model, keep=self._context.is_main)

    def trainer_state(self) -> dict[str, Any]:
        """What the positions in the data and the draws depend on."""
        sft = self._config.train.train_policy
        return {
            "seed": self._seed,
            "global_batch_size": self.stream.batch,
            "dataset_length": self.stream.length,
            "dataloader_seed": sft.dataloader_seed,
            "dataloader_shuffle": sft.dataloader_shuffle,
            "dataloader_drop_last": sft.dataloader_drop_last,
        }

    # ---- inside ------------------------------------------------------------------------------------------------

    def _loss(self, step: int, micro: Batch) -> tuple[Tensor, Tensor]:
        ids = [position.sample_id for position in micro.positions]
        dropout = self._config.train.train_policy.caption_dropout
        return self._flow_loss("train", step, ids, micro.items, dropout=dropout)

    def _flow_loss(
        self, purpose: str, step: int, ids: Sequence[int], items: Sequence[Item], *, dropout: float
    ) -> tuple[Tensor, Tensor]:
        """Flow-matching ``(sum, weight)`` of items; all draws are keyed by (seed, purpose, step, id)."""
        config = self._config.policy.diffusers
        clean = self.model.encode_visuals([item.visual for item in items], *config.inference_size)
        prompts = [item.prompt for item in items]
        if dropout > 0.0:
            drawn = randomness.uniform(self._seed, f"{purpose}/caption", step, ids)
            prompts = ["" if u < dropout else p for u, p in zip(drawn.tolist(), prompts, strict=True)]
        cond = self.model.encode_prompts(prompts)
        noise = randomness.normal(clean.shape[1:], self._seed, f"{purpose}/noise", step, ids).to(clean.device)
        if config.weighting_scheme == "logit_normal":
            level = randomness.normal((), self._seed, f"{purpose}/level", step, ids)
        else:
            level = randomness.uniform(self._seed, f"{purpose}/level", step, ids)
        u = density(level, config.weighting_scheme, config.logit_mean, config.logit_std)
        index = index_from_density(u, self.model.train_sampling_steps).to(clean.device)
        return self.model.training_sft_step(clean, cond, timestep=index, noise=noise)

    def _pictures(self, prompts: Sequence[str]) -> Pictures:
        """``validation.n_generation`` pictures per prompt; picture k of prompt i has the same noise in every run."""
        config = self._config.policy.diffusers
        count = self._config.validation.n_generation
        shape = self.model.latent_shape(*config.inference_size)
        all_prompts = [prompt for prompt in prompts for _ in range(count)]
        world = self._context.dp_size
        own = torch.zeros(-(-len(all_prompts) // world), *config.inference_size, 3, dtype=torch.uint8)
        for ids, counts in self._dealt(len(all_prompts)):
            noise = randomness.normal(shape, self._seed, "validation/picture", 0, ids)
            steps = config.sample.eval_num_steps or config.sample.num_steps
            chunk = [all_prompts[i] for i in ids]
            pictures = self.model.sample(chunk, noise, num_steps=steps, guidance=config.sample.guidance_scale)
            if counts:
                own[[i // world for i in ids]] = to_uint8(pictures)
        gathered = self._context.gather_rows(own)  # rank after rank; position i is row i // world of rank i % world
        order = [(i % world) * len(own) + i // world for i in range(len(all_prompts))]
        return Pictures(gathered[order], all_prompts)

    def _skip(self, step: int) -> StepResult:
        self.optimizer.torch_optimizer.zero_grad(set_to_none=True)
        return StepResult(grad_norm=float("nan"), learning_rate=self.optimizer.learning_rate(step), applied=False)

    def _describe(self) -> None:
        count = sum(p.numel() for p in self.params.values())
        what = "LoRA adapter" if self.model.lora_config is not None else "whole transformer"
        logger.info(
            f"Training the {what} of {self.model.model_str}: {count:,} parameters on {self._context.device}, compute "
            f"in {self._config.train.param_dtype}; {self.stream.length} samples, {self.stream.batch} per step, "
            f"{self.stream.steps_per_epoch} steps per epoch, {self.total_steps} steps"
        )


def _split(batch: Batch, size: int) -> Iterator[Batch]:
    """Micro-batches of at most ``size`` items."""
    for first in range(0, len(batch.items), size):
        yield Batch(batch.positions[first : first + size], batch.items[first : first + size])


def _opened(given: Any, config: Config, name: str) -> Any:
    """A data set, or what its factory makes of the configuration."""
    if callable(given) and not hasattr(given, "__getitem__"):
        return _opened(given(config), config, name)
    dataset: Any = given
    if hasattr(dataset, "setup"):
        dataset.setup(config)
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"{name}: need an object with __len__ and __getitem__, or a function of the config that makes one"
        )
    if len(dataset) == 0:
        raise UserError(f"{name}: is empty")
    return dataset
