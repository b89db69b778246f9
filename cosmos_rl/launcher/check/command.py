"""`cosmos-rl check`: is a configuration right, and what would it train, on how much memory and disk. No torch."""

from collections.abc import Sequence
from pathlib import Path

from cosmos_rl.errors import UserError
from cosmos_rl.launcher import machine
from cosmos_rl.launcher.acceptance.environment import find_wrong_names, inspect_environment
from cosmos_rl.launcher.arguments import Launch, read_launch, script_for, worker_command
from cosmos_rl.launcher.check.report import Report, Section
from cosmos_rl.launcher.check.size_notes import size_notes
from cosmos_rl.launcher.check.text_notes import text_notes
from cosmos_rl.launcher.flags import FlagParser, add_launch_flags
from cosmos_rl.launcher.resume import plan_resume
from cosmos_rl.policy.config import Config, dump_toml, world_size
from cosmos_rl.policy.config.jobs import SCRIPTS, DataForm
from cosmos_rl.policy.config.ranks import has_unsupported_ranks, resolve_world_size, with_world_size
from cosmos_rl.policy.model.single_file import find_single_file_problem
from cosmos_rl.storage.disk import find_existing_folder, find_missing_abilities

_FOR_ONE_RANK = "That is for 1 rank, which a launch on this machine takes without a GPU."


def check(argv: Sequence[str]) -> int:
    """Check a configuration and print what it would train, with its batches, memory and disk."""
    parser = FlagParser(
        prog="cosmos-rl check",
        usage="cosmos-rl check --config X.toml [flags] [--table.key=value ...] [SCRIPT_OR_MODULE] [arguments]",
        description=f"{check.__doc__} It takes every flag of a training command.",
    )
    add_launch_flags(parser)
    parser.add_argument("--env", action="store_true", help="look at folders, the hub, disk and devices too")
    parser.add_argument("--toml", action="store_true", help="print the whole resolved configuration in place of it")
    command, options = read_launch(parser, argv)
    config, remark = _load(command)
    if options.toml:
        print(dump_toml(config), end="")
        return 0
    script = script_for(command.script, config)
    data, own_script = SCRIPTS.get(script), script not in SCRIPTS
    on_cpu = _on_cpu(config, command.nproc_per_node)
    report = Report(config, data, own_script=own_script, on_cpu=on_cpu, nodes=command.nodes.count)
    print(f"{command.config}: no problems found in the keys and the rules between them.{remark}")
    _print(report.sections())
    problems = report.problems()
    if problems and _takes_one_rank(command):
        alone = Report(with_world_size(config, 1), data, own_script=own_script, on_cpu=True)
        if not alone.problems():
            print(f"{_FOR_ONE_RANK} Elsewhere: {'; '.join(problems)}")
            problems = []
    if options.env:
        problems += _find_start_problems(config, script)
        found, notes = _inspect_environment(config, data)
        _print([Section("Environment", report.environment() + notes)])
        problems += found
        if report.disk is not None:
            problems += report.disk.problems()
    else:
        problems += find_wrong_names(config, data)
        if one_file := find_single_file_problem(config.policy):
            problems.append(one_file)
    if problems:
        raise UserError("a launch would be refused:\n" + "\n".join(f"  {problem}" for problem in problems))
    return 0


# ---- ranks and devices -------------------------------------------------------------------------------------------


def _load(command: Launch) -> tuple[Config, str]:
    """The configuration for the ranks that it sets, on whichever machine that is.

    Where it is invalid for these and a launch on this machine would take one rank, for which it is valid: that one, and
    a remark on it.
    """
    nproc, nodes = command.nproc_per_node, command.nodes.count

    def load(nproc: int | None) -> Config:
        return command.load_config(lambda config: _fit(config, nproc, nodes))

    try:
        return load(nproc), ""
    except UserError as error:
        if not _takes_one_rank(command):
            raise
        try:
            config = load(1)
        except UserError:
            raise error from None
        return config, f"\n{_FOR_ONE_RANK} Elsewhere: {error}"


def _takes_one_rank(command: Launch) -> bool:
    """Whether a launch of the same command on this machine would take one rank, whatever the configuration sets."""
    return command.nproc_per_node is None and command.nodes.count == 1 and not machine.gpus()


def _fit(config: Config, nproc: int | None, nodes: int) -> Config:
    """For the ranks that a launch would take, except that this machine need not have the GPUs."""
    parallelism = config.policy.parallelism
    if has_unsupported_ranks(parallelism):
        return config
    if nproc is not None:
        return with_world_size(config, nproc * nodes)
    ranks = world_size(parallelism)
    if ranks == -1 or nodes > 1 or config.train.device == "cpu":
        return resolve_world_size(config, None, max(machine.gpus(), ranks, 1), nodes)
    return config


def _on_cpu(config: Config, nproc: int | None) -> bool:
    """Whether to estimate for a CPU: set, or without GPUs and not meant for a machine with several."""
    if config.train.device != "auto":
        return config.train.device == "cpu"
    return machine.gpus() == 0 and (nproc is not None or world_size(config.policy.parallelism) == 1)


def _find_start_problems(config: Config, script: str) -> list[str]:
    """A script, or a checkpoint of `train.resume`, that is not there."""
    problems = list[str]()
    for look in (lambda: worker_command(script), lambda: plan_resume(config)):
        try:
            look()
        except UserError as error:
            problems.append(str(error))
    return [line for problem in problems for line in problem.splitlines()]


def _inspect_environment(config: Config, data: DataForm | None) -> tuple[list[str], list[str]]:
    """What a launch would refuse, and what a run would leave out of its data."""
    found, left_out = inspect_environment(config, data)
    problems = [line for problem in found for line in problem.splitlines()]
    notes = [line for note in left_out for line in note.splitlines()]
    try:
        lacks = find_missing_abilities(find_existing_folder(Path(config.train.output_dir)))
        notes += [f"warning: the disk of train.output_dir has {line}" for line in lacks]
    except UserError as error:
        problems.append(str(error))
    return problems, notes + text_notes(config, data) + size_notes(config, data)


def _print(sections: Sequence[Section]) -> None:
    for section in sections:
        if section.lines:
            print("\n".join(["", section.title, *(f"  {line}" for line in section.lines)]))
