"""What a configuration means: rules between keys (`cross_check`), parts not built (`unsupported_settings`), `notes`."""

import re

from cosmos_rl.policy.config.base import Support
from cosmos_rl.policy.config.buckets import choose_size
from cosmos_rl.policy.config.idle_keys import idle_notes
from cosmos_rl.policy.config.jobs import JOBS, job_kind
from cosmos_rl.policy.config.keys import list_keys
from cosmos_rl.policy.config.optimizer_rules import optimizer_notes, optimizer_rules
from cosmos_rl.policy.config.policy import DiffusersConfig
from cosmos_rl.policy.config.problems import format_value
from cosmos_rl.policy.config.rank_invariance import rank_invariance_rules
from cosmos_rl.policy.config.ranks import data_ranks, world_size
from cosmos_rl.policy.config.rl_checks import rl_rules
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.train_policy import DpoPolicyConfig, GrpoPolicyConfig
from cosmos_rl.policy.config.validation_sets import bypass_notes, validation_rules
from cosmos_rl.policy.config.window_rules import window_notes

_PLACES = (
    "output_dir",
    "local_dir",
    "rejected_dir",
    "dir",
    "lora_path",
    "model_name_or_path",
    "resume",
    "teacher",
    "single_file_base",
    "single_file_low_noise",
)
"""Keys that hold a path, whatever their table."""
_NEEDED_PLACES = ("train.output_dir", "train.train_policy.cache.dir")
_OF_SOME_JOBS = (Support.DPO, Support.RL, Support.VIDEO, Support.VLM)

__all__ = ["cross_check", "data_ranks", "notes", "unsupported_settings", "world_size"]


def cross_check(config: Config) -> list[str]:
    """Every rule between keys that `config` breaks, one line each, starting with the dotted key."""
    return [
        *_value_rules(config),
        *_model_rules(config),
        *_memory_rules(config),
        *_lora_rules(config),
        *_sft_batch_rules(config),
        *rank_invariance_rules(config),
        *_schedule_rules(config),
        *optimizer_rules(config),
        *_saving_rules(config),
        *_data_rules(config),
        *validation_rules(config),
        *rl_rules(config),
    ]


def unsupported_settings(config: Config) -> list[str]:
    """Documented settings of `config` that this version cannot run, one line each."""
    job, lines = config.train.train_policy, []
    if not job_kind(config).supported:
        names = " or ".join(format_value(trainer) for type_, trainer in JOBS if type_ == job.type)
        lines.append(f"train.train_policy.trainer_type = {format_value(job.trainer_type)}; use {names}")
    if not config.policy.is_diffusers:
        lines.append("policy.is_diffusers = false (vision-language models); set it to true for a diffusers pipeline")
    lora = config.policy.lora
    if lora is not None and lora.init_lora_weights not in (True, False, "gaussian"):
        lines.append(
            f'policy.lora.init_lora_weights = "{lora.init_lora_weights}" changes the base weights, which an exported '
            'adapter cannot carry; use true or "gaussian"'
        )
    for key in list_keys(config, in_lists=True):
        matters = config.validation.enable or not key.path.startswith("validation.")
        if key.kind is Support.PLANNED and key.value != key.default and matters:
            today = "unset" if key.default is None else format_value(key.default)
            lines.append(f"{key.path} = {format_value(key.value)}; today only {today}")
    return lines


def notes(config: Config) -> list[str]:
    """What is worth knowing about `config` but not invalid, one line each."""
    changed = [key for key in list_keys(config, in_lists=True) if key.value != key.default]
    read = _kinds_read(config)
    lines = []
    idle = [key.path for key in changed if key.kind is Support.NO_EFFECT]
    if idle:
        lines.append(f"Upstream keys that can have no effect here: {', '.join(idle)}")
    unread = [key.path for key in changed if key.kind in set(_OF_SOME_JOBS) - read]
    if unread:
        lines.append(f"Keys of other jobs that this one does not read: {', '.join(unread)}")
    if not config.train.ckpt.enable_checkpoint:
        lines.append("train.ckpt.enable_checkpoint = false: a run that is interrupted starts from the beginning")
    lines += [*optimizer_notes(config), *bypass_notes(config), *idle_notes(config), *window_notes(config)]
    rl = config.train.train_policy
    is_nft = rl.trainer_type == "diffusion_nft"
    if isinstance(rl, GrpoPolicyConfig) and is_nft and rl.advantage_low != -rl.advantage_high:
        lines.append(
            f"train.train_policy.advantage_low = {rl.advantage_low} is not -advantage_high: DiffusionNFT scales by "
            f"advantage_high = {rl.advantage_high} alone"
        )
    return lines


