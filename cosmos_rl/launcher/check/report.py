"""Everything that can be said about a configuration without loading its model. No torch."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cosmos_rl.launcher import machine
from cosmos_rl.launcher.acceptance.accept import ModelFiles, find_problems, read_model, unsupported_parts
from cosmos_rl.launcher.acceptance.length import RunLength, run_length
from cosmos_rl.launcher.acceptance.optimizer import missing_optimizer
from cosmos_rl.launcher.acceptance.selection import parameters
from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.check.advice import peak_lines
from cosmos_rl.launcher.check.batch_lines import batch_lines
from cosmos_rl.launcher.check.rl_lines import guard_lines, reward_lines
from cosmos_rl.launcher.check.sizes import UNKNOWN, DiskUse, memory_lines
from cosmos_rl.launcher.geometry import find_geometry, frames_of, text_tokens
from cosmos_rl.launcher.machine import format_bytes, format_count
from cosmos_rl.launcher.pipeline_files import PipelineFiles, Unknown, served_classes
from cosmos_rl.launcher.pipeline_source import in_diffusers, supports_recomputing
from cosmos_rl.launcher.prompt_lists import prompt_lines
from cosmos_rl.launcher.shared_data import shared_notes
from cosmos_rl.policy.config import Config, notes, world_size
from cosmos_rl.policy.config.jobs import DataForm, job_kind
from cosmos_rl.policy.config.keys import list_keys
from cosmos_rl.policy.config.model_rules import recompute_remark
from cosmos_rl.policy.config.problems import format_value
from cosmos_rl.policy.config.ranks import describe_parallelism
from cosmos_rl.storage.run_folder import list_runs
from cosmos_rl.tracking.metrics import read_metrics

_RECENT_STEPS = 50
_SHOWN_TARGETS = 12


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    title: str
    lines: Sequence[str]


class Report:
    """What a configuration would train, on how much memory and disk."""

    def __init__(
        self, config: Config, data: DataForm | None, *, own_script: bool, on_cpu: bool, nodes: int = 1
    ) -> None:
        """`data` and `own_script`: as in `accept`. `nodes`: how many share the ranks."""
        self.config, self.own_script = config, own_script
        self.data: DataForm | None = data
        self.on_cpu, self.nodes = on_cpu, nodes
        self.kind = job_kind(config)
        self.length: RunLength = run_length(config, own_data=data is None)
        self.model: ModelFiles | None = None
        self.memory: estimate.Memory | None = None
        self.disk: DiskUse | None = None
        self.why_unknown = ""
        try:
            self.model = read_model(config)
            self.memory = estimate.memory(config, self.model, on_cpu=on_cpu, saves=self.length.saves)
            self.disk = DiskUse.of_run(config, self.model, self.length.saves)
        except Unknown as why:
            self.why_unknown = str(why)

    def sections(self) -> list[Section]:
        """The report, part by part."""
        config, device, transformer = self.config, "a GPU", None
        if self.on_cpu:
            device = "a CPU"
        if self.model is not None:
            transformer = self.model.pipeline.configs["transformer"]
        changed = [key for key in list_keys(config) if key.value != key.default]
        return [
            Section("Trained", self._describe_trained()),
            Section("Ranks", [*self._ranks()]),
            Section("Batch and steps", batch_lines(config, self.length, transformer)),
            Section("Prompts", [] if self.data is None else prompt_lines(config)),
            *self._online_sections(),
            Section(f"Memory per rank, estimated for {device}", [*self._memory()]),
            Section("Disk", self._disk()),
            Section("Time per step", [_time_per_step(Path(config.train.output_dir))]),
            Section(
                "Values that differ from the defaults", [f"{k.path} = {format_value(_plain(k.value))}" for k in changed]
            ),
            Section("Not supported yet", unsupported_parts(config, own_script=self.own_script)),
            Section("Notes", [*notes(config), *self._shared(), *self._recomputing(), *missing_optimizer(config)]),
        ]

    def problems(self) -> list[str]:
        """What a launch would refuse, by the files of model and data."""
        return list(find_problems(self.config, self.data, self.model, self.length, own_script=self.own_script))

    def environment(self) -> list[str]:
        """Devices, memory and disk of this machine."""
        lines = [f"GPU: {line}" for line in machine.gpu_lines()] or ["GPU: none"]
        lines += [f"cores: {machine.cores()}", *self._room()]
        lines.append(f"free disk for train.output_dir: {format_bytes(_free_disk(self.config))}")
        if self.disk is not None:
            lines += self.disk.warnings()
        return lines

    # ---- parts -------------------------------------------------------------------------------------------------

    def _describe_trained(self) -> list[str]:
        policy = self.config.policy
        what = "the whole transformer"
        if policy.lora is not None:
            what = f'LoRA adapter "{policy.lora.active_adapter}"'
        if any((policy.freeze_pattern, policy.trainable_pattern, policy.trainable_map)):
            what = "the part of the transformer that the patterns choose"
        lines = [f"{what} of {policy.model_name_or_path}"]
        if self.model is None:
            return [*lines, f"sizes: unknown ({self.why_unknown})"]
        return [*lines, *self._counts(self.model)]

    def _counts(self, model: ModelFiles) -> Iterator[str]:
        """Weights, and the layers that adapters find."""
        pipeline, selection = model.pipeline, model.selection
        whole, trained = parameters(pipeline.denoisers()), selection.trained
        yield f"{pipeline.class_name}, {' and '.join(pipeline.experts)} of {whole:,} weights"
        yield ", ".join(f"{name} {pipeline.count(name):,}" for name in pipeline.others) + " weights"
        yield from self._sample(pipeline)
        yield f"{trained:,} trained weights, {100 * trained / max(whole, 1):.3g} % of that"
        if selection.spare_adapters and self.kind.online:
            yield f"{selection.spare_adapters:,} weights of the old policy's adapter"
        elif selection.spare_adapters:
            yield f"{selection.spare_adapters:,} weights of adapters that are not trained"
        for name, count in list(selection.targets.items())[:_SHOWN_TARGETS]:
            yield f"{name}: {count} layers"
        if pipeline.class_name not in served_classes() and not in_diffusers(pipeline.class_name):
            yield f"no model is registered for {pipeline.class_name}; your script has to register one"

    def _sample(self, pipeline: PipelineFiles) -> Iterator[str]:
        """What the transformer sees of one sample."""
        media = (*self.config.policy.diffusers.largest_size, frames_of(self.config))
        try:
            geometry = find_geometry(pipeline)
        except Unknown as why:
            yield f"latents and tokens: unknown ({why})"
            return
        latents, count = geometry.latent_shape(*media), geometry.tokens(*media)
        text = text_tokens(self.config, pipeline)
        what = "a sample"
        if self.config.policy.diffusers.buckets is not None:
            what = "a sample of {} x {} pixels, the largest".format(*media)
        own, peers = "", self.config.policy.parallelism.cp_size
        if peers > 1:
            own = f" ({math.ceil(count / peers):,} at most on each of {peers} ranks)"
        shape = " x ".join(map(str, latents))
        yield f"{what}: latents {shape}, {count:,} tokens{own}, and at most {text:,} of its prompt"

    def _ranks(self) -> Iterator[str]:
        parallelism = self.config.policy.parallelism
        ranks = world_size(parallelism)
        if ranks > 1:
            yield f"{format_count(ranks, 'rank')}: {describe_parallelism(parallelism)}"
        else:
            yield "1 rank, not sharded"
        if self.nodes > 1:
            yield f"{ranks / self.nodes:g} on each of {self.nodes} nodes"
        gpus = machine.gpus()
        if ranks > 1 and not self.on_cpu and gpus < ranks / self.nodes:
            if gpus:
                yield f"this machine has {format_count(gpus, 'GPU')}: a launch here takes --nproc-per-node {gpus}"
            else:
                yield "this machine has no GPU: a launch here takes 1 rank on the CPU"
        if self.on_cpu and self.config.train.device == "auto":
            yield "no GPU here, so it runs on the CPU; --train.device=cuda estimates for a GPU"

    def _online_sections(self) -> list[Section]:
        if not self.kind.online:
            return []
        rewards = reward_lines(self.config, own_script=self.own_script)
        return [Section("Rewards", rewards), Section("Guard", guard_lines(self.config))]

    def _memory(self) -> Iterator[str]:
        yield from memory_lines(self.memory, on_cpu=self.on_cpu)
        if self.memory is not None and not self.on_cpu:
            yield from peak_lines(self.config, self.memory, machine.gpu_memory())

    def _shared(self) -> list[str]:
        return [] if self.data is None else shared_notes(self.config)

    def _recomputing(self) -> Iterator[str]:
        """Gradient checkpointing that does nothing, as far as the classes are diffusers' own."""
        if self.model is None or not self.config.policy.model_gradient_checkpointing:
            return
        kinds = dict.fromkeys(self.model.pipeline.class_of(name) for name in self.model.pipeline.experts)
        yield from (f"warning: {recompute_remark(kind)}" for kind in kinds if supports_recomputing(kind) is False)

    def _disk(self) -> list[str]:
        if self.disk is None:
            return [UNKNOWN]
        return list(self.disk.lines())

    def _room(self) -> Iterator[str]:
        """Memory of the device that is trained on, and whether the estimate fits into it."""
        where, available, ranks = "GPU", machine.gpu_memory(), 1
        if self.on_cpu:
            where, available = "host", machine.host_memory()
            ranks = max(world_size(self.config.policy.parallelism) // self.nodes, 1)
        if not available:
            yield f"{where} memory: unknown"
            return
        yield f"{where} memory: {format_bytes(available)}"
        if self.memory is not None and self.memory.peak * ranks > available:
            yield f"warning: the estimated peak of {format_bytes(self.memory.peak * ranks)} does not fit into it"


# ---- small parts -------------------------------------------------------------------------------------------------


def _free_disk(config: Config) -> int:
    return machine.free_disk(Path(config.train.output_dir))


def _time_per_step(output_dir: Path) -> str:
    """The median of the newest run in the same folder that has timed steps."""
    for run in reversed(list_runs(output_dir.expanduser().absolute())):
        seconds = [row.get("time/iteration") for row in _read_rows(run.metrics)]
        recent = [value for value in seconds if isinstance(value, int | float)][-_RECENT_STEPS:]
        if recent:
            return f"{statistics.median(recent):.3g} s, the median of the last {len(recent)} steps of {run.root}"
    return f"unknown: {output_dir} holds no earlier run to read it from"


def _read_rows(metrics: Path) -> list[dict[str, Any]]:
    try:
        return read_metrics(metrics)
    except (OSError, ValueError):
        return []


def _plain(value: object) -> object:
    """Tables in a list as dictionaries of what they set."""
    if isinstance(value, tuple):
        return [entry.model_dump(exclude_defaults=True) if isinstance(entry, BaseModel) else entry for entry in value]
    return value
