"""What every diffusers job builds in the same way."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from cosmos_rl.checkpoint.export import Adapter, LoraExport, PipelineExport
from cosmos_rl.data.given import find_media_problems
from cosmos_rl.data.prompts import PromptRecord, check_sampling
from cosmos_rl.data.subsets import choose_indices
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.sharding import Sharding, gather_to_cpu
from cosmos_rl.errors import UserError
from cosmos_rl.optim.classes import Hyperparameters
from cosmos_rl.optim.ema import Ema
from cosmos_rl.optim.loss_scale import LossScale
from cosmos_rl.optim.optimizer import Optimizer
from cosmos_rl.optim.schedule import LrSchedule
from cosmos_rl.policy.config import Config, TrainConfig
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.diffusers.pipeline_model import DTYPES
from cosmos_rl.policy.model.driver.model import DrivenModel
from cosmos_rl.policy.model.driver.rows import find_absent, find_row
from cosmos_rl.policy.model.lora import fold_config, fold_weights


def build_model(config: Config, context: Context, *, rest_on_cpu: bool) -> PipelineModel:
    """The pipeline of ``[policy]``, of which the transformer (or its adapters) is trained.

    Args:
        rest_on_cpu: encoders and decoder leave the device when they are not in use, and with a cache of texts the
            denoisers when the encoders are.

    Raises:
        UserError: the pipeline does not fit the configuration.
    """
    torch.manual_seed(randomness.torch_seed(config.train.seed, "init"))  # what a library draws while it builds it
    model = ModelRegistry.build_diffusers_model(
        config,
        param_dtype=config.train.param_dtype,
        device=context.device,
        gradient_checkpointing=config.policy.model_gradient_checkpointing,
        activation_offload=config.train.activation_offload,
        base_offload=config.train.base_offload,
        seed=config.train.seed,
        sharding=build_sharding(config, context),
        rest_on_cpu=rest_on_cpu,
        texts_apart=rest_on_cpu and config.train.train_policy.cached_text,
    )
    wanted = config.policy.diffusers.conditional_frames
    if wanted is not None and wanted != model.conditional_frames:
        raise UserError(
            f"policy.diffusers.conditional_frames = {list(wanted)}: {type(model).__name__} makes samples of texts "
            "alone; leave the key out (--policy.diffusers.conditional_frames=none)"
        )
    return model


def expect_clean_frames(config: Config) -> tuple[int, int]:
    """The ``conditional_frames`` that the model will have, as far as that can be known without loading it.

    Raises:
        UserError: no pipeline at the configured place, or no class for it.
    """
    wanted = config.policy.diffusers.conditional_frames
    if wanted is not None:
        return wanted
    name, model = ModelRegistry.find_class(config)
    if issubclass(model, DrivenModel):
        return find_row(name).choose_clean_frames(None)
    return model.conditional_frames


def require_media(
    records: Sequence[PromptRecord], clean_frames: tuple[int, int], context: Context, *, count: int = 1
) -> None:
    """Refuse prompts whose images or videos are missing or cannot be read, see `find_media_problems`.

    All ranks must call it; the files are read by the main one.

    Raises:
        UserError: names the prompts.
    """
    if not records or clean_frames[1] == 0:
        return
    problems = ""
    if context.is_main:
        problems = find_media_problems(records, clean_frames, count)
    problems = context.broadcast_from_main(problems)
    if problems:
        raise UserError(problems)


def require_counted_media(
    records: Sequence[PromptRecord], model: PipelineModel, context: Context, expected: tuple[int, int]
) -> None:
    """`require_media` again, where a loaded model wants more of the files than was expected."""
    wanted = model.conditional_frames
    count = model.count_given(wanted[1]) if wanted[1] > 0 else 0
    if wanted != expected or count > 1:
        require_media(records, wanted, context, count=count)


def build_optimizer(params: Mapping[str, torch.nn.Parameter], train: TrainConfig, total_steps: int) -> Optimizer:
    """The optimiser and schedule of the ``[train]`` table."""
    schedule = LrSchedule.build(
        total_steps,
        warmup=train.optm_warmup_steps,
        decay_ratio=train.optm_decay_ratio,
        decay_type=train.optm_decay_type,
        warmup_start_factor=train.optm_warmup_start_factor,
        min_factor=train.optm_min_lr_factor,
        num_cycles=train.optm_num_cycles,
    )
    return Optimizer(
        params,
        settings=Hyperparameters.from_config(train),
        lr=train.global_lr,
        lr_patterns=train.lr_patterns,
        schedule=schedule,
        max_grad_norm=train.optm_grad_norm_clip,
        loss_scale=LossScale() if "float16" in (train.param_dtype, train.fsdp_reduce_dtype) else None,
        rank_invariant=train.rank_invariant,
    )


def build_ema(params: Mapping[str, torch.nn.Parameter], train: TrainConfig) -> Ema | None:
    """The weight average of the ``[train]`` table, None when it is off."""
    if not train.ema_enable:
        return None
    return Ema(params, train.ema_decay, train.ema_update_step_interval)


def prepare_export(model: PipelineModel, *, keep: bool = True) -> Callable[[Path], None]:
    """Copy the policy's weights as they are now, in the compute dtype; the result writes them into a step's folder.

    All ranks must call it; only the one with ``keep`` gets something to write.
    """
    if model.lora_config is not None:
        name, adapters = model.primary_adapter, {}
        for denoiser, module in model.denoisers.items():
            weights = _copy_weights(fold_weights(module, name), model.param_dtype, keep=keep)
            adapters[denoiser] = Adapter(weights, fold_config(module.peft_config[name]))
        return LoraExport(adapters, model.model_str, model.revision, model.sampling_call()).write
    weights = {
        denoiser: _copy_weights(module.state_dict().items(), model.param_dtype, keep=keep)
        for denoiser, module in model.denoisers.items()
    }
    folder = model.base_folder
    return PipelineExport(weights, folder, model.sampling_call(), find_absent(folder)).write


def _copy_weights(
    state: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, *, keep: bool
) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU where ``keep``; nothing on the other ranks, which only take part in the gathering."""
    copies = ((name, gather_to_cpu(value, dtype, keep=keep)) for name, value in state)
    return {name: copy for name, copy in copies if copy is not None}


def build_sharding(config: Config, context: Context) -> Sharding | None:
    """How the transformer is spread over the ranks; None for a single one, unless it has to compute like several."""
    train, mesh = config.train, context.mesh
    if mesh is None and train.rank_invariant:
        mesh = init_device_mesh(context.device.type, (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    if mesh is None:
        return None
    options = DTYPES[train.fsdp_reduce_dtype], train.fsdp_reshard_after_forward, context.cp_group
    return Sharding(mesh, *options, pairwise=train.rank_invariant)


def choose_prompts(records: Sequence[PromptRecord], config: Config) -> list[PromptRecord]:
    """Those of the prompts that `validation.dataset` takes.

    Raises:
        UserError: a row says how its images are sampled, and that cannot be done.
    """
    check_sampling(records, config.policy.diffusers.sample.guidance_scale)
    dataset = config.validation.dataset
    return [records[i] for i in choose_indices(len(records), dataset.limit, spread=dataset.spread)]


def open_dataset(given: Any, config: Config, name: str) -> Any:
    """A data set, or what its factory makes of the configuration."""
    if inspect.isclass(given):
        raise UserError(
            f"{name}: give an object of the class {given.__name__}, or a function of the config that makes one"
        )
    if callable(given) and not hasattr(given, "__getitem__"):
        return open_dataset(given(config), config, name)
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
