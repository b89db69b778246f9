"""The validation sets of a job, each with the configuration of a run that has it alone. No torch."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.reward import RemoteRewardConfig
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.train_policy import GrpoPolicyConfig
from cosmos_rl.policy.config.validation import ValidationSetConfig

_TAKEN = ("reward", "rewards")
"""Labels that are parts of the names of metrics."""


@dataclass(frozen=True)
class ValidationSet:
    """A validation set and how it is judged."""

    config: Config
    """Of a run with this set alone as `[validation.dataset]`, with its sampling and its rewards."""
    key: str = "validation"
    """Dotted name of its table."""
    label: str = ""
    """Its part in the names of metrics; empty: it is the only one, from `[validation.dataset]`."""
    rewards: tuple[str, ...] = ()
    """Names of those that score it; empty: all."""
    size: Sides | None = None
    """Height and width of its samples, where they are not the configured ones."""
    freq: int | None = None
    """Steps between two validations on it; None: it has part in each."""

    def is_due(self, done: int, total: int) -> bool:
        """Whether it is validated after ``done`` of ``total`` steps, at which there is a validation."""
        return self.freq is None or done % self.freq == 0 or done == total

    def locate(self, message: str) -> str:
        """A message about `[validation]`, or about `rewards`, as one about this set's table."""
        message = re.sub(r"^(?=rewards: found)", f"{self.key}.", message)
        return re.sub(r"\bvalidation\.(?=dataset|remote_reward|local_reward)", f"{self.key}.", message)

    def rename(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics ``val/…`` by the names that they have for this set: ``val/<label>/…``."""
        if not self.label:
            return metrics
        return {key.replace("val/", f"val/{self.label}/", 1): value for key, value in metrics.items()}


def list_validation_sets(config: Config) -> list[ValidationSet]:
    """All of `[[validation.sets]]`, else the one of `[validation.dataset]`; none where nothing is validated."""
    if not config.validation.enable:
        return []
    if not config.validation.sets:
        return [ValidationSet(config)]
    return [_build_set(config, one, number) for number, one in enumerate(config.validation.sets)]


def _build_set(config: Config, one: ValidationSetConfig, number: int) -> ValidationSet:
    validation, diffusers = config.validation, config.policy.diffusers
    own: dict[str, Any] = {name: getattr(one, name) for name in ("freq", "n_generation", "remote_reward")}
    own = {"sets": (), "dataset": one.dataset, "local_reward": one.local_reward, **own}
    sample = _replace(diffusers.sample, eval_num_steps=one.num_steps, guidance_scale=one.guidance_scale)
    diffusers = _replace(diffusers, sample=sample, inference_size=one.size)
    alone = _replace(
        config, validation=_replace(validation, **own), policy=_replace(config.policy, diffusers=diffusers)
    )
    size = one.size if one.size != config.policy.diffusers.inference_size else None
    return ValidationSet(alone, f"validation.sets.{number}", label_of(one, number), one.rewards or (), size, one.freq)


def _replace(table: Any, **changes: Any) -> Any:
    """The same table with the changes that are not None."""
    return table.model_copy(update={name: value for name, value in changes.items() if value is not None})


def label_of(one: ValidationSetConfig, number: int) -> str:
    """The label of the ``number``-th set."""
    found = one.name or one.dataset.name or PurePath(one.dataset.local_dir).stem
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", found) or f"set{number}"


def validation_rules(config: Config) -> Iterator[str]:
    """What is wrong with the validation sets, one line each."""
    validation = config.validation
    tables = {"validation": validation.dataset}
    tables |= {f"validation.sets.{i}": one.dataset for i, one in enumerate(validation.sets)}
    for key, dataset in tables.items():
        if dataset.spread and dataset.limit is None:
            yield f"{key}.dataset.spread: found true; allowed only with limit, of how many prompts to take"
    if not validation.sets:
        return
    if validation.dataset.local_dir or validation.dataset.name:
        yield "validation.dataset: given together with validation.sets; allowed: one of them"
    if not job_kind(config).online and config.train.train_policy.dataset.test_size is not None:
        yield (
            "train.train_policy.dataset.test_size: given together with validation.sets; allowed: one of them, as both "
            "say on what the run is validated"
        )
    labels = Counter(label_of(one, number) for number, one in enumerate(validation.sets))
    for number, one in enumerate(validation.sets):
        yield from _set_rules(config, one, number, labels)


def _set_rules(config: Config, one: ValidationSetConfig, number: int, labels: Counter[str]) -> Iterator[str]:
    key, label, sizes = f"validation.sets.{number}", label_of(one, number), config.policy.diffusers.training_sizes
    if labels[label] > 1:
        yield f'{key}.name: found "{label}" for {labels[label]} sets; allowed: another name for each'
    if not job_kind(config).online:
        own = [name for name in ("rewards", "remote_reward", "local_reward") if getattr(one, name)]
        yield from (f"{key}.{name}: given; allowed only in reinforcement learning, which has rewards" for name in own)
    if label in _TAKEN:
        yield f'{key}.name: found "{label}", which is a part of the names of metrics; allowed: another name'
    if one.freq is not None and one.freq % config.validation.freq:
        yield (
            f"{key}.freq: found {one.freq}; allowed: a multiple of validation.freq = {config.validation.freq}, the "
            "steps at which there is a validation"
        )
    if one.size is not None and one.size not in (config.policy.diffusers.inference_size, *sizes):
        listed = ", ".join(str(list(size)) for size in sizes)
        yield (
            f"{key}.size: found {list(one.size)}; allowed: {listed}; the model is made ready for the sizes of "
            "policy.diffusers.inference_size and policy.diffusers.buckets"
        )


def bypass_notes(config: Config) -> Iterator[str]:
    """The rewards that sets name although the run asks for none."""
    job = config.train.train_policy
    if not isinstance(job, GrpoPolicyConfig) or not job.bypass_reward:
        return
    tables = {"train.train_policy.dataset": job.dataset.sets, "validation": config.validation.sets}
    named = [f"{key}.sets.{i}.rewards" for key, sets in tables.items() for i, one in enumerate(sets) if one.rewards]
    if named:
        yield f"They act only without train.train_policy.bypass_reward = true, which asks nobody: {', '.join(named)}"


def requested_table(config: Config) -> RemoteRewardConfig | None:
    """What validation asks of the reward service; None: nothing."""
    job = online_table(config)
    return config.validation.remote_reward or (job.remote_reward if job.use_remote_reward else None)


def asks_service(config: Config, *, validation: bool, names: Sequence[str] = ()) -> bool:
    """Whether an online job, or validation in it, asks the reward service for a score: any of ``names``, if given."""
    job = online_table(config)
    table = job.remote_reward if job.use_remote_reward else None
    if validation:
        table = requested_table(config)
    if job.bypass_reward or table is None or not table.scale:
        return False
    return any(name and (not names or name in names) for name in table.shown_names)


def unknown_rewards(config: Config) -> Iterator[str]:
    """Names of rewards in the sets of a job without functions of a script that the configuration does not have."""
    job = online_table(config)
    if job.bypass_reward:
        return
    for one in list_validation_sets(config):
        validation = one.config.validation
        local = (validation.local_reward or job.local_reward).reward_fns
        known = {entry.shown_name for entry in local}
        remote = requested_table(one.config)
        known |= {name for name in remote.shown_names if name} if remote is not None and remote.scale else set()
        allowed = ", ".join(sorted(known)) or "none, as there is none"
        yield from (
            f'{one.key}.rewards: found "{name}"; allowed: {allowed}' for name in one.rewards if name not in known
        )
