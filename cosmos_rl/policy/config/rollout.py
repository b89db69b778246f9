"""`[rollout]`: how reinforcement learning generates samples."""

from pydantic import Field, StrictBool, StrictFloat, StrictInt

from cosmos_rl.policy.config.base import AnyTable, NoEffect, PositiveInt, Table
from cosmos_rl.policy.config.policy import ParallelismConfig


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


RewardFunction = str | tuple[str, ...] | dict[str, StrictFloat]
