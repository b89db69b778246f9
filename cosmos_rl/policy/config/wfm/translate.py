"""From the older configuration to the present one. Pure: no files, no environment."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.base import Table
from cosmos_rl.policy.config.problems import format_value
from cosmos_rl.policy.config.wfm import RLConfig
from cosmos_rl.policy.config.wfm.notes import Note, Translation
from cosmos_rl.policy.config.wfm.rules import EXPECTED, FOR_ALL, FOR_RL, IGNORED, JOB, RANKS, REMOTE, RL, SAMPLE, Rule

_PUBLISHED = {(2048, 28, 16): "nvidia/Cosmos-Predict2.5-2B", (5120, 36, 40): "nvidia/Cosmos-Predict2.5-14B"}
"""Channels, blocks and heads of the transformer -> repository on the hub."""
_REVISION = "diffusers/base/post-trained"
_SIZES = {"480": [432, 768], "480p": [480, 832], "720": [704, 1280], "720p": [720, 1280]}
"""`model.resolution` -> height and width of videos of 16:9."""
_SMALLEST = {"job": {"name": ""}, "dataloader_train": {"video_dataloader": {}}}


def translate(
    config: Table, tree: Mapping[str, Any], unknown: Sequence[str] = (), *, output_root: str = "./outputs"
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
    if draft.rl.enabled:
        draft.apply(FOR_RL)
        _choose_steps(draft)
        _choose_frames(draft, RL)
        _choose_loss(draft)
        _choose_rewards(draft)
    else:
        _choose_fine_tuning(draft)
    given = frozenset([*_leaves(tree), *unknown])
    draft.notes += [Note(key, text="unknown", lost=True) for key in unknown]
    _explain_rest(draft, given)
    return Translation(draft.tables, tuple(draft.notes), given)


class _Draft:
    """The tables so far, with a note for each key that they came from.

    A key of the older form is a dotted name, with the `name` of an item of a list of tables. `entry` stands for the
    data that is read (videos, or images where no videos are), `loader` for the table of its batch size.
    """

    def __init__(self, config: Any) -> None:
        self.config, self.defaults = config, type(config).model_validate(_SMALLEST)
        self.tables: dict[str, Any] = {}
        self.notes: list[Note] = []
        data = config.dataloader_train
        entries = {"video_dataloader": data.video_dataloader, "image_dataloader": data.image_dataloader}
        name = next((name for name, entry in entries.items() if entry is not None and entry.ratio > 0), None)
        if name is None:
            name, default = "video_dataloader", self.defaults.dataloader_train.video_dataloader
            self.config = config.model_copy(update={"dataloader_train": data.model_copy(update={name: default})})
        self.places = {"entry": f"dataloader_train.{name}", "loader": f"dataloader_train.{name}"}
        if self.read("entry.dataloader") is not None:
            self.places["loader"] += ".dataloader"

    def put(self, new: str, value: object, *old: str, text: str = "") -> None:
        """Set a key of the present form, because of keys of the older one."""
        *path, leaf = new.split(".")
        table: dict[str, Any] = reduce(lambda table, name: table.setdefault(name, {}), path, self.tables)
        table[leaf] = value
        self.notes += [Note(self.full(key), new, text, value) for key in old]

    def apply(self, rules: Iterable[Rule]) -> None:
        """Set what depends on one key alone."""
        for rule in rules:
            self.put(rule.new, rule.change(self.read(rule.old)), rule.old, text=rule.text)

    def lose(self, old: str, text: str) -> None:
        """Note an effect that has no counterpart."""
        self.notes.append(Note(self.full(old), text=text, lost=True))

    def read(self, key: str) -> Any:
        """The value of a key of the older form."""
        return reduce(_descend, self.full(key).split("."), self.config)

    def full(self, key: str) -> str:
        """The dotted name with the place of the data."""
        first, dot, rest = key.partition(".")
        return self.places.get(first, first) + dot + rest

    @property
    def rl(self) -> RLConfig:
        """`[model.rl]`."""
        return self.config.model.rl

    @property
    def data_ranks(self) -> int:
        """Ranks with samples of their own."""
        model = self.config.model
        return model.fsdp_shard_size * model.dp_replicate_size * max(self.config.model_parallel.data_parallel_size, 1)


def _descend(table: Any, name: str) -> Any:
    if isinstance(table, tuple):
        return next((item for item in table if item.name == name), None)
    return getattr(table, name)


def _choose_model(draft: _Draft) -> None:
    draft.put("policy.is_diffusers", True)
    draft.put("policy.diffusers.is_video", True)
    draft.put("policy.diffusers.dtype", draft.read("model.precision"))
    draft.put("policy.diffusers.max_prompt_length", 512)
    old = ["model.net.model_channels", "model.net.num_blocks", "model.net.num_heads"]
    name, start = _PUBLISHED.get(tuple(map(draft.read, old))), draft.read("checkpoint.load_path")
    if draft.read("checkpoint.model_id") or _is_repository(start):
        name, old = start, ["checkpoint.load_path"]
    if name is None:
        draft.lose(old[0], "no published model has this size; set policy.model_name_or_path")
        return
    draft.put("policy.model_name_or_path", name, *old)
    if name in _PUBLISHED.values():
        draft.put("policy.model_revision", _REVISION)
    for key in ("checkpoint.model_id", "checkpoint.load_path"):
        file = draft.read(key) or ""
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
    draft.put(f"{RANKS}.cp_size", draft.read(key), key)
    replicas = draft.data_ranks // model.fsdp_shard_size
    draft.put(f"{RANKS}.dp_replicate_size", replicas, "model.dp_replicate_size", "model_parallel.data_parallel_size")


def _choose_size(draft: _Draft) -> None:
    """Height, width and frames."""
    model, own_size, own_frames = draft.config.model, draft.read("entry.video_size"), draft.read("entry.num_frames")
    size, key, text = _SIZES.get(model.resolution), "model.resolution", "of videos of 16:9"
    if own_size is not None:
        size, key, text = list(own_size), "entry.video_size", "read as [height, width]"
    if size is None:
        draft.lose(key, "set policy.diffusers.inference_size")
    else:
        draft.put("policy.diffusers.inference_size", size, key, text=text)
    frames, key = (model.state_t - 1) * 4 + 1, "model.state_t"
    if not model.resize_online and own_frames is not None:
        frames, key = own_frames, "entry.num_frames"
    draft.put("policy.diffusers.train_frames", frames, key)
    draft.put("policy.diffusers.inference_frames", frames, key)


def _choose_optimizer(draft: _Draft) -> None:
    """The factor of the loss acts only through the clip of gradients and epsilon."""
    config, schedule, clip = draft.config, draft.config.scheduler, draft.read("trainer.callbacks.grad_clip")
    scale, peak, norm = config.model.loss_scale, schedule.f_max[0], 0.0
    if clip is not None:
        norm = _read_number(clip, "clip_norm", 1.0) / scale
    draft.put("train.optm_lr", config.optimizer.lr * peak, "optimizer.lr", "scheduler.f_max")
    draft.put("train.epsilon", config.optimizer.eps / scale, "optimizer.eps", "model.loss_scale")
    draft.put("train.optm_grad_norm_clip", norm, "trainer.callbacks.grad_clip", "model.loss_scale")
    draft.put("train.optm_warmup_steps", schedule.warm_up_steps[0], "scheduler.warm_up_steps")
    draft.put("train.optm_warmup_start_factor", min(schedule.f_start[0] / peak, 1.0), "scheduler.f_start")


def _read_number(callback: Any, name: str, default: float) -> float:
    """An argument of a callback."""
    value = callback.args.get(name, default)
    if isinstance(value, int | float):
        return value
    raise UserError(f"trainer.callbacks: {name}: found {format_value(value)}; allowed: a number")


def _choose_decay(draft: _Draft) -> None:
    """Where the first cycle is at the end of the run."""
    schedule, steps = draft.config.scheduler, draft.config.trainer.max_iter
    keys = ("scheduler.scheduler_type", "scheduler.f_min", "scheduler.cycle_lengths")
    warm_up, cycle, peak = schedule.warm_up_steps[0], schedule.cycle_lengths[0], schedule.f_max[0]
    if cycle < steps:
        draft.lose("scheduler.cycle_lengths", "the learning rate falls once, over the whole run")
    kind, share = "linear", min(max(steps - warm_up, 0) / max(cycle - warm_up, 1), 1.0)
    if "cos" in schedule.scheduler_type:
        kind, share = "cosine", (1.0 - math.cos(math.pi * share)) / 2.0
    lowest = 1.0 + (schedule.f_min[0] / peak - 1.0) * share
    if lowest == 1.0:
        draft.put("train.optm_decay_type", "none", *keys, text="constant after the warm-up")
        return
    draft.put("train.optm_decay_type", kind, *keys)
    draft.put("train.optm_min_lr_factor", lowest, "scheduler.f_min")


def _choose_run(draft: _Draft, root: str) -> None:
    names, start = ("job.project", "job.group", "job.name"), draft.read("job.timestamp")
    draft.put("train.output_dir", "/".join([root.rstrip("/"), *map(draft.read, names)]), *names)
    draft.put("train.epoch", draft.read("trainer.max_iter"))  # the data is repeated until train.max_num_steps
    draft.put("train.ckpt.max_keep", -1)
    draft.put("train.ckpt.export_safetensors", False)
    if start:
        draft.put("train.timestamp", start, "job.timestamp")
        draft.put("train.resume", True, "job.timestamp", text="a run of a fixed name was continued by itself")


def _choose_logging(draft: _Draft) -> None:
    places = ["console"]
    if draft.read("trainer.callbacks.wandb") is not None and draft.read("job.wandb_mode") != "disabled":
        places.append("wandb")
    draft.put("logging.logger", places, "trainer.callbacks.wandb", "job.wandb_mode")
    for key in ("trainer.callbacks.every_n_sample_reg", "trainer.callbacks.every_n_sample_ema"):
        callback = draft.read(key)
        if callback is None:
            continue
        every, steps = _read_number(callback, "every_n", 100), _read_number(callback, "num_sampling_step", 35)
        draft.put("logging.multi_modal_log_interval", int(every), key)
        draft.put(f"{SAMPLE}.eval_num_steps", int(steps) + 1, key)
        if callback.args.get("guidance"):
            draft.lose(key, "validation has the guidance of the rollouts")


def _choose_data(draft: _Draft) -> None:
    web, loader, place = draft.read("entry.dataloader"), draft.read("loader"), _find_data(draft)
    if web is not None and web.dataset.len_t5 is not None:
        draft.put(f"{JOB}.dataset.name", "mock", "entry.dataloader.dataset.len_t5")
    elif place is None:
        text = (
            "S3 is not supported yet; set train.train_policy.dataset.local_dir to tars or a wdinfo file on local disk"
        )
        draft.lose("dataloader_train.type", text)
    else:
        draft.put(f"{JOB}.dataset.local_dir", draft.read(place), place)
    if draft.full("entry").endswith("image_dataloader"):
        draft.lose("entry.ratio", "only videos are trained on")
    if draft.read("entry.offline_text_embedding"):
        text = "the pipeline's encoders encode each caption once"
        draft.put(f"{JOB}.cache.text", True, "entry.offline_text_embedding", text=text)
    draft.put(f"{JOB}.mini_batch", loader.batch_size, "loader.batch_size")


def _find_data(draft: _Draft) -> str | None:
    """The key that names the files; None: they are in an object store, under a name that the older code knew."""
    if draft.read("dataloader_train.type") == "local":
        return "entry.dataset_dir"
    web = draft.read("entry.dataloader")
    if web is None or web.dataset.object_store:
        return None
    name = web.dataset.dataset_name or ""
    return "entry.dataloader.dataset.dataset_name" if "/" in name or name.endswith((".json", ".tar")) else None


def _choose_frames(draft: _Draft, table: str) -> None:
    """How many frames are given."""
    keys = (f"{table}.min_num_conditional_frames", f"{table}.max_num_conditional_frames")
    draft.put("policy.diffusers.conditional_frames", [draft.read(key) for key in keys], *keys)


def _choose_steps(draft: _Draft) -> None:
    """Which steps are trained: in order, without those that have no noise."""
    rl, text = draft.rl, ""
    steps = sorted({index for index in rl.train_on if index >= 0})
    kept = [index for index in steps if index < rl.sample_steps - 1] + [-1] * rl.train_on.count(-1)
    if dropped := sorted(set(steps) - set(kept)):
        text = f"without {dropped}, which have no noise"
    draft.put(f"{JOB}.steps.choose", "list")
    draft.put(f"{JOB}.steps.indices", kept, f"{RL}.train_on", text=text)
    draft.put(f"{SAMPLE}.deterministic_sampling", False)
    if rl.s_t_max < math.inf:
        draft.put(f"{SAMPLE}.noise_below", rl.s_t_max, f"{RL}.s_t_max")


def _choose_loss(draft: _Draft) -> None:
    rl, trainer = draft.rl, "flow_grpo"
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
    if rl.guidance > 0 and _text_dropout(draft) <= 1e-4:
        draft.lose(f"{RL}.guidance", "it acts here; without dropout of the text it did not in the older trainer")
    if rl.update_ref_every_iter > 0 and rl.kl_beta > 0:
        draft.put(f"{JOB}.reference_reset_interval", rl.update_ref_every_iter, f"{RL}.update_ref_every_iter")
    batch = draft.data_ranks * draft.read("loader.batch_size")
    if rl.data_beta > 0:
        _choose_data_term(draft, batch)
    total = batch * draft.read("trainer.grad_accum_iter")
    text = f"samples over all ranks, of {total / rl.num_rollout:g} prompts"
    draft.put("train.train_batch_per_replica", total, "trainer.grad_accum_iter", text=text)


def _choose_data_term(draft: _Draft, batch: int) -> None:
    rl = draft.rl
    levels, noise = ("trained_steps", "rollout") if rl.use_rl_sigma_and_noise else ("training", "fresh")
    draft.put(f"{JOB}.data_term.batch_size", batch, f"{RL}.data_beta", text="over all ranks")
    key = f"{RL}.use_rl_sigma_and_noise"
    draft.put(f"{JOB}.data_term.levels", levels, key)
    draft.put(f"{JOB}.data_term.noise", noise, key)
    draft.put(f"{JOB}.data_term.per_step", not rl.data_on_first_only, f"{RL}.data_on_first_only")
    if rl.data_on_first_only:
        text = "the older loss was a mean over the trained steps, with this in one of them"
        draft.put(f"{JOB}.data_term.beta", rl.data_beta / len(rl.train_on), f"{RL}.data_on_first_only", text=text)
    place = _find_data(draft) or "entry.dataset_dir"
    draft.put(f"{JOB}.data_term.local_dir", draft.read(place), place)
    _choose_levels(draft)


def _choose_levels(draft: _Draft) -> None:
    """ln sigma of the older draw is normal, so its level in a flow is logit-normal."""
    model, mean = draft.config.model, draft.config.model.sde.p_mean
    if model.adjust_video_noise:
        mean += math.log(model.state_t) / 2.0
    draft.put("policy.diffusers.weighting_scheme", "logit_normal")
    draft.put("policy.diffusers.logit_mean", mean, "model.sde.p_mean", "model.adjust_video_noise")
    draft.put("policy.diffusers.logit_std", model.sde.p_std, "model.sde.p_std")
    draft.put(f"{JOB}.caption_dropout", _text_dropout(draft), "model.conditioner.text")


def _text_dropout(draft: _Draft) -> float:
    """Share of samples that are trained without their text."""
    text = draft.read("model.conditioner.text")
    if text is None:
        return 0.0
    return text.dropout_rate


def _choose_rewards(draft: _Draft) -> None:
    rewards = draft.rl.reward_config
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
    draft.put(f"{JOB}.type", "sft", f"{RL}.enabled")
    _choose_frames(draft, "model")
    batch = draft.read("loader.batch_size") * draft.read("trainer.grad_accum_iter")
    draft.put("train.train_batch_per_replica", batch, "trainer.grad_accum_iter", text="samples of a rank")
    draft.put(f"{JOB}.dataloader_num_workers", draft.read("loader.num_workers"), "entry.num_workers")
    _choose_levels(draft)


def _explain_rest(draft: _Draft, given: frozenset[str]) -> None:
    """Notes for keys of the file that nothing was made of."""
    for reason, keys in EXPECTED.items():
        for key in keys.split():
            if draft.read(key) != reduce(getattr, key.split("."), draft.defaults):
                draft.lose(key, reason)
    known = {note.old for note in draft.notes}
    draft.notes += [Note(key, text=_explain_unread(key, rl=draft.rl.enabled)) for key in sorted(given - known)]


def _explain_unread(key: str, *, rl: bool) -> str:
    if any(key in keys.split() for keys in EXPECTED.values()):
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
        elif isinstance(value, list) and all(isinstance(item, Mapping) and "name" in item for item in value) and value:
            yield from (f"{prefix}{key}.{item['name']}" for item in value)
        else:
            yield f"{prefix}{key}"
