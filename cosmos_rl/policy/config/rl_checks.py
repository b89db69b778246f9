"""Rules between keys of reinforcement learning on diffusers pipelines."""

import math
from collections.abc import Iterator, Sequence

from cosmos_rl.diffusion.solver_names import CHURNED
from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.plan import (
    PAIR_TRAINERS,
    STEP_TRAINERS,
    keeps_common_reference,
    keeps_reference,
    last_trained_step,
    moves_reference,
    name_teachers,
    samples_with_old,
    trained_steps,
)
from cosmos_rl.policy.config.policy import SampleConfig
from cosmos_rl.policy.config.prompt_sets import set_rules
from cosmos_rl.policy.config.ranks import data_ranks
from cosmos_rl.policy.config.reward import LocalRewardConfig, RemoteRewardConfig
from cosmos_rl.policy.config.reward_names import repeated_names
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.train_policy import GrpoPolicyConfig
from cosmos_rl.policy.config.validation_sets import list_validation_sets, requested_table
from cosmos_rl.policy.config.window_rules import window_rules

_NOISELESS = ("dpm1", "dpm2", "euler")


def rl_rules(config: Config) -> list[str]:
    """Every broken rule, one line each, starting with the dotted key; none for other jobs."""
    if not job_kind(config).online or not config.policy.is_diffusers:
        return []
    job = online_table(config)
    return [
        *_placement(config, job),
        *_sampling(config.policy.diffusers.sample, learns_steps=job.trainer_type in STEP_TRAINERS),
        *_trained_steps(config, job),
        *_levels(config, job),
        *_advantages(config, job),
        *_batches(config, job),
        *_prompt_sets(config, job),
        *_real_samples(config, job),
        *_reference(job),
        *_teacher(config, job),
        *_gardo(job),
        *_pairs(job),
        *_guard(config, job),
        *_rewards(config, job),
        *_gen_eval(config, job),
    ]


