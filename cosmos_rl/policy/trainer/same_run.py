"""What a resumed run must have in common with its checkpoint, and what may differ but is worth a line."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cosmos_rl.data.pair_files import digest_pairs, scan_pairs
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.base import Support
from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.keys import list_keys
from cosmos_rl.policy.config.optimizers import short_name
from cosmos_rl.policy.config.plan import number_teachers
from cosmos_rl.policy.config.problems import format_value
from cosmos_rl.policy.model.digest import pipeline_digest, policy_digest
from cosmos_rl.utils.logging import logger, warn_of_all

_ADAPTER = ("r", "lora_alpha", "use_rslora", "alpha_pattern", "r_pattern", "target_modules")
"""Of ``policy.lora``: the strength and place of an adapter, which its weights do not hold."""
_ELSEWHERE = frozenset(
    {
        "custom",
        "policy.model_name_or_path",
        "policy.model_revision",
        "policy.lora.lora_path",
        "policy.model_gradient_checkpointing",
        "policy.diffusers.offload",
        "rollout.n_generation_mini_batch",
        "train.output_dir",
        "train.timestamp",
        "train.resume",
        "train.device",
        "train.activation_offload",
        "train.base_offload",
        "train.epoch",
        "train.max_num_steps",
        "train.max_nonfinite_steps",
        "train.train_batch_per_replica",
        "train.global_batch_size",
        "train.train_policy.enable_dataset_cache",
        "train.train_policy.steps.max_gb",
        "train.train_policy.dataloader_num_workers",
        "train.train_policy.dataloader_prefetch_factor",
        "train.train_policy.max_skipped_frac",
        "train.train_policy.mini_batch",
    }
)
_ELSEWHERE_TABLES = (
    "logging.",
    "profiler.",
    "validation.",
    "policy.parallelism.",
    "rollout.parallelism",
    "train.ckpt.",
    "train.train_policy.cache.",
)
"""Keys that change no draw and no weight, or are compared by what they lead to: digests of data and model."""


def collect_fixed_settings(config: Config, context: Context, task: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a resumed run must have in common with its checkpoint: the task's own, base model, optimiser,
    adapter, data and teachers."""
    model = None
    if context.is_main:
        model = pipeline_digest(config.policy.model_name_or_path, config.policy.model_revision)
    found = {**task, "base model (digest of its files)": context.broadcast_from_main(model or "") or None}
    found["train.optm_name"] = short_name(config.train.optm_name)  # by either of its names a class is the same
    lora, kind = config.policy.lora, job_kind(config)
    if lora is not None:
        found |= {f"policy.lora.{name}": getattr(lora, name) for name in _ADAPTER}
        if lora.target_modules != "all-linear":
            found["policy.lora.target_modules"] = sorted(set(lora.target_modules))  # their order means nothing
    if kind.online and online_table(config).data_term.beta > 0:
        folder = Path(online_table(config).data_term.local_dir).expanduser()
        pairs = ""
        if context.is_main:
            pairs = digest_pairs(scan_pairs(folder, video=config.policy.diffusers.is_video)[0])
        found["train.train_policy.data_term (digest of names and captions)"] = context.broadcast_from_main(pairs)
    if kind.online:
        found |= _digest_teachers(config, context)
    return _to_json_values(found)


def _digest_teachers(config: Config, context: Context) -> dict[str, str | None]:
    """The teacher of all prompts, or where sets have their own that of each; None: its files are not here."""
    job = online_table(config)
    places = {"all prompts": job.teacher}
    if number_teachers(job):
        places = {f"prompt set {one.shown_name}": one.teacher or job.teacher for one in job.dataset.sets}
    digests = "{}"
    if context.is_main:
        digests = json.dumps(
            {label: policy_digest(place) if place else "the model at the start" for label, place in places.items()}
        )
    found = json.loads(context.broadcast_from_main(digests))
    return {f"the teacher of {label} (digest of its files)": digest for label, digest in found.items()}


def collect_settings(config: Config, total_steps: int) -> dict[str, Any]:
    """Values of the configuration that a run may change on its way and that change what is learnt."""
    kept = {key.path: key.value for key in list_keys(config) if key.kind is not Support.NO_EFFECT}
    found = {path: value for path, value in kept.items() if _counts(path)}
    train = config.train
    if train.optm_decay_type not in (None, "none") or isinstance(train.optm_warmup_steps, float):
        found["steps of the learning rate's schedule"] = total_steps
    if isinstance(train.optm_warmup_steps, int):
        found["steps of the warm-up"] = min(train.optm_warmup_steps, total_steps)
    return _to_json_values(found)


def compare(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `UserError` where a resumed run would silently learn something else than its checkpoint did."""
    unknown = [name for name in now if name not in saved]
    for name, value in now.items():
        before = saved.get(name)
        if name in saved and before != value and None not in (before, value):
            raise UserError(
                f"{checkpoint} was saved with {name} = {before!r}, this run has {value!r}: data, noise or the policy "
                "would not continue where they stopped. Use the old value, or start a new run."
            )
    if unknown:
        logger.info(f"not compared, since an older version has saved {checkpoint}: {', '.join(unknown)}")


def log_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """One line with all values that are not those of the checkpoint."""
    changed = [line for name, value in now.items() if name in saved for line in _differences(name, saved[name], value)]
    if changed:
        warn_of_all(f"Changed since the checkpoint: {'; '.join(changed)}")


def _differences(name: str, before: object, now: object) -> Iterator[str]:
    """What differs, each with its dotted name; of tables and lists of tables only the keys that do."""
    if before == now:
        return
    old, new = _parts(before), _parts(now)
    if old is None or new is None or old.keys() != new.keys():
        yield f"{name} {format_value(before)} -> {format_value(now)}"
        return
    for key in new:
        yield from _differences(f"{name}.{key}", old[key], new[key])


def _parts(value: object) -> Mapping[Any, object] | None:
    """Of a table or a list of tables what it holds, by key or number; of anything else None."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        return dict(enumerate(value))
    return None


def _counts(path: str) -> bool:
    if path in _ELSEWHERE or path.startswith(_ELSEWHERE_TABLES) or path.endswith((".local_dir", ".rejected_dir")):
        return False
    return path.removeprefix("policy.lora.") not in _ADAPTER


def _to_json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from a file: tuples are lists there, tables are dictionaries."""
    return json.loads(json.dumps(values, default=lambda value: value.model_dump(mode="json")))
