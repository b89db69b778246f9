"""`cosmos-rl check`: is a configuration right, and what would it train, on how much memory and disk. No torch."""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from cosmos_rl.errors import UserError
from cosmos_rl.launcher import estimate, machine
from cosmos_rl.launcher.arguments import BUNDLED, Launch, read_launch, script_for
from cosmos_rl.launcher.environment import DataForm, check_environment
from cosmos_rl.launcher.families import in_diffusers
from cosmos_rl.launcher.flags import add_launch_flags
from cosmos_rl.launcher.machine import counted, shown_bytes
from cosmos_rl.launcher.pipeline_files import PipelineFiles, Unknown, read_pipeline, served_classes
from cosmos_rl.launcher.plan import Plan, batch_lines, planned
from cosmos_rl.launcher.prepare import unbuilt_parts
from cosmos_rl.launcher.rl_plan import guard_lines, reward_lines
from cosmos_rl.launcher.sizing import sized
from cosmos_rl.launcher.text_notes import text_notes
from cosmos_rl.policy.config import Config, dump_toml, load_config, notes, world_size
from cosmos_rl.policy.config.keys import keys_of
from cosmos_rl.policy.config.model_rules import size_problem
from cosmos_rl.policy.config.problems import shown
from cosmos_rl.policy.config.ranks import described, has_unbuilt_ranks, resized
from cosmos_rl.policy.config.train_policy import GrpoPolicyConfig
from cosmos_rl.policy.model.single_file import find_single_file_problem
from cosmos_rl.storage.disk import find_existing_folder, find_missing_abilities
from cosmos_rl.storage.run_folder import list_runs

_RECENT_STEPS = 50
_SHOWN_TARGETS = 12
_FOR_ONE_RANK = "That is for 1 rank, which a launch on this machine takes without a GPU."


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    title: str
    lines: Sequence[str]


def check(argv: Sequence[str]) -> int:
    """Check a configuration and print what it would train, with its batches, memory and disk."""
    parser = argparse.ArgumentParser(
        prog="cosmos-rl check",
        usage="cosmos-rl check --config X.toml [flags] [--table.key=value ...] [SCRIPT_OR_MODULE] [arguments]",
        description=f"{check.__doc__} It takes every flag of a training command.",
        allow_abbrev=False,
    )
    add_launch_flags(parser)
    parser.add_argument("--env", action="store_true", help="look at folders, the hub, disk and devices too")
    parser.add_argument("--toml", action="store_true", help="print the whole resolved configuration in place of it")
    asked, given = read_launch(parser, argv)
    nproc, nodes = asked.nproc_per_node, asked.nodes.count
    config, here = _loaded(asked)
    if given.toml:
        print(dump_toml(config), end="")
        return 0
    script = script_for(asked.script, config)
    own = script not in BUNDLED
    report = Report(config, _on_cpu(config, nproc), own_data=own, nodes=nodes)
    print(f"{asked.config}: no mistakes found in the keys and between them.{here}")
    _print(report.sections())
    problems = list(report.problems())
    if problems and _takes_one_rank(asked) and not list(Report(resized(config, 1), True, own_data=own).problems()):
        print(f"{_FOR_ONE_RANK} Elsewhere: {'; '.join(problems)}")
        problems = []
    if given.env:
        found, notes = _environment_problems(config, BUNDLED.get(script))
        _print([Section("Environment", report.environment() + notes)])
        problems += found + report.disk_problems()
    elif one_file := find_single_file_problem(config.policy.model_name_or_path):
        problems.append(one_file)
    if problems:
        raise UserError("a launch would be refused:\n" + "\n".join(f"  {problem}" for problem in problems))
    return 0


def refuse_what_cannot_run(config: Config, *, on_cpu: bool, own_data: bool) -> None:
    """Raise `UserError` with everything that the files of model and data already tell against a run."""
    problems = list(Report(config, on_cpu, own_data=own_data).problems())
    if problems:
        raise UserError("\n".join(problems))


