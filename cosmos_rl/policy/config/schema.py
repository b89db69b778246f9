"""The whole configuration, and the tables that belong to no other file."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, model_validator

from cosmos_rl.policy.config.base import AnyTable, FilledText, ForRl, NoEffect, NonNegativeInt, PositiveInt, Table
from cosmos_rl.policy.config.policy import ParallelismConfig, PolicyConfig
from cosmos_rl.policy.config.presets import fill_in_preset
from cosmos_rl.policy.config.problems import ConfigError, validate
from cosmos_rl.policy.config.train import TrainConfig
from cosmos_rl.policy.config.validation import ValidationConfig


class RolloutConfig(Table):
    """`[rollout]`: how samples are generated for reinforcement learning."""

    n_generation: PositiveInt = 16
    """Samples per prompt."""
    n_generation_mini_batch: PositiveInt | None = None
    """Samples generated at once; unset: as batch_size says."""
    batch_size: PositiveInt | None = None
    """Prompts per generation call and rank; unset: as many as fit."""
    parallelism: ParallelismConfig | None = None
    """Unset: as policy.parallelism, which it must equal."""
    backend: NoEffect[str] = "diffusion_nft_rollout"
    """Rollouts run in the training process."""
    seed: NoEffect[StrictInt | None] = None
    """Rollout noise is keyed by train.seed."""
    mode: NoEffect[str] = "sync"
    """Waiting for rollouts or not."""
    async_config: NoEffect[AnyTable] = Field(default_factory=dict)
    """Limits of asynchronous rollouts."""
    prefetch_rollout: NoEffect[StrictBool] = False
    """Generate ahead of training."""
    prefetch_queue_maxsize: NoEffect[PositiveInt] = 2
    """Rollouts generated ahead."""
    n_generation_to_batch: NoEffect[StrictBool] = False
    """Count samples in place of prompts."""
    async_r2r_sync: NoEffect[str] = "disabled"
    """Weight transfer between rollout processes."""
    broadcast_all_params: NoEffect[StrictBool] = False
    """Transfer frozen weights too."""
    enforce_eager: NoEffect[StrictBool] = True
    """vLLM: no CUDA graphs."""
    include_stop_str_in_output: NoEffect[StrictBool] = False
    """vLLM: keep the stop text."""
    gpu_memory_utilization: NoEffect[StrictFloat] = 0.8
    """vLLM: share of GPU memory."""
    enable_chunked_prefill: NoEffect[StrictBool] = False
    """vLLM: read prompts in pieces."""
    max_response_length: NoEffect[PositiveInt] = 2048
    """Longest answer of a language model."""
    quantization: NoEffect[str] = "none"
    """vLLM: type of quantised weights."""
    sampling_config: NoEffect[AnyTable] = Field(default_factory=dict)
    """Token sampling of a language model."""
    vllm_use_flashinfer: NoEffect[StrictBool] = False
    """vLLM: attention kernel."""
    multi_turn_config: NoEffect[AnyTable] = Field(default_factory=dict)
    """Conversations with tools."""


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _none_word_to_none(value: object) -> object:
    # The documented recipes write experiment_name = "None" for "no name".
    return None if value in ("", "None", "none") else value


LoggerName = Annotated[Literal["console", "wandb", "tensorboard", "trackio"], BeforeValidator(_lower)]


class LoggingConfig(Table):
    """`[logging]`: where metrics are shown. `metrics.jsonl` in the run folder is written in any case."""

    logger: tuple[LoggerName, ...] = ("console",)
    """Places that show metrics: "console", "wandb", "tensorboard", "trackio"."""
    log_interval: PositiveInt = 1
    """Steps between two lines on the console."""
    multi_modal_log_interval: ForRl[PositiveInt | None] = None
    """Steps between two galleries of generated training samples. Validation shows its images each time anyway."""
    project_name: str = "cosmos_rl"
    """Project in wandb."""
    group_name: FilledText | None = None
    """Group in wandb."""
    experiment_name: Annotated[FilledText | None, BeforeValidator(_none_word_to_none)] = None
    """Name of the run in wandb; unset: the output folder."""
    report_mfu: NoEffect[StrictBool] = False
    """Share of the GPU's peak speed."""


class ProfilerWindowConfig(Table):
    """`[profiler.sub_profiler_config]`: which steps are recorded, and what of them."""

    wait_steps: NonNegativeInt = 1
    """Steps before the profiler is started."""
    warmup_steps: NonNegativeInt = 1
    """Steps that are then profiled and thrown away."""
    active_steps: PositiveInt = 1
    """Steps that are then recorded."""
    rank_filter: tuple[NonNegativeInt, ...] = ()
    """Ranks that record; empty: rank 0."""
    record_shape: StrictBool = False
    """Record shapes of tensors."""
    profile_memory: StrictBool = False
    """Record memory."""
    with_stack: StrictBool = False
    """Record where in the source an operation was called."""
    with_modules: StrictBool = False
    """Record the modules that called an operation."""
    do_profile: NoEffect[StrictBool] = False
    """Set by upstream while it runs."""


class ProfilerConfig(Table):
    """`[profiler]`: a trace of a few steps by torch's profiler, written into the run folder."""

    enable_profiler: StrictBool = False
    """Record the steps of sub_profiler_config."""
    sub_profiler_config: ProfilerWindowConfig = ProfilerWindowConfig()
    """Which steps are recorded, and what of them."""
    enable_nsys: NoEffect[StrictBool] = False
    """Mark the steps for Nsight Systems."""


class Config(Table):
    """Everything a run needs to know; `Config()` holds the defaults."""

    mode: ForRl[Literal["disaggregated", "colocated", "colocated_separated"]] = "disaggregated"
    """Placement of rollouts; reinforcement learning needs "colocated"."""
    policy: PolicyConfig = PolicyConfig()
    """The model that is trained."""
    train: TrainConfig = TrainConfig()
    """The run, its data, its optimiser and its checkpoints."""
    rollout: ForRl[RolloutConfig] = RolloutConfig()
    """How samples are generated for reinforcement learning."""
    validation: ValidationConfig = ValidationConfig()
    """Held-out loss and images while training."""
    logging: LoggingConfig = LoggingConfig()
    """Where metrics are shown."""
    profiler: ProfilerConfig = ProfilerConfig()
    """A trace of a few steps."""
    custom: dict[str, object] = Field(default_factory=dict)
    """Free table for your own scripts; the only place where any key is allowed."""
    redis: NoEffect[str] = ""
    """Port of upstream's broker: there is none."""
    eth_ips: NoEffect[str] = ""
    """Addresses of upstream's processes."""
    distillation: NoEffect[AnyTable] = Field(default_factory=dict)
    """Distillation of language models."""
    vla: NoEffect[AnyTable] = Field(default_factory=dict)
    """Vision-language-action models."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, values: object) -> object:
        return fill_in_preset(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Config":
        """The configuration of a dictionary as read from TOML; `ConfigError` names every problem."""
        config, problems = validate(cls, values)
        if config is None or problems:
            raise ConfigError(problems, source="configuration")
        return config
