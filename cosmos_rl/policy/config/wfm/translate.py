"""From the older configuration to the present one. Pure: no files, no environment."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.problems import format_value
from cosmos_rl.policy.config.wfm.data import DataEntryConfig
from cosmos_rl.policy.config.wfm.notes import Note, Translation
from cosmos_rl.policy.config.wfm.rules import EXPECTED, FOR_ALL, FOR_RL, IGNORED, JOB, RANKS, REMOTE, RL, SAMPLE, Rule
from cosmos_rl.policy.config.wfm.run import OlderConfig

_PUBLISHED = {(2048, 28, 16): "nvidia/Cosmos-Predict2.5-2B", (5120, 36, 40): "nvidia/Cosmos-Predict2.5-14B"}
"""Channels, blocks and heads of the transformer -> repository on the hub."""
_REVISION = "diffusers/base/post-trained"
_SIZES = {"480": [432, 768], "480p": [480, 832], "720": [704, 1280], "720p": [720, 1280]}
"""`model.resolution` -> height and width of videos of 16:9."""


def translate(
    config: OlderConfig, tree: Mapping[str, Any], unknown: Sequence[str] = (), *, output_root: str = "./outputs"
) -> Translation:
    """The present form of an older configuration.

    Args:
        config: the validated one.
        tree: the tables of the file, for which keys it has.
        unknown: keys that were left out of them.
        output_root: folder of all runs.
    """
    draft = _Draft(config)
    draft.apply(FOR_ALL)
    _choose_model(draft)
    _choose_ranks(draft)
    _choose_size(draft)
    _choose_optimizer(draft)
    _choose_decay(draft)
    _choose_run(draft, output_root)
    _choose_logging(draft)
    _choose_data(draft)
    if config.model.rl.enabled:
        draft.apply(FOR_RL)
        _choose_steps(draft)
        _choose_loss(draft)
        _choose_rewards(draft)
    else:
        _choose_fine_tuning(draft)
    given = frozenset([*_leaves(tree), *unknown])
    draft.notes += [Note(key, text="unknown", lost=True) for key in unknown]
    _explain_rest(draft, given)
    return Translation(draft.tables, tuple(draft.notes), given)


class _Draft:
    """The tables so far, with a note for each key that they came from."""

    def __init__(self, config: OlderConfig) -> None:
        self.config = config
        self.tables: dict[str, Any] = {}
        self.notes: list[Note] = []

    def put(self, new: str, value: object, *old: str, text: str = "") -> None:
        """Set a key of the present form, because of keys of the older one."""
        *path, leaf = new.split(".")
        table: dict[str, Any] = reduce(lambda table, name: table.setdefault(name, {}), path, self.tables)
        table[leaf] = value
        self.notes += [Note(key, new, text, value) for key in old]

    def apply(self, rules: Iterable[Rule]) -> None:
        """Set what depends on one key alone."""
        for rule in rules:
            value = self.value(rule.old)
            if rule.change is not None:
                value = rule.change(value)
            self.put(rule.new, value, rule.old, text=rule.text)

    def lose(self, old: str, text: str) -> None:
        """Note an effect that has no counterpart."""
        self.notes.append(Note(old, text=text, lost=True))

    def value(self, old: str) -> Any:
        """Of a key of the older form."""
        return reduce(getattr, old.split("."), self.config)

    @property
    def entry(self) -> DataEntryConfig:
        """The data that is read."""
        return self.config.dataloader_train.entry or DataEntryConfig()

    @property
    def entry_key(self) -> str:
        """Where that stands."""
        if self.entry is self.config.dataloader_train.image_dataloader:
            return "dataloader_train.image_dataloader"
        return "dataloader_train.video_dataloader"

    @property
    def data_ranks(self) -> int:
        """Ranks with samples of their own."""
        model = self.config.model
        return model.fsdp_shard_size * model.dp_replicate_size * max(self.config.model_parallel.data_parallel_size, 1)


def _choose_model(draft: _Draft) -> None:
    net, checkpoint = draft.config.model.net, draft.config.checkpoint
    draft.put("policy.is_diffusers", True)
    draft.put("policy.diffusers.is_video", True)
    draft.put("policy.diffusers.dtype", draft.config.model.precision)
    draft.put("policy.diffusers.max_prompt_length", 512)
    name = _PUBLISHED.get((net.model_channels, net.num_blocks, net.num_heads))
    old = ["model.net.model_channels", "model.net.num_blocks", "model.net.num_heads"]
    if checkpoint.model_id or _is_repository(checkpoint.load_path):
        name, old = checkpoint.load_path, ["checkpoint.load_path"]
    if name is None:
        draft.lose(old[0], "no published model has this size; set policy.model_name_or_path")
        return
    draft.put("policy.model_name_or_path", name, *old)
    if name in _PUBLISHED.values():
        draft.put("policy.model_revision", _REVISION)
    for key in ("checkpoint.model_id", "checkpoint.load_path"):
        file = draft.value(key) or ""
        if file.endswith(".pt"):
            make = f"`cosmos-rl import {file.rpartition('/')[2]} --base {name} --revision {_REVISION} --out DIR`"
            draft.lose(key, f"starts from {_REVISION}; {make} makes a folder of it for policy.model_name_or_path")
        elif file and not _is_repository(file):
            draft.lose(key, "a checkpoint of the older trainer cannot be read")


def _is_repository(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith(".pt")


def _choose_ranks(draft: _Draft) -> None:
    model, key = draft.config.model, "model_parallel.context_parallel_size"
    if model.context_parallel_size is not None:
        key = "model.context_parallel_size"
    draft.put(f"{RANKS}.cp_size", draft.value(key), key)
    replicas = draft.data_ranks // model.fsdp_shard_size
    draft.put(f"{RANKS}.dp_replicate_size", replicas, "model.dp_replicate_size", "model_parallel.data_parallel_size")


def _choose_size(draft: _Draft) -> None:
    """Height, width and frames."""
    model, entry = draft.config.model, draft.entry
    size, key, text = _SIZES.get(model.resolution), "model.resolution", "of videos of 16:9"
    if entry.video_size is not None:
        size, key, text = list(entry.video_size), f"{draft.entry_key}.video_size", "read as [height, width]"
    if size is None:
        draft.lose(key, "set policy.diffusers.inference_size")
    else:
        draft.put("policy.diffusers.inference_size", size, key, text=text)
    frames, key = (model.state_t - 1) * 4 + 1, "model.state_t"
    if not model.resize_online and entry.num_frames is not None:
        frames, key = entry.num_frames, f"{draft.entry_key}.num_frames"
    draft.put("policy.diffusers.train_frames", frames, key)
    draft.put("policy.diffusers.inference_frames", frames, key)


def _choose_optimizer(draft: _Draft) -> None:
    """The factor of the loss acts only through the clip of gradients and epsilon."""
    config, schedule = draft.config, draft.config.scheduler
    scale, peak = config.model.loss_scale, schedule.f_max[0]
    draft.put("train.optm_lr", config.optimizer.lr * peak, "optimizer.lr", "scheduler.f_max")
    draft.put("train.epsilon", config.optimizer.eps / scale, "optimizer.eps", "model.loss_scale")
    clip, norm = config.trainer.callback_args("grad_clip"), 0.0
    if clip is not None:
        norm = _read_number(clip, "clip_norm", 1.0) / scale
    draft.put("train.optm_grad_norm_clip", norm, "trainer.callbacks.grad_clip", "model.loss_scale")
    draft.put("train.optm_warmup_steps", schedule.warm_up_steps[0], "scheduler.warm_up_steps")
    draft.put("train.optm_warmup_start_factor", min(schedule.f_start[0] / peak, 1.0), "scheduler.f_start")


def _choose_decay(draft: _Draft) -> None:
    """Where the first cycle is at the end of the run."""
    schedule, steps = draft.config.scheduler, draft.config.trainer.max_iter
    keys = ("scheduler.scheduler_type", "scheduler.f_min", "scheduler.cycle_lengths")
    warm_up, cycle = schedule.warm_up_steps[0], schedule.cycle_lengths[0]
    if cycle < steps:
        draft.lose("scheduler.cycle_lengths", "the learning rate falls once, over the whole run")
    share, least = min(max(steps - warm_up, 0) / max(cycle - warm_up, 1), 1.0), schedule.f_min[0] / schedule.f_max[0]
    if "cos" in schedule.scheduler_type:
        kind, share = "cosine", (1.0 - math.cos(math.pi * share)) / 2.0
    else:
        kind = "linear"
    lowest = 1.0 + (least - 1.0) * share
    if lowest == 1.0:
        draft.put("train.optm_decay_type", "none", *keys, text="constant after the warm-up")
        return
    draft.put("train.optm_decay_type", kind, *keys)
    draft.put("train.optm_min_lr_factor", lowest, "scheduler.f_min")


def _choose_run(draft: _Draft, root: str) -> None:
    job, trainer = draft.config.job, draft.config.trainer
    keys = ("job.project", "job.group", "job.name")
    draft.put("train.output_dir", "/".join([root.rstrip("/"), job.project, job.group, job.name]), *keys)
    draft.put("train.epoch", trainer.max_iter)  # the data is repeated until train.max_num_steps
    draft.put("train.ckpt.max_keep", -1)
    draft.put("train.ckpt.export_safetensors", False)
    if job.timestamp:
        draft.put("train.timestamp", job.timestamp, "job.timestamp")
        draft.put("train.resume", True, "job.timestamp", text="a run of a fixed name was continued by itself")


def _choose_logging(draft: _Draft) -> None:
    trainer, places = draft.config.trainer, ["console"]
    if trainer.callback_args("wandb") is not None and draft.config.job.wandb_mode != "disabled":
        places.append("wandb")
    draft.put("logging.logger", places, "trainer.callbacks.wandb", "job.wandb_mode")
    for name in ("every_n_sample_reg", "every_n_sample_ema"):
        arguments, key = trainer.callback_args(name), f"trainer.callbacks.{name}"
        if arguments is None:
            continue
        every, steps = _read_number(arguments, "every_n", 100), _read_number(arguments, "num_sampling_step", 35)
        draft.put("logging.multi_modal_log_interval", int(every), key)
        draft.put(f"{SAMPLE}.eval_num_steps", int(steps) + 1, key)
        if arguments.get("guidance"):
            draft.lose(key, "validation has the guidance of the rollouts")


def _read_number(arguments: Mapping[str, object], name: str, default: float) -> float:
    value = arguments.get(name, default)
    if isinstance(value, int | float):
        return value
    raise UserError(f"trainer.callbacks: {name}: found {format_value(value)}; allowed: a number")


def _choose_data(draft: _Draft) -> None:
    data, entry, key = draft.config.dataloader_train, draft.entry, draft.entry_key
    if data.is_mock:
        draft.put(f"{JOB}.dataset.name", "mock", f"{key}.dataloader.dataset.len_t5")
    elif data.type == "web":
        draft.lose("dataloader_train.type", "WebDataset is not supported yet; set train.train_policy.dataset.local_dir")
    else:
        draft.put(f"{JOB}.dataset.local_dir", entry.dataset_dir, f"{key}.dataset_dir")
    if entry is data.image_dataloader:
        draft.lose("dataloader_train.image_dataloader.ratio", "only videos are trained on")
    if entry.offline_text_embedding:
        text = "the pipeline's encoders encode each caption once"
        draft.put(f"{JOB}.cache.text", True, f"{key}.offline_text_embedding", text=text)
    loader = f"{key}.dataloader" if entry.dataloader is not None else key
    draft.put(f"{JOB}.mini_batch", entry.loader.batch_size, f"{loader}.batch_size")


def _choose_steps(draft: _Draft) -> None:
    """Which steps are trained: in order, without those that have no noise; and which frames are given."""
    rl = draft.config.model.rl
    steps = sorted({index for index in rl.train_on if index >= 0})
    kept = [index for index in steps if index < rl.sample_steps - 1] + [-1] * rl.train_on.count(-1)
    text = ""
    if dropped := sorted(set(steps) - set(kept)):
        text = f"without {dropped}, which have no noise"
    draft.put(f"{JOB}.steps.choose", "list")
    draft.put(f"{JOB}.steps.indices", kept, f"{RL}.train_on", text=text)
    draft.put(f"{SAMPLE}.deterministic_sampling", False)
    frames = [rl.min_num_conditional_frames, rl.max_num_conditional_frames]
    keys = (f"{RL}.min_num_conditional_frames", f"{RL}.max_num_conditional_frames")
    draft.put("policy.diffusers.conditional_frames", frames, *keys)


def _choose_loss(draft: _Draft) -> None:
    rl, trainer = draft.config.model.rl, "flow_grpo"
    if rl.data_beta > 0 and rl.kl_beta == 0:
        trainer = "ddrl"
    draft.put("mode", "colocated")
    draft.put(f"{JOB}.type", "grpo", f"{RL}.enabled")
    draft.put(f"{JOB}.trainer_type", trainer, f"{RL}.data_beta", f"{RL}.kl_beta")
    draft.put(f"{JOB}.uncentralized_training", True)
    draft.put(f"{JOB}.logprob_weight", "ve", f"{RL}.clip_ratio", text="the older ratio, with its unit of the clip")
    draft.put(f"{SAMPLE}.global_std", False)
    draft.put(f"{JOB}.reward_hacking_guard.enable", False)
    if not rl.on_policy:
        draft.put("policy.diffusers.weight_copy_decay_type", 1, f"{RL}.on_policy")
        draft.lose(f"{RL}.on_policy", "samples come from a policy that follows the trained one, not from the reference")
    if rl.guidance > 0 and draft.config.model.text_dropout <= 1e-4:
        draft.lose(f"{RL}.guidance", "it acts here; without dropout of the text it did not in the older trainer")
    if rl.update_ref_every_iter > 0 and rl.kl_beta > 0:
        draft.put(f"{JOB}.reference_reset_interval", rl.update_ref_every_iter, f"{RL}.update_ref_every_iter")
    if rl.data_beta > 0:
        _choose_data_term(draft)
    total = draft.data_ranks * draft.entry.loader.batch_size * draft.config.trainer.grad_accum_iter
    text = f"samples over all ranks, of {total / rl.num_rollout:g} prompts"
    draft.put("train.train_batch_per_replica", total, "trainer.grad_accum_iter", text=text)


def _choose_data_term(draft: _Draft) -> None:
    rl, batch = draft.config.model.rl, draft.data_ranks * draft.entry.loader.batch_size
    levels = {True: "trained_steps", False: "training"}[rl.use_rl_sigma_and_noise]
    draft.put(f"{JOB}.data_term.batch_size", batch, f"{RL}.data_beta", text="over all ranks")
    draft.put(f"{JOB}.data_term.levels", levels, f"{RL}.use_rl_sigma_and_noise", text="with noise of its own")
    draft.put(f"{JOB}.data_term.per_step", not rl.data_on_first_only, f"{RL}.data_on_first_only")
    if rl.data_on_first_only:
        text = "the older loss was a mean over the trained steps, with this in one of them"
        draft.put(f"{JOB}.data_term.beta", rl.data_beta / len(rl.train_on), f"{RL}.data_on_first_only", text=text)
    draft.put(f"{JOB}.data_term.local_dir", draft.entry.dataset_dir, f"{draft.entry_key}.dataset_dir")
    _choose_levels(draft)


def _choose_levels(draft: _Draft) -> None:
    """ln sigma of the older draw is normal, so its level in a flow is logit-normal."""
    model, mean = draft.config.model, draft.config.model.sde.p_mean
    if model.adjust_video_noise:
        mean += math.log(model.state_t) / 2.0
    draft.put("policy.diffusers.weighting_scheme", "logit_normal")
    draft.put("policy.diffusers.logit_mean", mean, "model.sde.p_mean", "model.adjust_video_noise")
    draft.put("policy.diffusers.logit_std", model.sde.p_std, "model.sde.p_std")
    draft.put(f"{JOB}.caption_dropout", model.text_dropout, "model.conditioner.text")


def _choose_rewards(draft: _Draft) -> None:
    rewards = draft.config.model.rl.reward_config
    remote, fake = rewards.remote_reward, f"{RL}.reward_config.fake_reward.enabled"
    clips = {"clip_min": remote.reward_clip_min, "clip_max": remote.reward_clip_max}
    functions = [{"name": remote.reward_fn, "weight": 1.0, "score_key": remote.score_key, **clips}]
    draft.put(f"{JOB}.remote_reward.reward_fns", functions, f"{REMOTE}.reward_fn", f"{REMOTE}.score_key")
    for name in ("token", "enqueue_url", "fetch_url"):
        if getattr(remote, name):
            draft.lose(f"{REMOTE}.{name}", f"set REMOTE_REWARD_{name.upper()} in the environment")
    if rewards.fake_reward.enabled and remote.enabled:
        draft.lose(fake, "0 for every sample changes nothing")
    elif rewards.fake_reward.enabled:
        draft.put(f"{JOB}.bypass_reward", True, fake)


def _choose_fine_tuning(draft: _Draft) -> None:
    model, entry = draft.config.model, draft.entry
    draft.put(f"{JOB}.type", "sft", f"{RL}.enabled")
    frames = [model.min_num_conditional_frames, model.max_num_conditional_frames]
    keys = ("model.min_num_conditional_frames", "model.max_num_conditional_frames")
    draft.put("policy.diffusers.conditional_frames", frames, *keys)
    batch = entry.loader.batch_size * draft.config.trainer.grad_accum_iter
    draft.put("train.train_batch_per_replica", batch, "trainer.grad_accum_iter", text="samples of a rank")
    workers = f"{draft.entry_key}.num_workers"
    draft.put(f"{JOB}.dataloader_num_workers", entry.loader.num_workers, workers)
    _choose_levels(draft)


def _explain_rest(draft: _Draft, given: frozenset[str]) -> None:
    """Notes for keys of the file that nothing was made of."""
    for key, (value, reason) in EXPECTED.items():
        if draft.value(key) != value:
            draft.lose(key, reason)
    known = {note.old for note in draft.notes}
    for key in sorted(given - known):
        draft.notes.append(Note(key, text=_explain_unread(key, rl=draft.config.model.rl.enabled)))


def _explain_unread(key: str, *, rl: bool) -> str:
    if key in EXPECTED:
        return "as here"
    if key.startswith(f"{RL}.") and not rl:
        return "read only in reinforcement learning"
    for reason, beginnings in IGNORED.items():
        if any(f"{key}.".startswith(f"{one}.") for one in beginnings.split()):
            return reason
    return "of no use here"


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys; items of a list of tables by their names, and not what is in those."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield from (f"{prefix}{key}.{item['name']}" for item in value)
        else:
            yield f"{prefix}{key}"