class Report:
    """Everything that can be said about a configuration without loading its model."""

    def __init__(self, config: Config, on_cpu: bool, *, own_data: bool, nodes: int = 1) -> None:
        """`own_data`: a script of the user's brings the data. `nodes`: machines that share the ranks."""
        self.config = config
        self.nodes = nodes
        self.on_cpu = on_cpu
        self.own_data = own_data
        self.plan: Plan = planned(config, own_data=own_data)
        self.pipeline: PipelineFiles | None = None
        self.selection: estimate.Selection | None = None
        self.why_unknown = ""
        try:
            self.pipeline = read_pipeline(config.policy)
            self.selection = estimate.select(config, self.pipeline)
        except Unknown as why:
            self.why_unknown = str(why)

    def sections(self) -> list[Section]:
        """The report, part by part."""
        config = self.config
        unbuilt = [f"not runnable yet: {line}" for line in unbuilt_parts(config, own_script=self.own_data)]
        changed = [k for k in keys_of(config) if k.value != k.default]
        transformer = None if self.pipeline is None else self.pipeline.configs["transformer"]
        return [
            Section("Trained", self._trained()),
            Section("Ranks", [*self._ranks()]),
            Section("Batch and steps", batch_lines(config, self.plan, transformer)),
            Section("Rewards", self._rewards()),
            Section("Guard", guard_lines(config) if self.rl else []),
            Section(f"Memory per rank, estimated for {'a CPU' if self.on_cpu else 'a GPU'}", [*self.memory()]),
            Section("Disk", [*self._disk()]),
            Section("Time per step", [_time_per_step(Path(config.train.output_dir))]),
            Section("Values that differ from the defaults", [f"{k.path} = {shown(_plain(k.value))}" for k in changed]),
            Section("Not runnable yet", unbuilt),
            Section("Notes", notes(config)),
        ]

    def problems(self) -> Iterator[str]:
        """What the launch would refuse, as the weights' names and the number of samples already tell."""
        if self.selection is not None:
            yield from self.selection.problems
        yield from self._size_problems()
        yield from self._data_problems()
        if self.rl and not self.own_data and not self._rewards():
            yield (
                "no reward: set train.train_policy.use_remote_reward = true, name functions in "
                "train.train_policy.local_reward, or start a script that gives reward_fns"
            )
        if self.plan.steps_per_epoch == 0:
            yield (
                f"train.train_policy.dataset.local_dir: {self.plan.samples} captions, {self.plan.held_out} of them held"
                f" out, make no whole step of {self.plan.batch} samples; lower the batch or set "
                "train.train_policy.dataloader_drop_last = false"
            )

    def _size_problems(self) -> Iterator[str]:
        policy, pipeline = self.config.policy, self.pipeline
        if pipeline is None or pipeline.class_name != "StableDiffusion3Pipeline":
            return
        settings = pipeline.configs["transformer"]
        try:
            factor = estimate.vae_stride(pipeline) * int(settings["patch_size"])
        except (Unknown, KeyError):
            return
        positions = settings.get("pos_embed_max_size")
        problem = size_problem(policy.diffusers.inference_size, policy.model_name_or_path, factor, positions)
        if problem is not None:
            yield problem

    def _data_problems(self) -> Iterator[str]:
        dataset, key = self.config.train.train_policy.dataset, "train.train_policy.dataset.local_dir"
        if self.own_data or dataset.local_dir:
            return
        if not self.rl:
            yield f"{key}: missing; give the folder of training images"
        elif not dataset.name:
            yield f"{key}: missing; give a file of prompts, or a prompt set as train.train_policy.dataset.name"

    @property
    def rl(self) -> bool:
        """Whether the job is reinforcement learning."""
        return isinstance(self.config.train.train_policy, GrpoPolicyConfig)

    # ---- parts -------------------------------------------------------------------------------------------------

    def _trained(self) -> list[str]:
        policy = self.config.policy
        what = "the whole transformer" if policy.lora is None else f'LoRA adapter "{policy.lora.active_adapter}"'
        if any((policy.freeze_pattern, policy.trainable_pattern, policy.trainable_map)):
            what = "the part of the transformer that the patterns choose"
        lines = [f"{what} of {policy.model_name_or_path}"]
        if self.pipeline is None or self.selection is None:
            return [*lines, f"sizes: unknown ({self.why_unknown})"]
        whole, trained = estimate.parameters(self.pipeline.transformer), self.selection.trained
        lines.append(f"{self.pipeline.class_name}, transformer of {whole:,} weights")
        lines.append(f"{trained:,} trained weights, {100 * trained / max(whole, 1):.3g} % of that")
        if self.selection.spare_adapters:
            whose = "of the old policy's adapter" if self.rl else "of adapters that are not trained"
            lines.append(f"{self.selection.spare_adapters:,} weights {whose}")
        targets = self.selection.targets
        lines += [f"{name}: {count} layers" for name, count in list(targets.items())[:_SHOWN_TARGETS]]
        if self.pipeline.class_name not in served_classes() and not in_diffusers(self.pipeline.class_name):
            lines.append(f"no model is registered for {self.pipeline.class_name}; your script has to register one")
        return lines

    def _ranks(self) -> Iterator[str]:
        parallelism = self.config.policy.parallelism
        ranks = world_size(parallelism)
        yield f"{counted(ranks, 'rank')}: {described(parallelism)}" if ranks > 1 else "1 rank, not sharded"
        if self.nodes > 1:
            yield f"{ranks / self.nodes:g} on each of {self.nodes} machines"
        gpus = machine.gpus()
        if ranks > 1 and not self.on_cpu and gpus < ranks / self.nodes:
            has = counted(gpus, "GPU") if gpus else "no GPU"
            other = f"--nproc-per-node {gpus}" if gpus else "1 rank on the CPU"
            yield f"this machine has {has}: a launch here takes {other}"
        if self.on_cpu and self.config.train.device == "auto":
            yield "no GPU here, so it runs on the CPU; --train.device=cuda estimates for a GPU"

    def _rewards(self) -> list[str]:
        return reward_lines(self.config, own_script=self.own_data) if self.rl else []

    def memory(self) -> Iterator[str]:
        """The memory of a rank, part by part."""
        found = self._estimated()
        if found is None:
            yield "unknown, as the sizes are"
            return
        for label, size in found.parts.items():
            yield f"{label:40} {shown_bytes(size):>8}"
        for label, size in found.phases.items():
            yield f"{'in all, while: ' + label:40} {shown_bytes(size):>8}"
        yield f"{'peak':40} {shown_bytes(found.peak):>8}"
        if not self.on_cpu:
            yield f"{'and in host memory':40} {shown_bytes(found.host):>8}"
        yield "activations and the VAE's work are rough; libraries and the CUDA context come on top"
        yield from (f"unknown and left out: {what}" for what in found.without)

    def _disk(self) -> Iterator[str]:
        found = self._on_disk()
        if found is None:
            yield "unknown, as the sizes are"
            return
        disk, kept = found
        once = f", and once {shown_bytes(disk.shared_export)} for the frozen parts" if disk.shared_export else ""
        yield f"one checkpoint {shown_bytes(disk.checkpoint)}, one export {shown_bytes(disk.export)}{once}"
        if kept is None:
            yield "in all: unknown (train.ckpt.max_keep = -1 keeps everything, and the number of steps is unknown)"
        else:
            yield f"in all {shown_bytes(self._written(disk, kept))} for {counted(kept, 'kept step')}"

    def environment(self) -> list[str]:
        """Devices, memory and disk of this machine."""
        free = machine.free_disk(Path(self.config.train.output_dir))
        lines = [f"GPU: {line}" for line in machine.gpu_lines()] or ["GPU: none"]
        lines.append(f"cores: {machine.cores()}")
        available, found = machine.host_memory(), self._estimated()
        room = available if self.on_cpu else machine.gpu_memory()
        where = "host" if self.on_cpu else "GPU"
        lines.append(f"{where} memory: {shown_bytes(room) if room else 'unknown'}")
        ranks = max(world_size(self.config.policy.parallelism) // self.nodes, 1)
        wanted = None if found is None else found.peak * (ranks if self.on_cpu else 1)
        if room and wanted and wanted > room:
            lines.append(f"warning: the estimated peak of {shown_bytes(wanted)} does not fit into it")
        disk = self._on_disk()
        lines.append(f"free disk for train.output_dir: {shown_bytes(free)}")
        if disk is not None and disk[1] is not None and self._written(disk[0], disk[1]) > free:
            wanted = shown_bytes(self._written(disk[0], disk[1]))
            lines.append(f"warning: the run may write {wanted}; lower train.ckpt.max_keep or raise save_freq")
        return lines

    def disk_problems(self) -> list[str]:
        """One line when not even one checkpoint and one export fit."""
        found, free = self._on_disk(), machine.free_disk(Path(self.config.train.output_dir))
        if found is None or self._written(found[0], 1) <= free:
            return []
        needed = shown_bytes(self._written(found[0], 1))
        return [f"train.output_dir: {shown_bytes(free)} free, one checkpoint and its export need {needed}"]

    def _estimated(self) -> estimate.Memory | None:
        if self.pipeline is None or self.selection is None:
            return None
        return estimate.memory(self.config, self.pipeline, self.selection, on_cpu=self.on_cpu, saves=self.plan.saves)

    def _on_disk(self) -> tuple[estimate.Disk, int | None] | None:
        """Sizes of a step, and how many steps stay on the disk (None: unknown)."""
        if self.pipeline is None or self.selection is None:
            return None
        most, saves = self.config.train.ckpt.max_keep, self.plan.saves
        if most < 0:
            kept = saves
        else:
            kept = most if saves is None else min(saves, most)
        return estimate.disk(self.config, self.pipeline, self.selection), kept

    def _written(self, disk: estimate.Disk, kept: int) -> int:
        ckpt = self.config.train.ckpt
        exports = kept if ckpt.export_safetensors and ckpt.enable_checkpoint else 1
        return kept * disk.checkpoint * ckpt.enable_checkpoint + exports * disk.export + disk.shared_export


# ---- ranks and devices -------------------------------------------------------------------------------------------


def _loaded(asked: Launch) -> tuple[Config, str]:
    """The configuration for the ranks that it asks for, on whichever machine that is.

    Where it is wrong for these and a launch on this machine would take one rank, for which it is right: that one, and a
    text that says so.
    """
    nproc, nodes = asked.nproc_per_node, asked.nodes.count

    def loaded(nproc: int | None) -> Config:
        return load_config(asked.config, asked.overrides, sized=lambda config: _sized(config, nproc, nodes))

    try:
        return loaded(nproc), ""
    except UserError as error:
        if not _takes_one_rank(asked):
            raise
        try:
            config = loaded(1)
        except UserError:
            raise error from None
        return config, f"\n{_FOR_ONE_RANK} Elsewhere: {error}"


def _takes_one_rank(asked: Launch) -> bool:
    """Whether a launch of the same command on this machine would take one rank, whatever the configuration asks for."""
    return asked.nproc_per_node is None and asked.nodes.count == 1 and not machine.gpus()


def _sized(config: Config, nproc: int | None, nodes: int) -> Config:
    """As the launcher sizes it, except that the machine at hand need not have the GPUs."""
    if has_unbuilt_ranks(config.policy.parallelism):
        return config
    if nproc is not None:
        return resized(config, nproc * nodes)
    asked = world_size(config.policy.parallelism)
    fits = asked == -1 or nodes > 1 or config.train.device == "cpu"
    return sized(config, None, max(machine.gpus(), asked, 1), nodes) if fits else config


def _on_cpu(config: Config, nproc: int | None) -> bool:
    """Whether to estimate for a CPU: asked for, or without GPUs and not meant for a machine with several."""
    if config.train.device != "auto":
        return config.train.device == "cpu"
    return machine.gpus() == 0 and (nproc is not None or world_size(config.policy.parallelism) == 1)


def _environment_problems(config: Config, data: DataForm | None) -> tuple[list[str], list[str]]:
    """What a launch would refuse, and what a run would leave out of its data."""
    problems, notes = [], []
    try:
        notes = [line for note in check_environment(config, data) for line in note.splitlines()]
    except UserError as error:
        problems += str(error).splitlines()
    try:
        lacks = find_missing_abilities(find_existing_folder(Path(config.train.output_dir)))
        notes += [f"warning: the disk of train.output_dir has {line}" for line in lacks]
    except UserError as error:
        problems.append(str(error))
    return problems, notes + text_notes(config, data)


# ---- small parts -------------------------------------------------------------------------------------------------


def _time_per_step(output_dir: Path) -> str:
    """The median of the newest run in the same folder that has timed steps."""
    for run in reversed(list_runs(output_dir.expanduser().absolute())):
        seconds = _seconds(run.metrics)
        if seconds:
            recent = seconds[-_RECENT_STEPS:]
            return f"{statistics.median(recent):.3g} s, the median of the last {len(recent)} steps of {run.root}"
    return f"unknown: {output_dir} holds no earlier run to read it from"


def _seconds(metrics: Path) -> list[float]:
    try:
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        found = [row.get("time/iteration") for row in rows]
    except (OSError, ValueError, AttributeError):
        return []
    return [value for value in found if isinstance(value, int | float)]


def _plain(value: object) -> object:
    """Tables in a list as dictionaries of what they set."""
    if isinstance(value, tuple):
        return [entry.model_dump(exclude_defaults=True) if isinstance(entry, BaseModel) else entry for entry in value]
    return value


def _print(sections: Sequence[Section]) -> None:
    for section in sections:
        if section.lines:
            print("\n".join(["", section.title, *(f"  {line}" for line in section.lines)]))