def _kinds_read(config: Config) -> set[Support]:
    reads = {
        Support.DPO: job_kind(config).data == "preferences",
        Support.RL: job_kind(config).online,
        Support.VIDEO: config.policy.diffusers.is_video,
        Support.VLM: not config.policy.is_diffusers,
    }
    return {kind for kind, read in reads.items() if read}


def _value_rules(config: Config) -> list[str]:
    """What no type of a key holds: places that are none, and numbers that no machine word holds."""
    lines = []
    for key in list_keys(config, in_lists=True):
        if isinstance(key.value, int) and abs(key.value) >= 2**63:
            lines.append(f"{key.path}: found {key.value}; allowed: whole numbers below 2^63, as in TOML")
        if not isinstance(key.value, str) or key.path.rpartition(".")[2] not in _PLACES:
            continue
        problem = place_problem(key.value, needed=key.path in _NEEDED_PLACES)
        if problem is not None:
            lines.append(f"{key.path}: {problem}")
    return lines


def place_problem(value: str, *, needed: bool) -> str | None:
    """Why a text is no path on this machine; None: it is one, or empty where none is ``needed``."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", value):
        return f"found {format_value(value)}; addresses are not supported yet, give a local path"
    if "\0" in value:
        return f"found {format_value(value)}; allowed: a path, which has no null character"
    if needed and not value.strip():
        return f"found {format_value(value)}; allowed: a folder (was a shell variable empty?)"
    return None


def _model_rules(config: Config) -> list[str]:
    policy, lines = config.policy, []
    if not policy.model_name_or_path:
        lines.append("policy.model_name_or_path: missing; give the folder or the hub name of a diffusers pipeline")
    height, width = policy.diffusers.inference_size
    if height % 8 or width % 8:
        lines.append(
            f"policy.diffusers.inference_size: found [{height}, {width}]; allowed: [height, width], multiples of 8"
        )
    lines += [
        f"policy.{name}: given together with policy.model_name_or_path = {format_value(policy.model_name_or_path)}; "
        "allowed: only with a .safetensors file"
        for name in ("single_file_base", "single_file_low_noise")
        if getattr(policy, name) is not None and not policy.model_name_or_path.endswith(".safetensors")
    ]
    lines += _bucket_rules(policy.diffusers)
    given = policy.diffusers.conditional_frames
    if given is not None and given[0] > given[1]:
        lines.append(f"policy.diffusers.conditional_frames: found {list(given)}; allowed: [least, most]")
    if policy.parallelism.dp_shard_size == 0:
        lines.append("policy.parallelism.dp_shard_size: found 0; allowed: -1 or a whole number >= 1")
    selections = [name for name in ("freeze_pattern", "trainable_pattern", "trainable_map") if getattr(policy, name)]
    if len(selections) > 1:
        lines.append(f"policy.{selections[1]}: given together with policy.{selections[0]}; allowed: only one of them")
    if selections and policy.lora:
        lines.append(
            f"policy.{selections[0]}: given together with [policy.lora]; allowed: without, as adapters freeze the rest"
        )
    return lines


def _bucket_rules(diffusers: DiffusersConfig) -> list[str]:
    key, buckets = "policy.diffusers.buckets", diffusers.buckets
    if buckets is None:
        return []
    if bool(buckets.sizes) == (buckets.area is not None):
        return [f"{key}: found {'both' if buckets.sizes else 'neither'} of sizes and area; allowed: one of them"]
    sizes, lines = buckets.listed, []
    if not sizes:
        return [f"{key}.area: found {buckets.area}; allowed: at least step x step = {buckets.step**2}"]
    if any(side % 8 for size in sizes for side in size):
        found = f"step: found {buckets.step}; allowed: a multiple of 8"
        if buckets.sizes:
            wrong = next(size for size in sizes if size[0] % 8 or size[1] % 8)
            found = f"sizes: found {list(wrong)}; allowed: [height, width], multiples of 8"
        lines.append(f"{key}.{found}")
    if len(set(sizes)) < len(sizes):
        lines.append(f"{key}.sizes: found a size twice; allowed: different ones")
    if diffusers.inference_size not in sizes:
        near = list(choose_size(diffusers.inference_size, sizes))
        lines.append(
            f"policy.diffusers.inference_size: found {list(diffusers.inference_size)}; with {key} it is the size of "
            f"validation and must be one of them, as {near}"
        )
    return lines


def _memory_rules(config: Config) -> list[str]:
    train, policy, lines = config.train, config.policy, []
    if train.activation_offload and not policy.model_gradient_checkpointing:
        lines.append(
            "train.activation_offload: found true with policy.model_gradient_checkpointing = false; allowed: false, as "
            "it moves what checkpointing keeps"
        )
    if train.base_offload and policy.lora is None:
        lines.append(
            "train.base_offload: found true without [policy.lora]; allowed: false, or adapters over a frozen base, as "
            "weights that are trained are on the device with their gradients and moments"
        )
    elif train.base_offload and not policy.model_gradient_checkpointing:
        lines.append(
            "train.base_offload: found true with policy.model_gradient_checkpointing = false; allowed: false, or that "
            "key = true, as all blocks would else stay on the device for the backward pass"
        )
    return lines


def _lora_rules(config: Config) -> list[str]:
    lora, lines = config.policy.lora, []
    if lora is None:
        return []
    if lora.active_adapter not in lora.lora_names:
        lines.append(
            f'policy.lora.primary_adapter: found "{lora.primary_adapter}"; allowed: one of '
            f"policy.lora.lora_names = {list(lora.lora_names)}"
        )
    if len(set(lora.lora_names)) != len(lora.lora_names):
        lines.append(f"policy.lora.lora_names: found {list(lora.lora_names)}; allowed: different names")
    if not lora.target_modules:
        lines.append('policy.lora.target_modules: found []; allowed: name endings of layers, or "all-linear"')
    return lines


def _sft_batch_rules(config: Config) -> list[str]:
    train, ranks = config.train, data_ranks(config.policy.parallelism)
    mini_batch, total = train.train_policy.mini_batch, train.global_batch_size
    if job_kind(config).online:
        return []
    if total is None:
        if train.train_batch_per_replica % mini_batch == 0:
            return []
        return [
            f"train.train_policy.mini_batch: found {mini_batch}; allowed: a divisor of "
            f"train.train_batch_per_replica = {train.train_batch_per_replica}"
        ]
    if total % ranks:
        return [f"train.global_batch_size: found {total}; allowed: a multiple of the {ranks} data parallel ranks"]
    if total // ranks % mini_batch:
        return [
            f"train.train_policy.mini_batch: found {mini_batch}; allowed: a divisor of train.global_batch_size / ranks "
            f"= {total} / {ranks} = {total // ranks}"
        ]
    return []


def _schedule_rules(config: Config) -> list[str]:
    train, lines = config.train, []
    if isinstance(train.optm_lr, dict) and "global" not in train.optm_lr:
        lines.append("train.optm_lr.global: missing; the learning rate of parameters that no pattern finds")
    warmup, steps = train.optm_warmup_steps, train.max_num_steps
    if isinstance(warmup, float) and train.optm_decay_ratio is not None and warmup + train.optm_decay_ratio > 1:
        lines.append(
            f"train.optm_warmup_steps: found {warmup} with train.optm_decay_ratio = {train.optm_decay_ratio}; "
            "allowed: shares that add up to at most 1"
        )
    if isinstance(warmup, int) and steps is not None and train.optm_decay_ratio is not None:
        decay = round(steps * train.optm_decay_ratio)
        if min(warmup, steps) + decay > steps:
            lines.append(
                f"train.optm_warmup_steps: found {warmup}; with train.optm_decay_ratio = {train.optm_decay_ratio} that "
                f"is {warmup} + {decay} steps; allowed: at most train.max_num_steps = {steps}"
            )
    return lines


def _saving_rules(config: Config) -> list[str]:
    ckpt, lines = config.train.ckpt, []
    if ckpt.max_keep == 0:
        lines.append("train.ckpt.max_keep: found 0; allowed: -1 (keep all) or a whole number >= 1")
    if ckpt.upload_hf and not ckpt.hf_repo_name:
        lines.append("train.ckpt.hf_repo_name: missing; the name of a repository on the hub, for upload_hf = true")
    if ckpt.upload_s3 and not ckpt.s3_bucket:
        lines.append(
            f"train.ckpt.s3_bucket: missing; the name of a bucket, for upload_s3 = {format_value(ckpt.upload_s3)}"
        )
    if config.train.resume == "":
        lines.append('train.resume: found ""; allowed: true, false or the path of a checkpoint')
    return lines


def _folder_rules(config: Config) -> list[str]:
    key, dataset, lines = "train.train_policy.dataset", config.train.train_policy.dataset, list[str]()
    if job_kind(config).data != "pairs":
        for name, given in (("folders", dataset.folders), ("flip", dataset.flip)):
            if given:
                found = "true" if name == "flip" else f"{len(dataset.folders)} of them"
                lines.append(f"{key}.{name}: found {found}; allowed only in supervised fine-tuning")
        return lines
    if dataset.sets:
        lines.append(f"{key}.sets: found {len(dataset.sets)} of them; allowed only in reinforcement learning")
    if dataset.folders and dataset.local_dir:
        lines.append(f"{key}.folders: given together with local_dir; allowed: one of them")
    if dataset.folders and dataset.flip:
        lines.append(f"{key}.flip: found true; allowed without folders, each of which has its own flip")
    lines += [f"{key}.folders.{i}.local_dir: missing" for i, one in enumerate(dataset.folders) if not one.local_dir]
    repeated = any(one.repeats > 1 for one in dataset.folders)
    if dataset.test_size is not None and repeated and not config.validation.dataset.local_dir:
        lines.append(
            f"{key}.test_size: found {dataset.test_size}; allowed without repeats, which would train on what is held "
            "out; hold out a folder as validation.dataset.local_dir"
        )
    return lines


def _data_rules(config: Config) -> list[str]:
    train_policy, validation, lines = config.train.train_policy, config.validation, _folder_rules(config)
    if train_policy.dataloader_prefetch_factor is not None and train_policy.dataloader_num_workers == 0:
        lines.append(
            f"train.train_policy.dataloader_prefetch_factor: found {train_policy.dataloader_prefetch_factor}; allowed "
            "only with train.train_policy.dataloader_num_workers >= 1"
        )
    if job_kind(config).online:
        if validation.enable and not (validation.sets or validation.dataset.local_dir or validation.dataset.name):
            lines.append(
                "validation.dataset.local_dir: missing; allowed with validation.enable = true: a file of prompts, or "
                "validation.dataset.name, any word where the script passes its own val_dataset"
            )
        return lines
    if isinstance(train_policy, DpoPolicyConfig) and (problem := train_policy.dpo_auto_beta.problem()):
        lines.append(problem)
    named = validation.sets or validation.dataset.local_dir or train_policy.dataset.test_size
    if validation.enable and not named:
        lines.append(
            "validation.dataset.local_dir: missing; allowed with validation.enable = true: a folder of pairs or a "
            ".json file of prompts, any word where the script passes its own val_dataset (or hold out training samples "
            "with train.train_policy.dataset.test_size)"
        )
    return lines
