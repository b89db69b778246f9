"""Which run folder a command writes to, and which checkpoint it starts from. Reads the disk, changes nothing."""

from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.checkpoint.layout import find_broken_steps, find_checkpoint, list_whole_steps, policy_dir
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.storage.run_folder import RunFolder, list_runs


@dataclass(frozen=True)
class ResumePlan:
    """Where a command starts."""

    run: RunFolder | None
    """The run to continue; None: a new one."""
    step_path: Path | None
    """The checkpoint `.../checkpoints/step_<N>/policy` to start from; None: step 0."""
    message: str
    """One line for the log; empty when there is nothing to say."""


def plan_resume(config: Config) -> ResumePlan:
    """The start that `train.resume`, `train.output_dir` and `train.timestamp` set.

    Raises:
        UserError: the checkpoint is missing or broken, or a new start would hide one that exists.
    """
    resume = config.train.resume
    if isinstance(resume, str):
        step = find_checkpoint(Path(resume))
        return ResumePlan(None, step, f"starting from {step}")
    if not resume:
        return ResumePlan(None, None, "")
    output_dir = Path(config.train.output_dir).expanduser().absolute()
    found = list_runs(output_dir)
    if config.train.timestamp:
        names = [run.name for run in found]
        found = found[: names.index(config.train.timestamp) + 1] if config.train.timestamp in names else []
        if not found:
            missing = output_dir / config.train.timestamp
            return ResumePlan(
                None, None, f"train.resume = true, but there is no run {missing}: starting it as a new run"
            )
    if not found:
        return ResumePlan(None, None, f"train.resume = true, but {output_dir} holds no run: starting a new run")
    return _continue(found[-1], found[:-1])


def resume_from(config: Config, run: RunFolder, restart_count: int) -> Path | None:
    """The checkpoint a worker of `run` starts from: after an agent's restart always the newest whole one of its own."""
    if restart_count > 0 or config.train.resume is True:
        steps = list_whole_steps(run.checkpoints)
        if steps:
            return policy_dir(run.checkpoints, steps[-1])
    if isinstance(config.train.resume, str):
        return find_checkpoint(Path(config.train.resume))
    return None


def _continue(run: RunFolder, older: list[RunFolder]) -> ResumePlan:
    whole, broken = list_whole_steps(run.checkpoints), find_broken_steps(run.checkpoints)
    if whole:
        step = policy_dir(run.checkpoints, whole[-1])
        skipped = [f"; step {number} is broken ({why})" for number, why in broken.items() if number > whole[-1]]
        return ResumePlan(run, step, f"continuing {run.root} from step {whole[-1]}" + "".join(skipped))
    choices = [policy_dir(old.checkpoints, steps[-1]) for old in older if (steps := list_whole_steps(old.checkpoints))]
    if not broken and not choices:
        return ResumePlan(run, None, f"{run.root} holds no checkpoint yet: starting it again from step 0")
    lines = [f"train.resume = true, but the newest run {run.root} holds no whole checkpoint:"]
    lines += [f"  broken: {policy_dir(run.checkpoints, number)}: {why}" for number, why in broken.items()]
    lines += [f"  whole, of an older run: {path}" for path in choices]
    if choices:
        lines.append(f"  start from one of these with --train.resume={choices[-1]}")
    lines.append("  or start a new run without train.resume")
    raise UserError("\n".join(lines))
