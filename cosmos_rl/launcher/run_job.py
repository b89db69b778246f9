"""Training in this process: what a worker of the command, a script started by hand and Python share."""

from typing import Any

from cosmos_rl.errors import OutOfMemory
from cosmos_rl.launcher.machine import gpus
from cosmos_rl.launcher.ranks.signals import StopRequest
from cosmos_rl.launcher.resume import resume_from
from cosmos_rl.policy.config import Config
from cosmos_rl.storage.run_folder import RunFolder


def run_job(config: Config, run: RunFolder, *, stop: StopRequest, restarts: int = 0, **given: Any) -> int:
    """Train as one rank in the prepared folder `run`; returns the exit code.

    Args:
        config: what `accept` has accepted.
        run: its run folder.
        stop: asked after each step.
        restarts: how often the agent has started this process again.
        given: data sets, reward functions, hooks and loggers, as `policy.trainer.run` takes them.

    Raises:
        OutOfMemory: `explain_out_of_memory` has the message for the user.
    """
    # The trainer pulls in torch and diffusers: seconds, so only once everything else is known to be right.
    from cosmos_rl.policy.trainer import run as train

    # Loggers and trackers name the run by its start time, also when the configuration left it open.
    table = config.train.model_copy(update={"timestamp": run.name})
    config = config.model_copy(update={"train": table})
    return train(config, run, resume_from=resume_from(config, run, restarts), stop=stop, **given)


def explain_out_of_memory(config: Config, error: OutOfMemory) -> str:
    """Where memory ran out, what needs how much, and what to change."""
    from cosmos_rl.launcher.check.out_of_memory import explain  # the estimates, which no other run needs

    return explain(config, error.phase, on_cpu=config.train.device == "cpu" or gpus() == 0)
