"""The tables of the older configuration about the run itself, and the whole of it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cosmos_rl.policy.config.base import Table
from cosmos_rl.policy.config.wfm import Count, PositiveNumber
from cosmos_rl.policy.config.wfm.data import DataLoaderConfig, FunctionConfig
from cosmos_rl.policy.config.wfm.model import ModelConfig

Factors = Annotated[tuple[PositiveNumber, ...], Field(min_length=1)]


class OptimizerConfig(Table):
    """`[optimizer]`: AdamW."""

    optim_type: Literal["fusedadam", "adamw"] = "fusedadam"
    lr: float = 1e-5
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    master_weights: bool = True
    capturable: bool = True


class SchedulerConfig(Table):
    """`[scheduler]`: factors of the learning rate; one value of each list per cycle."""

    scheduler_type: Literal["lambda_linear", "lambda_warmpup_cos", "lambda_warmup_cos", "tero_poly"] = "lambda_linear"
    verbosity_interval: int = 0
    warm_up_steps: Annotated[tuple[int, ...], Field(min_length=1)] = (1000,)
    cycle_lengths: Factors = (1e13,)
    f_start: Annotated[tuple[float, ...], Field(min_length=1)] = (1e-6,)
    f_max: Factors = (1.0,)
    f_min: Annotated[tuple[float, ...], Field(min_length=1)] = (1.0,)


class DdpConfig(Table):
    """`[trainer.ddp]`."""

    find_unused_parameters: bool = False
    static_graph: bool = True
    broadcast_buffers: bool = True


class CudnnConfig(Table):
    """`[trainer.cudnn]`."""

    deterministic: bool = False
    benchmark: bool = True


class StragglerDetectionConfig(Table):
    """`[trainer.straggler_detection]`."""

    enabled: bool = True
    report_freq: int = 100
    profile_freq: int = 1
    max_diff: float = 1.5
    raise_error: bool = True
    analyze_forward: bool = True
    analyze_backward: bool = True
    analyze_optimizer: bool = True
    analyze_dataloading: bool = True


class ProfilingConfig(Table):
    """`[trainer.profiling]`."""

    enable_profiling: bool = False
    enable_memory_snapshot: bool = False
    save_s3: bool = False
    profile_freq: int = 1
    target_ranks: tuple[int, ...] = tuple(range(8))
    record_shape: bool = False
    profile_memory: bool = False
    with_stack: bool = True
    with_modules: bool = True


class TrainerConfig(Table):
    """`[trainer]`: length of the run, and what happens during it."""

    callbacks: tuple[FunctionConfig, ...] = ()
    use_s3: bool = False
    distributed_parallelism: Literal["fsdp", "ddp"] = "fsdp"
    ddp: DdpConfig = DdpConfig()
    cudnn: CudnnConfig = CudnnConfig()
    seed: int = 0
    grad_scaler_args: dict[str, bool] = Field(default_factory=dict)
    max_iter: Count = 25
    """Optimiser steps."""
    max_val_iter: int | None = None
    logging_iter: int = 2
    run_validation: bool = False
    validation_iter: int = 100
    timeout_period: int = 999999999
    memory_format: str = "preserve_format"
    grad_accum_iter: Count = 1
    """Rollouts of each rank per optimiser step."""
    straggler_detection: StragglerDetectionConfig = StragglerDetectionConfig()
    profiling: ProfilingConfig = ProfilingConfig()

    def callback_args(self, name: str) -> dict[str, object] | None:
        """The arguments of a callback; None: there is none of this name."""
        return next((dict(one.args) for one in self.callbacks if one.name == name), None)


class JobConfig(Table):
    """`[job]`: names of the run. Its folder is project/group/name/timestamp."""

    project: str = "cosmos_wfm_v2"
    group: str = "official_runs_vid2vid_debug"
    name: str
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    timestamp: str | None = None


class ModelParallelConfig(Table):
    """`[model_parallel]`: only the first four keys ever had an effect; the others are Megatron's."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    data_parallel_size: int = -1
    pipeline_parallel_size: int = 1
    """A misspelt key of a published recipe."""
    pipeline_model_parallel_comm_backend: Any = None
    virtual_pipeline_model_parallel_size: Any = None
    sequence_parallel: bool = False
    hierarchical_context_parallel_sizes: Any = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    moe_extended_tp: bool = False
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: str = "torch.float32"
    timers: Any = None
    finalize_model_grads_func: Any = None
    grad_scale_func: Any = None
    no_sync_func: Any = None
    grad_sync_func: Any = None
    param_sync_func: Any = None
    deterministic_mode: bool = False
    enable_autocast: bool = False
    autocast_dtype: str = "torch.float32"
    num_microbatches_with_partial_activation_checkpoints: Any = None
    gradient_accumulation_fusion: bool = False
    async_tensor_model_parallel_allreduce: bool = False
    use_te_rng_tracker: bool = False
    tp_comm_overlap: bool = False
    tp_comm_bulk_wgrad: bool = True
    tp_comm_bulk_dgrad: bool = True
    tp_comm_overlap_ag: bool = True
    tp_comm_overlap_rs: bool = True
    tp_comm_overlap_rs_dgrad: bool = False
    tp_comm_split_ag: bool = True
    tp_comm_atomic_ag: bool = False
    tp_comm_split_rs: bool = True
    tp_comm_atomic_rs: bool = False
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    tp_comm_overlap_disable_qkv: bool = False
    tp_comm_overlap_disable_fc1: bool = False
    tp_comm_bootstrap_backend: str = "nccl"
    pipeline_dtype: Any = None
    variable_seq_lengths: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    batch_p2p_sync: bool = True
    use_ring_exchange_p2p: bool = False
    deallocate_pipeline_outputs: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    pipeline_model_parallel_split_rank: Any = None
    overlap_p2p_comm_warmup_flush: bool = False
    microbatch_group_size_per_vp_stage: int = 1
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = True
    barrier_with_L1_time: bool = True


class ObjectStoreConfig(Table):
    """`[checkpoint.save_to_object_store]` and `[checkpoint.load_from_object_store]`: S3."""

    enabled: bool = False
    credentials: str = ""
    bucket: str = ""


class JitConfig(Table):
    """`[checkpoint.jit]`."""

    enabled: bool = False
    input_shape: Any = None
    device: str = "cuda"
    dtype: str = "bfloat16"
    strict: bool = True


class CheckpointConfig(Table):
    """`[checkpoint]`: what a run starts from, and when it is saved."""

    type: Literal["distributed", "None"] | None = None
    dcp_async_mode_enabled: bool = False
    save_to_object_store: ObjectStoreConfig = ObjectStoreConfig()
    save_iter: int = 1000
    load_from_object_store: ObjectStoreConfig = ObjectStoreConfig()
    load_path: str = ""
    """A checkpoint of the older trainer, a .pt file, or with model_id a repository on the hub."""
    model_id: str | None = None
    """A .pt file in that repository."""
    load_training_state: bool = False
    only_load_scheduler_state: bool = False
    strict_resume: bool = False
    jit: JitConfig = JitConfig()
    verbose: bool = True
    keys_not_to_resume: tuple[str, ...] = ()
    broadcast_via_filesystem: bool = False
    load_ema_to_reg: bool = False
    dcp_allow_mismatched_size: bool = False


class OlderConfig(Table):
    """A whole file of the older form."""

    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    trainer: TrainerConfig = TrainerConfig()
    dataloader_train: DataLoaderConfig = DataLoaderConfig()
    dataloader_val: DataLoaderConfig = DataLoaderConfig()
    job: JobConfig
    model_parallel: ModelParallelConfig = ModelParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
