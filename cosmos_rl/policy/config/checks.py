"""Rules between keys: what cannot work (`cross_check`) and what is documented but not built (`not_runnable_yet`)."""

from cosmos_rl.policy.config.policy import ParallelismConfig
from cosmos_rl.policy.config.schema import Config


def cross_check(config: Config) -> list[str]:
    """Every rule between keys that `config` breaks, one line each, starting with the dotted key."""
    return [*_model_rules(config), *_batch_rules(config), *_schedule_rules(config), *_data_rules(config)]


def not_runnable_yet(config: Config) -> list[str]:
    """Documented settings of `config` that this version cannot run, one line each."""
    policy, train_policy = config.policy, config.train.train_policy
    lines = []
    if train_policy.type != "sft":
        lines.append(f'train.train_policy.type = "{train_policy.type}" (reinforcement learning)')
    elif train_policy.trainer_type != "sft":
        lines.append(f'train.train_policy.trainer_type = "{train_policy.trainer_type}"; use "sft"')
    if not policy.is_diffusers:
        lines.append("policy.is_diffusers = false (vision-language models); set it to true for a diffusers pipeline")
    if policy.diffusers.is_video:
        lines.append("policy.diffusers.is_video = true (videos)")
    if world_size(policy.parallelism) != 1 or policy.parallelism.n_init_replicas != 1:
        lines.append(f"more than one rank ({_ranks(policy.parallelism)}); set every size in [policy.parallelism] to 1")
    return lines


def world_size(parallelism: ParallelismConfig) -> int:
    """Ranks that the configuration asks for; -1 when dp_shard_size leaves it open."""
    if parallelism.dp_shard_size == -1:
        return -1
    return data_ranks(parallelism) * parallelism.tp_size * parallelism.cp_size * parallelism.pp_size


def data_ranks(parallelism: ParallelismConfig) -> int:
    """Ranks that see different samples."""
    return max(parallelism.dp_shard_size, 1) * parallelism.dp_replicate_size


def _ranks(parallelism: ParallelismConfig) -> str:
    sizes = parallelism.model_dump()
    return ", ".join(f"policy.parallelism.{name} = {size}" for name, size in sizes.items() if size != 1)


def _model_rules(config: Config) -> list[str]:
    policy, lines = config.policy, []
    if not policy.model_name_or_path:
        lines.append("policy.model_name_or_path: missing; give the folder or the hub name of a diffusers pipeline")
    if policy.lora and policy.lora.active_adapter not in policy.lora.lora_names:
        lines.append(
            f'policy.lora.primary_adapter: found "{policy.lora.primary_adapter}"; allowed: one of '
            f"policy.lora.lora_names = {list(policy.lora.lora_names)}"
        )
    if policy.lora and len(set(policy.lora.lora_names)) != len(policy.lora.lora_names):
        lines.append(f"policy.lora.lora_names: found {list(policy.lora.lora_names)}; allowed: different names")
    if policy.lora and not policy.lora.target_modules:
        lines.append('policy.lora.target_modules: found []; allowed: name endings of layers, or "all-linear"')
    height, width = policy.diffusers.inference_size
    if height % 8 or width % 8:
        lines.append(
            f"policy.diffusers.inference_size: found [{height}, {width}]; allowed: [height, width], multiples of 8"
        )
    parallelism = policy.parallelism
    if parallelism.dp_shard_size == 0:
        lines.append("policy.parallelism.dp_shard_size: found 0; allowed: -1 or a whole number >= 1")
    for name in ("tp_size", "pp_size", "ep_size"):
        if policy.is_diffusers and getattr(parallelism, name) != 1:
            lines.append(
                f"policy.parallelism.{name}: found {getattr(parallelism, name)}; allowed: 1 for diffusers pipelines"
            )
    if config.train.compile:
        lines.append("train.compile: found true; allowed: false")
    return lines


def _batch_rules(config: Config) -> list[str]:
    train, ranks = config.train, data_ranks(config.policy.parallelism)
    mini_batch, total = train.train_policy.mini_batch, train.global_batch_size
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
    if train.ckpt.max_keep == 0:
        lines.append("train.ckpt.max_keep: found 0; allowed: -1 (keep all) or a whole number >= 1")
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


def _data_rules(config: Config) -> list[str]:
    lines = []
    if config.validation.enable and not config.validation.dataset.local_dir:
        lines.append(
            "validation.dataset.local_dir: missing; allowed with validation.enable = true: a folder of pairs or a "
            ".json file of prompts"
        )
    if config.train.resume == "":
        lines.append('train.resume: found ""; allowed: true, false or the path of a checkpoint')
    return lines
