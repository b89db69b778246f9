"""`[train]`: the run, its data, its optimiser and its checkpoints."""

import json
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictBool, StrictFloat, StrictInt

from cosmos_rl.policy.config.base import (
    AnyTable,
    Choices,
    Description,
    FilledText,
    FloatDtype,
    Fraction,
    HalfOpenFraction,
    NoEffect,
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    Pattern,
    Planned,
    PositiveFloat,
    PositiveInt,
    Table,
)
from cosmos_rl.policy.config.optimizers import OPTIMIZERS, OTHER_SPELLINGS, check_optimizer_name
from cosmos_rl.policy.config.train_policy import SftPolicyConfig, TrainPolicy

LearningRate = Annotated[
    PositiveFloat | tuple[PositiveFloat] | dict[Pattern, PositiveFloat],
    Description("a number > 0, alone or in a list, or a table of them"),
]
OptimizerImpl = Literal["fused", "foreach", "for-loop"]
OptimizerName = Annotated[
    str,
    AfterValidator(check_optimizer_name),
    Choices(tuple(OPTIMIZERS), OTHER_SPELLINGS),
    Description(
        f"one of {', '.join(map(json.dumps, OPTIMIZERS))}, or a class of an installed package by its dotted name"
    ),
]
DecayType = Annotated[
    Literal["linear", "sqrt", "cosine", "cosine_with_restarts", "none"] | None,
    Choices(other_spellings={"constant": "none", "constant_with_warmup": "none"}),
]


