"""Starting, watching and restarting the worker processes with torch's elastic agent. Importing this costs seconds."""

import logging
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters

from cosmos_rl.launcher.ranks.coordinator import Coordinator
from cosmos_rl.launcher.ranks.nodes import JobEnded
from cosmos_rl.launcher.ranks.signals import EXIT_FAILED, StopRequest, hold_interrupts
from cosmos_rl.launcher.ranks.workers import MONITOR_SECONDS, Workers, outcome, worker_environment


def run_workers(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    stop: StopRequest,
    nproc: int = 1,
    max_restarts: int = 0,
    debug: bool = False,
    coordinator: Coordinator | None = None,
    job_id: str = "",
) -> tuple[int, str]:
    """Run `command` as `nproc` ranks until they end; returns the exit code and what failed or is wrong.

    The caller records signals in `stop`; from here on they are handed on to the workers. With a `coordinator` the
    ranks of all its nodes are one job.
    """
    if not debug:
        _quieten_elastic()
    with tempfile.TemporaryDirectory(prefix="cosmos-rl-") as folder:
        exit_file = Path(folder) / "exit"
        handler, address = _rendezvous_alone(), "localhost"
        if coordinator is not None:
            handler, address = coordinator.rendezvous(job_id), coordinator.nodes.address
        spec = _spec(command, nproc, handler, address, max_restarts)
        agent = _Agent(spec, environment, stop, exit_file, coordinator)
        stop.forward = agent.forward
        if stop.requested:
            return stop.exit_code, ""
        try:
            result = cast(RunResult, agent.run())
        except RendezvousError as error:
            reason = str(error) or "the nodes did not join again in time"
            raise JobEnded(EXIT_FAILED, f"the nodes lost each other: {reason}") from error
        finally:
            if coordinator is None:  # other nodes may still need it
                handler.shutdown()  # ends its thread, which must not be in torch while the launcher ends
        failures = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
        code, failure = outcome(stop, exit_file, {rank: failed.exitcode for rank, failed in failures})
        if coordinator is not None and (result.is_failed() or failure):
            coordinator.announce_failure(code, failure)
        return code, failure


def _rendezvous_alone() -> RendezvousHandler:
    """The rendezvous of a job on one node, on a free port."""
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
    )
    return rendezvous.get_rendezvous_handler(parameters)


def _spec(
    command: Sequence[str], nproc: int, handler: RendezvousHandler, address: str, max_restarts: int
) -> WorkerSpec:
    python, *arguments = command
    return WorkerSpec(
        role="policy",
        local_world_size=nproc,
        entrypoint=python,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=MONITOR_SECONDS,
        local_addr=address,
    )


class _Agent(LocalElasticAgent):
    """The elastic agent of one node, which hands stop signals on to its workers in place of killing them."""

    def __init__(
        self,
        spec: WorkerSpec,
        environment: Mapping[str, str],
        stop: StopRequest,
        exit_file: Path,
        coordinator: Coordinator | None,
    ) -> None:
        # The agent would take over these signals; ours are handled by the caller, so it gets none.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        self._workers_environment = _Environment(environment, exit_file)
        super().__init__(spec, self._workers_environment)
        self._coordinator = coordinator
        self._stop = stop
        self._workers = Workers(stop, exit_file)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._workers.clear_exit_files()
        with hold_interrupts():
            live = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        self._workers_environment.starts += 1
        self._workers.record_started(live)
        if self._stop.requested:
            self._remaining_restarts = 0
        return live

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._workers.end_after_user_error()
        if self._workers.has_user_error:
            self._remaining_restarts = 0  # the same error would occur again
        if self._coordinator is not None:
            self._coordinator.exchange()
            if self._stop.requested:
                self.forward()
        return super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _exit_barrier(self) -> None:
        if self._workers.has_user_error:
            return
        if self._coordinator is not None:
            with suppress(JobEnded):
                self._coordinator.announce_done()
        super()._exit_barrier()

    def forward(self) -> None:
        """Hand the stop request on to every worker, and start none again."""
        self._remaining_restarts = 0
        self._workers.forward()


class _Environment(LogsSpecs):
    """Gives every worker its environment; output stays where the launcher's own output goes."""

    def __init__(self, environment: Mapping[str, str], exit_file: Path) -> None:
        super().__init__()
        self._environment = environment
        self._exit_file = exit_file
        self.starts = 0
        """How often workers were started before: the same on all nodes, since all nodes join for every start. The
        agent's own count leaves out the restarts that another node has caused."""

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent with the environment of each local rank before the processes start."""
        for env in envs.values():
            rank = int(env["RANK"])
            env.update(worker_environment(self._environment, self._exit_file, rank=rank, nproc=len(envs)))
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.starts)
        console = dict.fromkeys(envs, "")
        return LogsDest(stdouts=console, stderrs=dict(console), error_files=dict.fromkeys(envs, os.devnull))


def _quieten_elastic() -> None:
    """The agent reports failures in its own words and at length; ours are shorter and follow the worker's traceback."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).disabled = True
