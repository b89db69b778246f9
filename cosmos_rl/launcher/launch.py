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
from cosmos_rl.launcher.alone import run_worker
from cosmos_rl.launcher.arguments import BUNDLED, Launch, script_for, worker_command
from cosmos_rl.launcher.check import refuse_what_cannot_run
from cosmos_rl.launcher.environment import check_environment, with_absolute_paths
from cosmos_rl.launcher.machine import gpus
from cosmos_rl.launcher.nodes import JobEnded, JobPlan
from cosmos_rl.launcher.output import output_to
from cosmos_rl.launcher.prepare import prepared_run, refuse_unbuilt
from cosmos_rl.launcher.signals import EXIT_USER_ERROR, StopRequest, listening
from cosmos_rl.launcher.sizing import sized
from cosmos_rl.policy.config import Config, load_config, notes, world_size
from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.utils.logging import logger

if TYPE_CHECKING:
    from cosmos_rl.launcher.link import Link


def launch(asked: Launch, argv: Sequence[str]) -> int:
    """Check, prepare and run this machine's part of one training job; returns its exit code."""
    if asked.debug:
        logger.setLevel(logging.DEBUG)
    stop = StopRequest()
    try:
        if asked.nodes.count == 1:
            config, script = _checked(asked)
            with listening(stop), prepared_run(config, argv) as run:
                return _run(asked, script, run, world_size(config.policy.parallelism), stop)
        with listening(stop):
            return _lead(asked, argv, stop) if asked.nodes.index == 0 else _follow(asked, stop)
    except JobEnded as end:
        if end.reason:
            print(f"error: {end.reason}", file=sys.stderr, flush=True)
        return end.code


def _lead(asked: Launch, argv: Sequence[str], stop: StopRequest) -> int:
    """Node 0: check everything, make the run folder, let the others join."""
    from cosmos_rl.launcher.link import Link  # imports torch: seconds

    link = Link(asked.nodes, stop)
    try:
        config, script = _checked(asked)
        with prepared_run(config, argv) as run:
            nproc = world_size(config.policy.parallelism) // asked.nodes.count
            plan = JobPlan(uuid.uuid4().hex, str(run.root), nproc, asked.nodes.count)
            link.lead(plan)
            return _run(asked, script, run, nproc, stop, link, plan.job_id)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        link.ended(error.exit_code, str(error))
        return error.exit_code
    except JobEnded as end:
        link.ended(end.code, end.reason)
        raise


def _follow(asked: Launch, stop: StopRequest) -> int:
    """Every other node: take the run folder and the configuration of node 0."""
    from cosmos_rl.launcher.link import Link  # imports torch: seconds

    link = Link(asked.nodes, stop)
    plan = link.follow()

    def check(root: Path) -> None:
        run = RunFolder(root)
        config = load_config(run.next / run.config.name)
        if asked.nproc_per_node not in (None, plan.nproc):
            raise UserError(f"--nproc-per-node {asked.nproc_per_node}: node 0 runs {plan.nproc} ranks on each node")
        sized(config, plan.nproc, gpus(), asked.nodes.count)
        script = script_for(asked.script, config)
        check_environment(config, BUNDLED.get(script))
        command.extend(worker_command(script))

    command: list[str] = []
    link.agree(plan, check)
    return _run(asked, command, RunFolder(Path(plan.run)), plan.nproc, stop, link, plan.job_id)


def _checked(asked: Launch) -> tuple[Config, list[str]]:
    """The configuration that will run, and what python is called with."""
    config = load_config(
        asked.config,
        asked.overrides,
        sized=lambda config: sized(config, asked.nproc_per_node, gpus(), asked.nodes.count),
    )
    config = _of_named_run(config, Path(asked.config))
    script = script_for(asked.script, config)
    refuse_unbuilt(config, own_script=script not in BUNDLED)
    for note in notes(config):
        logger.info(note)
    check_environment(config, BUNDLED.get(script))
    refuse_what_cannot_run(config, on_cpu=not gpus(), own_data=script not in BUNDLED)
    return with_absolute_paths(config), worker_command(script)


def _run(
    asked: Launch,
    script: Sequence[str],
    run: RunFolder,
    nproc: int,
    stop: StopRequest,
    link: "Link | None" = None,
    job_id: str = "",
) -> int:
    """Run this machine's workers to their end."""
    command = [sys.executable, *script, *asked.script_args, "--config", str(run.next / run.config.name)]
    environment = {"COSMOS_RUN_DIR": str(run.root)}
    if asked.debug:
        environment["COSMOS_LOG_LEVEL"] = "DEBUG"
    with output_to(asked.log_dir, asked.nodes.index) as log:
        if nproc == 1 and asked.max_restarts == 0 and link is None:
            code, failure = run_worker(command, environment=environment, stop=stop)
        else:
            from cosmos_rl.launcher.agent import run_workers  # imports torch: seconds

            code, failure = run_workers(
                command,
                environment=environment,
                stop=stop,
                nproc=nproc,
                max_restarts=asked.max_restarts,
                debug=asked.debug,
                link=link,
                job_id=job_id,
            )
    if code == EXIT_USER_ERROR:
        print(f"error: {failure}", file=sys.stderr, flush=True)
    elif failure:
        where = f"its output is in {log.path}, the end of it:\n{log.tail()}" if log else "its output is above"
        print(f"error: {failure}; {where}", file=sys.stderr, flush=True)
    return code


def _of_named_run(config: Config, place: Path) -> Config:
    """`--config <run folder>` with `train.resume = true` goes on in that run, not in the newest of its folder."""
    if not place.is_dir() or config.train.resume is not True or config.train.timestamp:
        return config
    if not re.fullmatch(r"\d{14}", place.resolve().name):
        return config
    train = config.train.model_copy(update={"timestamp": place.resolve().name})
    return config.model_copy(update={"train": train})
