"""One training job, from its command line to its exit code. Imports torch only to start several workers, or to start
one again."""

import logging
import re
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.accept import accept
from cosmos_rl.launcher.arguments import Launch, script_for, worker_command
from cosmos_rl.launcher.machine import gpus
from cosmos_rl.launcher.prepare import prepare_run
from cosmos_rl.launcher.ranks.alone import run_worker
from cosmos_rl.launcher.ranks.nodes import JobEnded, JobPlan
from cosmos_rl.launcher.ranks.output import redirect_output
from cosmos_rl.launcher.ranks.signals import EXIT_USER_ERROR, StopRequest, listen
from cosmos_rl.launcher.ranks.worker_script import python_call
from cosmos_rl.policy.config import Config, load_config, notes, world_size
from cosmos_rl.policy.config.jobs import SCRIPTS
from cosmos_rl.policy.config.ranks import resolve_world_size
from cosmos_rl.storage.run_folder import RunFolder, record_end
from cosmos_rl.tracking.screen import clear_leftovers
from cosmos_rl.utils.logging import logger

if TYPE_CHECKING:
    from cosmos_rl.launcher.ranks.coordinator import Coordinator


def launch(command: Launch, argv: Sequence[str]) -> int:
    """Check, prepare and run this node's part of one training job; returns its exit code."""
    if command.debug:
        logger.setLevel(logging.DEBUG)
    stop = StopRequest()
    try:
        if command.nodes.count == 1:
            config, script = accept_command(command)
            with listen(stop), prepare_run(config, argv, own_data=_brings_data(command, config)) as run:
                return _run(command, script, run, world_size(config.policy.parallelism), stop)
        with listen(stop):
            if command.nodes.index == 0:
                return _launch_first_node(command, argv, stop)
            return _launch_other_node(command, stop)
    except JobEnded as end:
        if end.reason:
            print(f"error: {end.reason}", file=sys.stderr, flush=True)
        return end.code


def _launch_first_node(command: Launch, argv: Sequence[str], stop: StopRequest) -> int:
    """Node 0: check everything, make the run folder, let the others join."""
    from cosmos_rl.launcher.ranks.coordinator import Coordinator  # imports torch: seconds

    coordinator = Coordinator(command.nodes, stop)
    try:
        config, script = accept_command(command)
        with prepare_run(config, argv, own_data=_brings_data(command, config)) as run:
            nproc = world_size(config.policy.parallelism) // command.nodes.count
            plan = JobPlan(uuid.uuid4().hex, str(run.root), nproc, command.nodes.count)
            coordinator.publish_plan(plan)
            return _run(command, script, run, nproc, stop, coordinator, plan.job_id)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        coordinator.announce_failure(error.exit_code, str(error))
        return error.exit_code
    except JobEnded as end:
        coordinator.announce_failure(end.code, end.reason)
        raise


def _launch_other_node(command: Launch, stop: StopRequest) -> int:
    """Every other node: take the run folder and the configuration of node 0."""
    from cosmos_rl.launcher.ranks.coordinator import Coordinator  # imports torch: seconds

    coordinator = Coordinator(command.nodes, stop)
    plan = coordinator.receive_plan()

    def check(root: Path) -> None:
        run = RunFolder(root)
        config = load_config(run.next / run.config.name)
        if command.nproc_per_node not in (None, plan.nproc):
            raise UserError(f"--nproc-per-node {command.nproc_per_node}: node 0 runs {plan.nproc} ranks on each node")
        resolve_world_size(config, plan.nproc, gpus(), command.nodes.count)
        script = script_for(command.script, config)
        accept(config, SCRIPTS.get(script), own_script=script not in SCRIPTS)
        python.extend(worker_command(script))

    python: list[str] = []
    coordinator.confirm(plan, check)
    return _run(command, python, RunFolder(Path(plan.run)), plan.nproc, stop, coordinator, plan.job_id)


def accept_command(command: Launch) -> tuple[Config, list[str]]:
    """The configuration that will run, and what python is called with."""
    nproc, nodes = command.nproc_per_node, command.nodes.count
    config = command.load_config(lambda config: resolve_world_size(config, nproc, gpus(), nodes))
    config = _in_named_run(config, Path(command.config))
    script = script_for(command.script, config)
    accepted = accept(config, SCRIPTS.get(script), own_script=script not in SCRIPTS)
    for note in notes(config):
        logger.info(note)
    return accepted, worker_command(script)


def _brings_data(command: Launch, config: Config) -> bool:
    """Whether the data is that of a script of the user's."""
    return script_for(command.script, config) not in SCRIPTS


def _run(
    command: Launch,
    script: Sequence[str],
    run: RunFolder,
    nproc: int,
    stop: StopRequest,
    coordinator: "Coordinator | None" = None,
    job_id: str = "",
) -> int:
    """Run this node's workers to their end."""
    call = python_call([*script, *command.script_args, "--config", str(run.next / run.config.name)])
    environment = {"COSMOS_RUN_DIR": str(run.root)}
    if command.debug:
        environment["COSMOS_LOG_LEVEL"] = "DEBUG"
    try:
        with redirect_output(command.log_dir, command.nodes.index) as log:
            if nproc == 1 and command.max_restarts == 0 and coordinator is None:
                code, failure = run_worker(call, environment=environment, stop=stop)
            else:
                from cosmos_rl.launcher.ranks.agent import run_workers  # imports torch: seconds

                code, failure = run_workers(
                    call,
                    environment=environment,
                    stop=stop,
                    nproc=nproc,
                    max_restarts=command.max_restarts,
                    debug=command.debug,
                    coordinator=coordinator,
                    job_id=job_id,
                )
    except JobEnded as end:  # on another node
        clear_leftovers()
        _record(command, run, end.code, end.reason)
        raise
    clear_leftovers()
    if code == EXIT_USER_ERROR:
        print(f"error: {failure}", file=sys.stderr, flush=True)
    elif failure:
        where = "its output is above"
        if log is not None:
            where = f"its output is in {log.path}, the end of it:\n{log.tail()}"
        print(f"error: {failure}; {where}", file=sys.stderr, flush=True)
    _record(command, run, code, failure)
    return code


def _record(command: Launch, run: RunFolder, code: int, reason: str) -> None:
    """Node 0 writes down how the job has ended; a disk that takes nothing any more does not change that."""
    if command.nodes.index != 0:
        return
    try:
        record_end(run, code, reason)
    except OSError as error:
        logger.warning(f"{run.ended}: how the run has ended cannot be written there ({error.strerror or error})")


def _in_named_run(config: Config, place: Path) -> Config:
    """`--config <run folder>` with `train.resume = true` continues that run, not the newest of its folder."""
    if not place.is_dir() or config.train.resume is not True or config.train.timestamp:
        return config
    if not re.fullmatch(r"\d{14}", place.resolve().name):
        return config
    train = config.train.model_copy(update={"timestamp": place.resolve().name})
    return config.model_copy(update={"train": train})
