"""The training loop and one task per kind of job. Only this room sees all others."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmos_rl.distributed.phase import enter_phase
from cosmos_rl.policy.config import Config, world_size
from cosmos_rl.policy.config.jobs import job_kind, load_part
from cosmos_rl.policy.config.ranks import with_world_size
from cosmos_rl.policy.model.imports import disable_gc
from cosmos_rl.reward import RewardFns
from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.tracking.live import show_progress

if TYPE_CHECKING:
    from cosmos_rl.policy.trainer.task import HookFn, LoggerFn, StopRequest


def run(
    config: Config,
    run_folder: RunFolder,
    *,
    dataset: Any = None,
    val_dataset: Any = None,
    custom_logger_fns: Sequence["LoggerFn"] = (),
    hook_fns: Mapping[str, "HookFn"] | None = None,
    reward_fns: RewardFns | None = None,
    val_reward_fns: RewardFns | None = None,
    resume_from: Path | None = None,
    stop: "StopRequest",
) -> int:
    """Train as the configuration says and leave the results in the run folder.

    Args:
        config: a checked configuration.
        run_folder: where everything is written.
        dataset: training data: a sequence, or ``f(config)`` that makes one.
        val_dataset: pairs (held-out loss and images) or prompts (images), likewise.
        custom_logger_fns: called as ``fn(metrics, step)`` after each step; their errors are logged, not raised.
        hook_fns: callables by documented name.
        reward_fns, val_reward_fns: functions that score samples, for reinforcement learning.
        resume_from: ``…/step_<N>/policy`` of a whole checkpoint.
        stop: asked after each step.

    Returns:
        Exit code: 0 done, 75 saved and stopped by SIGTERM, SIGUSR1 or SIGHUP, 130 saved and stopped by Ctrl-C.
    """
    kind = job_kind(config)
    with contextlib.ExitStack() as stack:
        wanted, is_main = "console" in config.logging.logger, os.environ.get("RANK", "0") == "0"
        display = stack.enter_context(show_progress(wanted=wanted, is_main=is_main))
        with enter_phase("importing"), disable_gc():
            from cosmos_rl.distributed.context import process_group, use_deterministic_kernels, use_one_thread
            from cosmos_rl.distributed.memory import memory_phase
            from cosmos_rl.policy.trainer.loop import TrainLoop

            make_task = load_part(kind.task)
        if config.train.deterministic or config.train.rank_invariant:
            stack.enter_context(use_deterministic_kernels())
        if config.train.rank_invariant:
            stack.enter_context(use_one_thread())
        given: dict[str, Any] = {"dataset": dataset, "val_dataset": val_dataset}
        if kind.online:
            given |= {"reward_fns": reward_fns, "val_reward_fns": val_reward_fns}
        parallelism = config.policy.parallelism
        sizes = (parallelism.dp_replicate_size, parallelism.cp_size)
        context = stack.enter_context(process_group(config.train.device, *sizes))
        if world_size(parallelism) != context.world_size:  # ranks that another launcher has started
            config = with_world_size(config, context.world_size)
        with memory_phase("loading"):
            task = make_task(config, context, **given)
        stack.callback(task.close)
        loop = TrainLoop(config, run_folder, context, task, custom_logger_fns, hook_fns or {}, stop, display)
        return loop.run(resume_from)
