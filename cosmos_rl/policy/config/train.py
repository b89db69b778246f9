"""`[train]`: the run, its data, its optimiser and its checkpoints."""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt

from cosmos_rl.policy.config.base import (
    FloatDtype,
    Fraction,
    HalfOpenFraction,
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Table,
)


class DatasetConfig(Table):
    """`[train.train_policy.dataset]` and `[validation.dataset]`: where the data is."""

    local_dir: str = ""
    """Folder of pairs (`x.json` beside `x.jpg`, `x.jpeg`, `x.png` or `x.webp`); for validation also a `.json` file
    with a list of prompts."""


class CheckpointConfig(Table):
    """`[train.ckpt]`: when and how the run is saved."""

    enable_checkpoint: StrictBool = True
    """Save at all. The final export is written in any case."""
    save_freq: PositiveInt = 20
    """Steps between two saves; the last step is always saved."""
    save_mode: Literal["async", "sync"] = "async"
    """"async" writes in the background while training goes on."""
    max_keep: Annotated[StrictInt, Field(ge=-1)] = 5
    """How many checkpoints are kept; -1 keeps all."""
    export_safetensors: StrictBool = True
    """Export a loadable pipeline or adapter at every save; false: only at the end."""


class TrainPolicyConfig(Table):
    """`[train.train_policy]`: what is trained on what."""

    type: Literal["sft", "grpo"] = "sft"
    """Supervised fine-tuning, or reinforcement learning."""
    trainer_type: str = "sft"
    """Name of the trainer."""
    dataset: DatasetConfig = DatasetConfig()
    """Where the training data is."""
    mini_batch: PositiveInt = 1
    """Samples per forward pass; must divide the batch of one rank."""
    dataloader_shuffle: StrictBool = True
    """Take the samples in a new random order each epoch."""
    dataloader_seed: NonNegativeInt = 0
    """Seed of that order."""
    dataloader_num_workers: NonNegativeInt = 0
    """Processes that read data ahead; 0 reads in the training process."""
    dataloader_drop_last: StrictBool = True
    """Leave out the last, smaller batch of an epoch."""
    caption_dropout: Fraction = 0.0
    """Share of samples that are trained with an empty prompt."""


class TrainConfig(Table):
    """`[train]`: one training run."""

    output_dir: str = "./outputs"
    """Folder that collects the runs; each run gets a folder named by its start time in it."""
    timestamp: Annotated[str, Field(pattern=r"^([0-9]{14})?$")] = ""
    """Name of the run folder as YYYYmmddHHMMSS; empty: now."""
    epoch: PositiveInt = 1
    """Passes over the data."""
    max_num_steps: PositiveInt | None = None
    """Stop after so many optimiser steps."""
    train_batch_per_replica: PositiveInt = 8
    """Samples per data parallel rank and optimiser step."""
    global_batch_size: PositiveInt | None = None
    """Samples per optimiser step over all ranks; replaces train_batch_per_replica."""
    resume: StrictBool | str = False
    """true: continue the newest run of output_dir; a path: start from that checkpoint in a new run folder."""
    seed: NonNegativeInt = 42
    """Seed of every random draw; 0 is a seed like any other."""
    deterministic: StrictBool = False
    """Use deterministic kernels only."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto" takes a GPU if there is one."""
    param_dtype: FloatDtype = "bfloat16"
    """Type in which the model computes, and type of exported weights."""
    compile: StrictBool = False
    """Must be false: compiling is not supported."""

    optm_name: Literal["Adam", "AdamW"] = "AdamW"
    """Optimiser."""
    optm_lr: PositiveFloat = 1e-6
    """Learning rate."""
    optm_impl: Literal["fused", "foreach", "for-loop"] = "fused"
    """Implementation of the optimiser's step."""
    optm_weight_decay: NonNegativeFloat = 0.01
    """Weight decay."""
    optm_betas: tuple[HalfOpenFraction, HalfOpenFraction] = (0.9, 0.999)
    """Decay rates of the gradient's mean and square."""
    epsilon: PositiveFloat = 1e-6
    """Added to the root of the mean square."""
    optm_grad_norm_clip: StrictFloat = 1.0
    """Gradients are scaled down to this norm; 0 or less only measures it."""
    optm_warmup_steps: NonNegativeInt | Fraction = 20
    """Steps until the full learning rate; with a decimal point: share of all steps, at most 1.0."""
    optm_warmup_start_factor: Fraction = 0.0
    """Learning rate of the first step as share of optm_lr."""
    optm_decay_ratio: Fraction | None = None
    """Share of all steps over which the learning rate falls; unset: all steps after the warm-up."""
    optm_decay_type: Literal["linear", "sqrt", "cosine", "none"] | None = None
    """Shape of the fall; unset: constant."""
    optm_min_lr_factor: Fraction = 0.0
    """Where the fall ends, as share of optm_lr."""

    ema_enable: StrictBool = False
    """Keep a moving average of the trained weights, validate and export it."""
    ema_decay: OpenFraction = 0.9999
    """Upper bound of the average's decay."""
    ema_update_step_interval: NonNegativeInt = 0
    """Optimiser steps between two updates of the average; 0 and 1 both mean every step."""

    max_nonfinite_steps: PositiveInt = 5
    """So many steps in a row with a loss or gradient that is not finite are skipped before the run stops."""

    ckpt: CheckpointConfig = CheckpointConfig()
    """When and how the run is saved."""
    train_policy: TrainPolicyConfig = TrainPolicyConfig()
    """What is trained on what."""