def _placement(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    if config.mode != "colocated":
        yield f'mode: found "{config.mode}"; allowed: "colocated" with train.train_policy.type = "grpo"'
    if not job.uncentralized_training:
        yield "train.train_policy.uncentralized_training: found false; allowed: true for diffusers pipelines"
    if job.variant != "grpo":
        yield f'train.train_policy.variant: found "{job.variant}"; allowed: "grpo" for diffusers pipelines'
    yield from _adapters(config, job)
    ours, rollouts = config.policy.parallelism, config.rollout.parallelism
    for name in ("dp_shard_size", "dp_replicate_size", "tp_size", "cp_size", "pp_size", "ep_size"):
        if rollouts and getattr(rollouts, name) != getattr(ours, name):
            yield (
                f"rollout.parallelism.{name}: found {getattr(rollouts, name)}; allowed: "
                f"{getattr(ours, name)} as in policy.parallelism, or leave [rollout.parallelism] out"
            )


def _adapters(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    lora, needed = config.policy.lora, job_kind(config).adapters
    if lora is None or not needed:
        return
    trained, *others = needed
    if not set(needed) <= set(lora.lora_names):
        samples = "".join(f' and "{name}" (samples)' for name in others)
        yield (
            f"policy.lora.lora_names: found {list(lora.lora_names)}; allowed: a list with "
            f'"{trained}" (trained){samples} for "{job.trainer_type}"'
        )
    elif lora.active_adapter != trained:
        found = "unset" if lora.primary_adapter is None else f'"{lora.primary_adapter}"'
        only = "".join(f', as "{name}" only samples' for name in others)
        yield (
            f"policy.lora.primary_adapter: found {found} with policy.lora.lora_names = {list(lora.lora_names)}; "
            f'allowed: "{trained}"{only} for "{job.trainer_type}"'
        )


def _sampling(sample: SampleConfig, *, learns_steps: bool) -> Iterator[str]:
    """``learns_steps``: the trainer needs noise between them, which `_trained_steps` asks for."""
    if sample.solver in _NOISELESS and not sample.deterministic_sampling and not learns_steps:
        yield (
            "policy.diffusers.sample.deterministic_sampling: found false; allowed: true with "
            f'policy.diffusers.sample.solver = "{sample.solver}"'
        )
    if sample.solver == "dance" and sample.deterministic_sampling:
        yield (
            "policy.diffusers.sample.deterministic_sampling: found true; allowed: false with "
            'policy.diffusers.sample.solver = "dance"'
        )
    if sample.solver not in _NOISELESS and not sample.deterministic_sampling and sample.noise_level == 0:
        otherwise = "" if learns_steps else ", or policy.diffusers.sample.deterministic_sampling = true"
        yield f"policy.diffusers.sample.noise_level: found 0.0; allowed: more than 0{otherwise}"
    if sample.solver in ("ddim", "cps") and not sample.deterministic_sampling and sample.noise_level > 1:
        yield (
            f"policy.diffusers.sample.noise_level: found {sample.noise_level}; allowed: 0 to 1 with "
            f'policy.diffusers.sample.solver = "{sample.solver}"'
        )
    yield from _churn(sample)


def _churn(sample: SampleConfig) -> Iterator[str]:
    """Keys of the noise that EDM's solvers add."""
    setting = "deterministic_sampling = true"
    if sample.solver not in CHURNED:
        setting = f'solver = "{sample.solver}"'
    found = (sample.noise_scale, sample.noise_above, sample.noise_below)
    if sample.solver not in CHURNED or sample.deterministic_sampling:
        plain = (("noise_scale", "1.0", 1.0), ("noise_above", "0.0", 0.0), ("noise_below", "unset", None))
        for value, (key, allowed, default) in zip(found, plain, strict=True):
            if value != default:
                yield (
                    f"policy.diffusers.sample.{key}: found {value}; allowed: {allowed} with "
                    f"policy.diffusers.sample.{setting}"
                )
    if sample.noise_below is not None and sample.noise_below <= sample.noise_above:
        yield (
            f"policy.diffusers.sample.noise_below: found {sample.noise_below}; allowed: more than "
            f"policy.diffusers.sample.noise_above = {sample.noise_above}"
        )


def _trained_steps(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    """Of trainers on sampling steps: the steps must have noise, and there must be that many."""
    sample, key = config.policy.diffusers.sample, "train.train_policy.steps"
    kind = config.policy.diffusers.weight_copy_decay_type
    if job.trainer_type in PAIR_TRAINERS and kind != 0:
        yield (
            f'policy.diffusers.weight_copy_decay_type: found {kind}; allowed: 0 with "{job.trainer_type}", which '
            "samples with the trained policy"
        )
    if job.trainer_type not in STEP_TRAINERS:
        if job.preset is not None:
            yield (
                f'train.train_policy.trainer_type: found "{job.trainer_type}"; allowed: "flow_grpo" or "ddrl" with '
                f'train.train_policy.preset = "{job.preset}", or leave that out (--train.train_policy.preset=none)'
            )
        elif job.on_policy:
            yield f'train.train_policy.on_policy: found true; allowed: false with "{job.trainer_type}"'
        return
    if sample.deterministic_sampling or sample.solver in _NOISELESS:
        yield (
            f'policy.diffusers.sample.solver: found "{sample.solver}"; allowed: one with noise ("flow", "cps", ...), '
            f'and deterministic_sampling = false, for "{job.trainer_type}", which learns from the noise of the steps'
        )
    if config.policy.diffusers.even_levels:
        yield (
            f'policy.diffusers.even_levels: found true; allowed: false with "{job.trainer_type}", whose levels '
            f"{key} chooses"
        )
    count, last = trained_steps(config), last_trained_step(config)
    if not 1 <= count <= last:
        ends = "the last two have" if sample.solver in CHURNED else "the last one has"
        within = "" if job.steps.choose in ("first", "list") else f" and they lie in {key}.within = {job.steps.within}"
        yield (
            f"{key}: found {count} trained steps; allowed: {_count_to(last)} of policy.diffusers.sample.num_steps = "
            f"{sample.num_steps}, as {ends} no noise{within}"
        )
    else:
        yield from window_rules(config)
    listed = [index for index in job.steps.indices if index >= 0]
    if len(set(listed)) != len(listed) or any(index >= last for index in listed):
        yield f"{key}.indices: found {list(job.steps.indices)}; allowed: different ones from 0 to {last - 1}, or -1"
    lora = config.policy.lora
    if samples_with_old(config) and lora is not None and "old" not in lora.lora_names:
        yield (
            f'policy.lora.lora_names: found {list(lora.lora_names)}; allowed: a list with "default" and "old", which '
            "samples, or train.train_policy.on_policy = true"
        )


def _count_to(last: int) -> str:
    return f"1 to {last}" if last > 0 else "none"


def _levels(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    diffusers, by_share = config.policy.diffusers, job.steps.choose in ("first", "random")
    if diffusers.trained_levels < 1 and (by_share or job.trainer_type not in STEP_TRAINERS):
        fraction, steps = diffusers.timesteps_fraction, diffusers.sample.num_steps
        yield (
            f"policy.diffusers.timesteps_fraction: found {fraction}; of policy.diffusers.sample.num_steps = "
            f"{steps} it leaves int({steps} * {fraction}) = 0 trained steps; allowed: at least 1"
        )


def _advantages(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    if job.learnt_share < 1 and job.trainer_type in PAIR_TRAINERS:
        yield (
            f"train.train_policy.learnt_share: found {job.learnt_share:g}; allowed: 1.0 with "
            f'"{job.trainer_type}", which learns from the best and the worst sample of each prompt'
        )
    if config.rollout.n_generation < 2:
        yield "rollout.n_generation: found 1; allowed: 2 or more, as an advantage compares samples of one prompt"
    sample = config.policy.diffusers.sample
    if sample.same_initial_noise and (sample.deterministic_sampling or sample.solver in _NOISELESS):
        yield (
            "policy.diffusers.sample.same_initial_noise: found true; allowed: false without noise between the steps "
            f'(policy.diffusers.sample.solver = "{sample.solver}", policy.diffusers.sample.deterministic_sampling = '
            f"{str(sample.deterministic_sampling).lower()}), as the samples of a prompt would all be the same"
        )
    if job.normalise_rewards == "gdpo" and job.advantage_temperature is not None:
        yield (
            f"train.train_policy.advantage_temperature: found {job.advantage_temperature}; allowed: unset with "
            'train.train_policy.normalise_rewards = "gdpo", which divides by deviations'
        )
    if job.advantage_low >= 0:
        yield f"train.train_policy.advantage_low: found {job.advantage_low}; allowed: less than 0"
    if job.advantage_high <= 0:
        yield f"train.train_policy.advantage_high: found {job.advantage_high}; allowed: more than 0"


def _batches(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    """Samples of a step = prompts x samples per prompt, split evenly over the ranks, in whole micro-batches.

    The samples of a prompt may lie on several ranks.
    """
    total, key = config.train.train_batch_per_replica, "train.train_batch_per_replica"
    if config.train.global_batch_size is not None:
        total, key = config.train.global_batch_size, "train.global_batch_size"
    group, ranks = config.rollout.n_generation, data_ranks(config.policy.parallelism)
    step = math.lcm(group, ranks)
    if total % step:
        yield (
            f"{key}: found {total}; allowed: a multiple of rollout.n_generation = {group} and of the {ranks} data "
            f"parallel ranks, the nearest {_nearest(total, step)}"
        )
        return
    local = total // ranks
    in_pairs = job.trainer_type in PAIR_TRAINERS  # a pair for each prompt, whatever its number of samples
    if local % job.mini_batch and not in_pairs:
        yield (
            f"train.train_policy.mini_batch: found {job.mini_batch}; allowed: a divisor of the samples of a rank, "
            f"{key} / ranks = {total} / {ranks} = {local}"
        )
    chunk = job.batch_size_per_optimize
    if chunk is not None and not in_pairs and (local % chunk or chunk % job.mini_batch):
        yield (
            f"train.train_policy.batch_size_per_optimize: found {chunk}; allowed: a multiple of "
            f"train.train_policy.mini_batch = {job.mini_batch} that divides the samples of a rank, "
            f"{key} / ranks = {total} / {ranks} = {local}"
        )
    at_once = config.rollout.n_generation_mini_batch
    if at_once is not None and at_once > group:
        yield f"rollout.n_generation_mini_batch: found {at_once}; allowed: at most rollout.n_generation = {group}"


def _prompt_sets(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    key, dataset, tested = "train.train_policy.dataset", job.dataset, {"validation": config.validation.dataset}
    tested |= {f"validation.sets.{number}": one.dataset for number, one in enumerate(config.validation.sets)}
    for table, held_out in tested.items():
        if held_out.sets:
            yield f"{table}.dataset.sets: found {len(held_out.sets)} of them; allowed only in {key}"
    if not dataset.sets:
        if dataset.mix != "prompts":
            yield f'{key}.mix: found "{dataset.mix}"; allowed with {key}.sets only, which it divides'
        return
    for name in ("local_dir", "name", "split", "test_size"):
        if getattr(dataset, name):
            yield f"{key}.sets: given together with {name}; allowed: one of them"
    yield from set_rules(dataset.sets, config.train.max_num_steps)
    if config.train.ckpt.save_freq_in_epoch:
        yield (
            f"train.ckpt.save_freq_in_epoch: found {config.train.ckpt.save_freq_in_epoch}; allowed: unset with "
            f"{key}.sets, whose run is one epoch; save_freq counts steps"
        )


def _real_samples(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    term, ranks, key = job.data_term, data_ranks(config.policy.parallelism), "train.train_policy.data_term"
    if job.trainer_type == "ddrl" and (term.beta == 0 or job.kl_beta > 0):
        yield (
            f'{key}.beta: found {term.beta}; allowed: more than 0 with "ddrl", and train.train_policy.kl_beta = 0, as '
            "the samples take the place of a reference"
        )
    if term.beta == 0:
        return
    if not term.local_dir:
        yield f"{key}.local_dir: missing; the folder of pairs that {key}.beta = {term.beta} trains on"
    if term.noise == "rollout" and config.policy.diffusers.buckets is not None:
        yield (
            f'{key}.noise: found "rollout"; allowed: "fresh" with policy.diffusers.buckets, as real samples have '
            "inference_size and rollouts other sizes too"
        )
    if term.batch_size % ranks:
        yield (
            f"{key}.batch_size: found {term.batch_size}; allowed: a multiple of the {ranks} data parallel ranks, the "
            f"nearest {_nearest(term.batch_size, ranks)}"
        )


def _reference(job: GrpoPolicyConfig) -> Iterator[str]:
    if job.reset_optimizer_with_reference and not moves_reference(job):
        yield (
            "train.train_policy.reset_optimizer_with_reference: found true; allowed: false without a reference that "
            "moves (train.train_policy.reference_reset_interval or reference_reset_kl, and a kl_beta or norm_penalty)"
        )
    if job.reference_reset_kl is not None and job.kl_beta == 0:
        yield (
            f"train.train_policy.kl_beta: found 0.0; allowed: more than 0 with train.train_policy.reference_reset_kl = "
            f"{job.reference_reset_kl}, as the distance is not measured without"
        )


def _teacher(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    """They are references, so something must be compared with them, and nothing else may take their place."""
    job_key, policy = "train.train_policy", config.policy
    named = name_teachers(job)
    if not named:
        return
    key, place = next(iter(named.items()))
    if job.kl_beta == 0:
        yield f"{job_key}.kl_beta: found 0.0; allowed: more than 0 with {key}, whose distance it weighs"
    for name in ("reference_reset_interval", "reference_reset_kl"):
        if (found := getattr(job, name)) is not None:
            yield f"{job_key}.{name}: found {found}; allowed: unset with {key}, which is the reference"
    if job.trainer_type in PAIR_TRAINERS:
        yield f'{key}: found "{place}"; allowed: unset with "{job.trainer_type}", which needs a reference'
    if policy.freeze_pattern or policy.trainable_pattern or policy.trainable_map:
        yield f'{key}: found "{place}"; allowed: with adapters, or where all weights are trained'
    if job.teacher and keeps_reference(job) and not keeps_common_reference(job):
        yield f'{key}: found "{place}"; allowed: unset where every one of {job_key}.dataset.sets has its own'


def _gardo(job: GrpoPolicyConfig) -> Iterator[str]:
    """The gate is on the distance to the reference, and the diversity in advantages of one reward."""
    key, gate = "train.train_policy", job.kl_gate
    if gate.rewards and job.kl_beta == 0:
        yield f"{key}.kl_beta: found 0.0; allowed: more than 0 with {key}.kl_gate.rewards, which gate its distance"
    if not gate.least_share <= gate.share <= gate.most_share:
        yield f"{key}.kl_gate.share: found {gate.share}; allowed: {gate.least_share} to {gate.most_share}, its bounds"
    if job.trainer_type in PAIR_TRAINERS:
        for name, found in (("kl_gate.rewards", list(gate.rewards)), ("diversity_features", job.diversity_features)):
            if found:
                yield f'{key}.{name}: found {found}; allowed: none with "{job.trainer_type}", which learns from pairs'
    if gate.rewards and any(one.rewards for one in job.dataset.sets):
        yield (
            f"{key}.kl_gate.rewards: found {list(gate.rewards)}; allowed: none where {key}.dataset.sets have rewards "
            "of their own, as it ranks all samples of a step by the same rewards"
        )
    if job.diversity_features is not None and job.normalise_rewards != "sum":
        yield (
            f'{key}.normalise_rewards: found "{job.normalise_rewards}"; allowed: "sum" with {key}.diversity_features, '
            "which is a factor of the advantages of one reward"
        )


def _pairs(job: GrpoPolicyConfig) -> Iterator[str]:
    auto, key = job.dpo_auto_beta, "train.train_policy.dpo_auto_beta"
    if auto.target_factor is not None and job.trainer_type not in PAIR_TRAINERS:
        yield f'{key}.target_factor: found {auto.target_factor}; allowed: unset with "{job.trainer_type}"'
    if problem := auto.problem():
        yield problem


def _guard(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    """A rewind needs a checkpoint from before the last check."""
    guard, ckpt, key = job.reward_hacking_guard, config.train.ckpt, "train.train_policy.reward_hacking_guard.action"
    if not guard.enable or guard.action != "rewind":
        return
    if not ckpt.enable_checkpoint:
        yield f'{key}: found "rewind", which needs checkpoints; allowed with train.ckpt.enable_checkpoint = true'
    elif not ckpt.save_freq_in_epoch and ckpt.max_keep > 0 and ckpt.max_keep * ckpt.save_freq < guard.freq:
        yield (
            f"train.ckpt.max_keep: found {ckpt.max_keep}; allowed: at least {-(-guard.freq // ckpt.save_freq)} with "
            f"train.ckpt.save_freq = {ckpt.save_freq} and train.train_policy.reward_hacking_guard.freq = {guard.freq}, "
            "as a rewind needs a checkpoint from before the last check"
        )


def _nearest(total: int, step: int) -> str:
    below = total // step * step
    if below == 0:
        return str(step)
    return f"{below} or {below + step}"


def _rewards(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    remote, local, validation = job.remote_reward, job.local_reward, config.validation
    yield from _table("train.train_policy.remote_reward", remote, _remote_clips(remote))
    yield from _table("train.train_policy.local_reward", local, _local_clips(local))
    tables = {"validation": validation, **{f"validation.sets.{i}": one for i, one in enumerate(validation.sets)}}
    for key, table in tables.items():
        if table.remote_reward:
            yield from _table(f"{key}.remote_reward", table.remote_reward, _remote_clips(table.remote_reward))
        if table.local_reward:
            yield from _table(f"{key}.local_reward", table.local_reward, _local_clips(table.local_reward))
    if validation.use_remote_reward not in (None, job.use_remote_reward):
        yield (
            f"validation.use_remote_reward: found {str(validation.use_remote_reward).lower()}; allowed: "
            f"{str(job.use_remote_reward).lower()} as in train.train_policy, or leave it out"
        )
    yield from repeated_names(config)


def _gen_eval(config: Config, job: GrpoPolicyConfig) -> Iterator[str]:
    """Where this reward scores prompts of a named set, they must have its objects and tags."""
    key, dataset, remote = "train.train_policy.dataset", job.dataset, job.remote_reward
    if job.use_remote_reward and not dataset.sets and not dataset.local_dir and _asks_gen_eval((), remote):
        yield from _gen_eval_name(key, dataset.name)
    for number, one in enumerate(dataset.sets if job.use_remote_reward else ()):
        if one.name and _asks_gen_eval(one.rewards or (), remote):
            yield from _gen_eval_rewards(f"{key}.sets.{number}", one.name, one.rewards or ())
    for tested in list_validation_sets(config) if not job.bypass_reward else ():
        table, dataset = requested_table(tested.config), tested.config.validation.dataset
        if table is None or dataset.local_dir or not dataset.name or not _asks_gen_eval(tested.rewards, table):
            continue
        if tested.label:
            yield from _gen_eval_rewards(tested.key, dataset.name, tested.rewards)
        else:
            yield from _gen_eval_name(f"{tested.key}.dataset", dataset.name)


def _asks_gen_eval(named: Sequence[str], table: RemoteRewardConfig) -> bool:
    """Whether a set with these rewards, or without any all of the ``table``, has it, or a score of it by its key."""
    scores = zip(table.shown_names, table.reward_fns, strict=True)
    own = {shown for shown, entry in scores if shown and entry.name == "gen_eval"}
    return bool(own.intersection(named or own))


def _gen_eval_name(key: str, name: str) -> Iterator[str]:
    if not name.startswith("geneval"):
        yield (
            f'{key}.name: found "{name}"; allowed: "geneval" with the reward "gen_eval", which needs its objects and '
            "tags, or your own file with them as local_dir"
        )


def _gen_eval_rewards(key: str, name: str, rewards: Sequence[str]) -> Iterator[str]:
    if not name.startswith("geneval"):
        found = f"found {list(rewards)}" if rewards else "unset, so all"
        yield (
            f'{key}.rewards: {found} for "{name}"; allowed: without "gen_eval", which needs the objects and tags of '
            '"geneval" or of your own file as local_dir'
        )


_Clip = tuple[str, float, float]
"""Name of a reward and the bounds of its scores."""


def _remote_clips(table: RemoteRewardConfig) -> list[_Clip]:
    return [(f"{entry.name}.{entry.read_key}", entry.lower, entry.upper) for entry in table.reward_fns]


def _local_clips(table: LocalRewardConfig) -> list[_Clip]:
    return [(entry.shown_name, entry.clip_min, entry.clip_max) for entry in table.reward_fns]


def _table(key: str, table: RemoteRewardConfig | LocalRewardConfig, clips: list[_Clip]) -> Iterator[str]:
    """Rules of one table of rewards."""
    if table.reward_clip_min >= table.reward_clip_max:
        yield (
            f"{key}.reward_clip_min: found {table.reward_clip_min}; allowed: less than "
            f"reward_clip_max = {table.reward_clip_max}"
        )
    for index, (_, lower, upper) in enumerate(clips):
        if lower >= upper:
            yield f"{key}.reward_fns.{index}.clip_min: found {lower}; allowed: less than clip_max = {upper}"
    names = [name for name, _, _ in clips]
    if len(set(names)) != len(names):
        yield f"{key}.reward_fns: found {names}; allowed: each of them once"
