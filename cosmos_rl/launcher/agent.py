"""Starting, watching and restarting the worker processes with torch's elastic agent. Importing this costs seconds."""

import logging
import os
import signal
import tempfile
import time
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

from cosmos_rl.launcher.link import Link
from cosmos_rl.launcher.nodes import JobEnded
from cosmos_rl.launcher.signals import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    ON_PURPOSE,
    STOP_SIGNALS,
    StopRequest,
    interrupts_held,
)
from cosmos_rl.launcher.supervised import ready_file

_MONITOR_SECONDS = 0.1
_ALONE_SECONDS = 10.0
"""So long ranks may go on after another one has met a mistake of the user's."""


def run_workers(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    stop: StopRequest,
    nproc: int = 1,
    max_restarts: int = 0,
    debug: bool = False,
    link: Link | None = None,
    job_id: str = "",
) -> tuple[int, str]:
    """Run `command` as `nproc` ranks until they end; returns the exit code and what failed or is wrong.

    The caller records signals in `stop`; from here on they are handed on to the workers. With a `link` the ranks of all
    its nodes are one job.
    """
    if not debug:
        _quieten_elastic()
    with tempfile.TemporaryDirectory(prefix="cosmos-rl-") as folder:
        exit_file = Path(folder) / "exit"
        handler = link.rendezvous(job_id) if link else _alone()
        address = link.nodes.address if link else "localhost"
        spec = _spec(command, nproc, handler, address, max_restarts)
        agent = _Agent(spec, environment, stop, exit_file, link)
        stop.forward = agent.forward
        if stop.requested:
            return stop.exit_code, ""
        try:
            result = cast(RunResult, agent.run())
        except RendezvousError as error:
            reason = str(error) or "the nodes did not meet again in time"
            raise JobEnded(EXIT_FAILED, f"the job of several nodes has fallen apart: {reason}") from error
        code, failure = _outcome(result, stop, exit_file)
        if link is not None and (result.is_failed() or failure):
            link.ended(code, failure)
        return code, failure


def _outcome(result: RunResult, stop: StopRequest, exit_file: Path) -> tuple[int, str]:
    """The exit code that the workers' ends amount to, and what failed or is wrong."""
    if stop.insisted:
        return EXIT_INTERRUPTED, ""
    messages = dict.fromkeys(
        path.read_text(encoding="utf-8") for path in sorted(exit_file.parent.glob("exit.*.message"))
    )
    if messages:  # a rank that has something to say takes the others down with it, by a lost connection
        return EXIT_USER_ERROR if EXIT_USER_ERROR in _codes(exit_file) else EXIT_FAILED, "\n".join(messages)
    if result.is_failed():
        by_signal = {-getattr(signal, name) for name in STOP_SIGNALS}
        asked_to = all(failure.exitcode in by_signal for failure in result.failures.values())
        if stop.requested and asked_to:  # it had not begun to work yet, so there is nothing to save
            return stop.exit_code, ""
        return EXIT_FAILED, _describe(result)
    if not any(exit_file.parent.glob("exit.*.ready")):
        return EXIT_FAILED, "the script ended without calling cosmos_rl.launcher.worker_entry.main"
    codes = _codes(exit_file)
    return next((code for code in ON_PURPOSE if code in codes), 0), ""


def _codes(exit_file: Path) -> set[int]:
    """The codes with which workers have ended on purpose."""
    texts = [path.read_text(encoding="utf-8") for path in exit_file.parent.glob("exit.*[0-9]")]
    return {int(text) for text in texts if text}  # an empty one is just being written


def _alone() -> RendezvousHandler:
    """The rendezvous of a job on one machine, on a free port."""
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
        monitor_interval=_MONITOR_SECONDS,
        local_addr=address,
    )


class _Agent(LocalElasticAgent):
    """The elastic agent of one machine, which hands stop signals on to its workers in place of killing them."""

    def __init__(
        self,
        spec: WorkerSpec,
        environment: Mapping[str, str],
        stop: StopRequest,
        exit_file: Path,
        link: Link | None,
    ) -> None:
        # The agent would take over these signals; ours are handled by the caller, so it gets none.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        self._workers_environment = _Environment({**environment, "COSMOS_EXIT_FILE": str(exit_file)})
        super().__init__(spec, self._workers_environment)
        self._link = link
        self._stop = stop
        self._exit_file = exit_file
        self._live: dict[int, int] = {}
        self._told: set[int] = set()
        self._mistake_at: float | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for stale in self._exit_file.parent.glob("exit.*"):
            stale.unlink()
        with interrupts_held():
            self._live = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        self._workers_environment.starts += 1
        if self._stop.requested:  # it came while they were being started
            self.forward()
        return self._live

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._end_after_a_mistake()
        if self._link is not None:
            self._link.exchange()
            if self._stop.requested:
                self.forward()
        return super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _end_after_a_mistake(self) -> None:
        """A rank that met a user's mistake is gone; ranks that wait for it would do so until a collective times out."""
        if EXIT_USER_ERROR not in _codes(self._exit_file):
            return
        self._remaining_restarts = 0  # the same mistake would be met again
        self._mistake_at = self._mistake_at or time.monotonic()
        if time.monotonic() - self._mistake_at > _ALONE_SECONDS:
            for pid in self._live.values():
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _exit_barrier(self) -> None:
        if self._mistake_at is not None:
            return
        if self._link is not None:
            with suppress(JobEnded):
                self._link.finished()
        super()._exit_barrier()

    def forward(self) -> None:
        """Hand the stop request on to every worker, once; kill them when it is insisted on."""
        self._remaining_restarts = 0
        for local_rank, pid in self._live.items():
            with suppress(ProcessLookupError):
                if self._stop.insisted:
                    os.killpg(pid, signal.SIGKILL)
                elif pid not in self._told and self._stop.requested:
                    # A worker that is still importing has nothing to save, and would die of SIGINT with a traceback.
                    ready = ready_file(Path(f"{self._exit_file}.{local_rank}")).exists()
                    self._told.add(pid)
                    os.kill(pid, getattr(signal, self._stop.requested if ready else "SIGTERM"))


class _Environment(LogsSpecs):
    """Gives every worker its environment; output stays where the launcher's own output goes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._environment = environment
        self.starts = 0
        """How often workers were started before: the same on all nodes, since every start is a meeting of all. The
        agent's own count leaves out the restarts that another node has caused."""

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent with the environment of each local rank before the processes start."""
        for env in envs.values():
            env.update(self._environment)
            env["COSMOS_ROLE"] = "Controller" if env["RANK"] == "0" else "Policy"
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.starts)
            env["COSMOS_LAUNCHER_PID"] = str(os.getpid())
            env["PYTHONUNBUFFERED"] = "1"
            if "OMP_NUM_THREADS" not in os.environ:
                env["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // len(envs)))
        console = dict.fromkeys(envs, "")
        return LogsDest(stdouts=console, stderrs=dict(console), error_files=dict.fromkeys(envs, os.devnull))


def _describe(result: RunResult) -> str:
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    rank = next(rank for rank, failure in result.failures.items() if failure is first)
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the worker of rank {rank} was ended by {name}{hint}"
    return f"the worker of rank {rank} ended with exit code {first.exitcode}"


def _quieten_elastic() -> None:
    """The agent reports failures in its own words and at length; ours are shorter and follow the worker's traceback."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).disabled = True