class CheckpointConfig(Table):
    """`[train.ckpt]`: when and how the run is saved."""

    enable_checkpoint: StrictBool = True
    """Save at all. The final export is written in any case."""
    save_freq: PositiveInt = 20
    """Steps between two saves; the last step is always saved."""
    save_freq_in_epoch: NonNegativeInt = 0
    """Epochs between two saves; more than 0 replaces save_freq."""
    save_mode: Literal["async", "sync"] = "async"
    """"async" writes in the background while training continues."""
    max_keep: Annotated[StrictInt, Field(ge=-1)] = 5
    """How many checkpoints are kept, each together with its export; -1 keeps all. The best one is kept in any case."""
    export_safetensors: StrictBool = True
    """Export a loadable pipeline or adapter at every save; false: only at the end."""
    upload_hf: StrictBool = False
    """Upload the final export to the hub."""
    hf_repo_name: FilledText | None = None
    """Repository on the hub, needed for upload_hf: owner/name, or a name alone, which becomes
    <user>/<name>-<start time of the run>."""
    upload_s3: Planned[Literal[False, "final", "all"]] = False
    """Upload the final checkpoint, or all, to S3."""
    s3_bucket: Planned[str | None] = None
    """Bucket, needed for upload_s3."""
    s3_prefix: Planned[str] = "outputs"
    """Folder in the bucket."""


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
    """Fine-tuning: samples per data parallel rank and optimiser step. Reinforcement learning: samples per step over all
    ranks, prompts times samples per prompt."""
    global_batch_size: PositiveInt | None = None
    """Samples per step over all ranks, in both kinds of job; replaces train_batch_per_replica."""
    resume: StrictBool | str = False
    """true: continue the newest run of output_dir; a path: start from that checkpoint in a new run folder."""
    seed: NonNegativeInt = 42
    """Seed of every random draw; 0 is a seed like any other."""
    deterministic: StrictBool = False
    """Use deterministic kernels only."""
    rank_invariant: StrictBool = False
    """Losses and weights have the same bits on 1, 2, 4, … ranks, and after a resume on another number of them. Takes
    more communication, memory and time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto" takes a GPU if there is one."""
    param_dtype: FloatDtype = "bfloat16"
    """Type in which the model computes, and type of exported weights. "float16" trains with a dynamic loss scale."""
    fsdp_reduce_dtype: FloatDtype = "float32"
    """Type in which gradients are added up over ranks. "float16" trains with a dynamic loss scale."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward pass; "default": all but the last block's."""
    fsdp_offload: Planned[StrictBool] = False
    """Keep sharded parameters, gradients and moments in host memory."""
    activation_offload: StrictBool = False
    """Keep the inputs of the transformer's blocks in host memory until the backward pass; needs
    policy.model_gradient_checkpointing."""
    base_offload: StrictBool = False
    """LoRA: keep the frozen weights of the transformer's blocks in host memory, those of a block on the device while it
    is called; needs policy.model_gradient_checkpointing. What is learnt is the same. Whole on every rank."""
    compile: Planned[StrictBool] = False
    """Compile the transformer."""

    optm_name: OptimizerName = "AdamW"
    """Optimiser; the 8-bit ones keep their moments in 8 bits."""
    optm_kwargs: AnyTable = Field(default_factory=dict)
    """Further keyword arguments of the optimiser's class."""
    optm_lr: LearningRate = 1e-6
    """Learning rate. As a table: `global`, and rates for parameters whose name a regular expression finds."""
    optm_impl: OptimizerImpl | tuple[OptimizerImpl] = "fused"
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
    optm_decay_type: DecayType = None
    """Shape of the fall; unset and "none": constant after the warm-up."""
    optm_num_cycles: PositiveInt = 1
    """With "cosine_with_restarts": how often the rate falls from its full value."""
    optm_min_lr_factor: Fraction = 0.0
    """Where the fall ends, as share of optm_lr."""

    ema_enable: StrictBool = False
    """Keep a moving average of the trained weights, validate and export it."""
    ema_decay: OpenFraction = 0.9999
    """Upper bound of the average's decay."""
    ema_update_step_interval: NonNegativeInt = 0
    """Optimiser steps between two updates of the average; 0 and 1 both mean every step."""

    max_nonfinite_steps: PositiveInt = 5
    """So many steps in a row with a loss or gradient that is not finite, or a gradient that is zero everywhere although
    the losses differ, are skipped before the run stops. Overflows that only lower the loss scale do not count."""

    ckpt: CheckpointConfig = CheckpointConfig()
    """When and how the run is saved."""
    train_policy: TrainPolicy = SftPolicyConfig()
    """What is trained on what."""

    non_text: NoEffect[StrictBool] = False
    """Rollouts are media."""
    master_dtype: NoEffect[FloatDtype] = "float32"
    """policy.diffusers.dtype counts."""
    transfer_dtype: NoEffect[str | None] = None
    """Type of transferred weights: none are transferred."""
    logprob_dtype: NoEffect[FloatDtype] = "float32"
    """Log-probabilities are always computed in float32 or better."""
    async_tp_enabled: NoEffect[StrictBool] = False
    """Overlap of tensor parallel transfers."""
    local_dataset: NoEffect[StrictBool | None] = True
    """Every rank reads its own samples."""
    sync_weight_interval: NoEffect[PositiveInt] = 1
    """Steps between weight transfers."""
    coalesce_weight_sync: NoEffect[StrictBool] = False
    """Form of weight transfers."""
    save_ckpt_at_exit: NoEffect[StrictBool] = True
    """A stopped run is always saved."""
    signal_to_handle: NoEffect[tuple[str, ...]] = ("SIGUSR1",)
    """SIGTERM and SIGUSR1 both stop a run."""
    sequence_packing: NoEffect[StrictBool] = False
    """Several texts in one row."""
    fa_version: NoEffect[StrictInt | None] = None
    """Version of flash attention."""
    force_use_hf: NoEffect[StrictBool] = False
    """Upstream's choice between implementations of a model."""
    fp8: NoEffect[AnyTable] = Field(default_factory=dict)
    """8-bit training of language models."""
    fp4: NoEffect[AnyTable] = Field(default_factory=dict)
    """4-bit training of language models."""

    @property
    def global_lr(self) -> float:
        """The learning rate of parameters that no pattern of a table finds."""
        if isinstance(self.optm_lr, dict):
            return self.optm_lr["global"]
        if isinstance(self.optm_lr, tuple):
            return self.optm_lr[0]
        return self.optm_lr

    @property
    def lr_patterns(self) -> dict[str, float]:
        """Regular expressions over parameter names and the learning rates of what they find, in order."""
        if not isinstance(self.optm_lr, dict):
            return {}
        return {pattern: rate for pattern, rate in self.optm_lr.items() if pattern != "global"}

    @property
    def optimizer_impl(self) -> OptimizerImpl:
        """The implementation of the optimiser's step."""
        if isinstance(self.optm_impl, tuple):
            return self.optm_impl[0]
        return self.optm_impl
