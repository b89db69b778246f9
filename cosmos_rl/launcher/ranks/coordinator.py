"""How the launchers of several nodes work together, through torch's TCPStore on node 0.

Node 0 makes the run folder and the configuration and publishes them as a plan. Every other node checks
that it can run it and confirms. Only then does torch's elastic rendezvous, which uses the same store, begin. Afterwards
a stop request or the end of one node reaches the others here. Importing this costs seconds.
"""

import contextlib
import datetime
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost connection is reported here, in one line

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.ranks.nodes import JobEnded, JobPlan, Nodes
from cosmos_rl.launcher.ranks.signals import EXIT_FAILED, StopRequest

JOIN_S = 600.0
"""So long the nodes wait for each other at the start."""
_SHUTDOWN_GRACE_S = 20.0
"""So long a node that ends with an error waits until the others know."""
_VISIBLE_S = 60.0
"""So long a node waits until a folder that node 0 has made is visible on its own disk."""
_HEARTBEAT_S = 1.0
"""Between two heartbeats."""
SILENT_S = 90.0
"""A node without a heartbeat for so long is lost; ending workers that hang may take it 30 s."""
_REJOIN = datetime.timedelta(minutes=5)
_CALL = datetime.timedelta(seconds=60)
_POLL_S = 0.1
_PREFIX = "cosmos/"


class Coordinator:
    """The connection of one launcher to the others."""

    def __init__(self, nodes: Nodes, stop: StopRequest, *, join_s: float = JOIN_S, silent_s: float = SILENT_S) -> None:
        """Open the store (node 0) or connect to it.

        Raises:
            UserError: the port cannot be opened.
            JobEnded: node 0 does not come, or a stop request does.
        """
        self.nodes = nodes
        self._stop = stop
        self._join_s = join_s
        self._deadline = time.monotonic() + join_s
        self._silent_s = silent_s
        self._stop_sent = False
        self._last_heartbeat = -math.inf
        self._heartbeats: dict[
            int, tuple[int, float]
        ] = {}  # other node -> its heartbeats, and when the last one arrived
        if nodes.index == 0:
            self._store = self._open()
        else:
            self._store = self._connect()

    # ---- before the job ----------------------------------------------------------------------------------------

    def publish_plan(self, plan: JobPlan) -> None:
        """Node 0: publish the plan and wait until all others have confirmed it.

        Raises:
            UserError: one of them cannot run it.
            JobEnded: one of them does not come, or a stop request does.
        """
        self._set("plan", json.dumps(asdict(plan)))
        for index in range(1, self.nodes.count):
            self._await(f"answer/{index}", f"{self.nodes.describe(index)} (--worker-idx {index})")
            problem = self._get(f"answer/{index}")
            if problem:
                raise UserError(f"{self.nodes.describe(index)}: {problem}")
        self._set("go", "")

    def receive_plan(self) -> JobPlan:
        """Other nodes: the plan of node 0.

        Raises:
            UserError: this command is not for the job of node 0.
            JobEnded: node 0 has an error, or a stop request came.
        """
        index = self.nodes.index
        if self._add(f"joined/{index}", 1) > 1:
            raise UserError(f"--worker-idx {index}: another command has joined {self.nodes.endpoint} with this index")
        self._await("plan", f"a plan of {self.nodes.describe(0)}")
        return JobPlan(**json.loads(self._get("plan")))

    def confirm(self, plan: JobPlan, check: Callable[[Path], None]) -> None:
        """Other nodes: run `check` on the configuration of the plan, answer, and wait until all nodes have confirmed.

        Raises:
            UserError: this node cannot run it; node 0 knows.
            JobEnded: another one cannot, or a stop request came.
        """
        try:
            if plan.nodes != self.nodes.count:
                raise UserError(f"--num-workers {self.nodes.count}: node 0 was started with {plan.nodes}")
            check(self._wait_for_run_folder(Path(plan.run)))
        except UserError as error:
            self._set(f"knows/{self.nodes.index}", "")
            self._set(f"answer/{self.nodes.index}", str(error))
            raise
        self._set(f"answer/{self.nodes.index}", "")
        self._await("go", "all other nodes")

    def _wait_for_run_folder(self, run: Path) -> Path:
        """The run folder, once what node 0 has written there is visible here: network disks take a moment."""
        end = time.monotonic() + min(_VISIBLE_S, self._join_s)
        while not (run / ".next" / "config.toml").is_file():
            if time.monotonic() > end:
                raise UserError(
                    f"{run} of {self.nodes.describe(0)} is not visible on {self.nodes.describe(self.nodes.index)}: "
                    "train.output_dir must be on a disk that all nodes share"
                )
            time.sleep(_POLL_S)
        return run

    # ---- while the job runs ------------------------------------------------------------------------------------

    def rendezvous(self, job_id: str) -> DynamicRendezvousHandler:
        """torch's c10d rendezvous of exactly these nodes, through the same store."""
        backend = C10dRendezvousBackend(self._store, job_id)
        count, address = self.nodes.count, self.nodes.address
        timeout = RendezvousTimeout(join=_REJOIN)
        handler = _InOrder.from_backend(job_id, self._store, backend, count, count, address, timeout)
        handler.index = self.nodes.index
        return handler

    def exchange(self) -> None:
        """Send a heartbeat, hand a stop request of this node on to the others, and take over theirs.

        Raises:
            JobEnded: another node has ended or is lost.
        """
        self._send_heartbeat()
        if self._stop.requested and not self._stop_sent:
            self._stop_sent = True
            self._set("stop", self._stop.requested)
        elif not self._stop.requested and self._has("stop"):
            self._stop_sent = True
            self._stop.note(self._get("stop"))
        if self._has("end"):
            end = json.loads(self._get("end"))
            self._set(f"knows/{self.nodes.index}", "")
            raise JobEnded(end["code"], end["reason"])

    def announce_done(self) -> None:
        """The workers of this node are done; from now on it sends no heartbeat."""
        self._set(f"done/{self.nodes.index}", "")

    def announce_failure(self, code: int, reason: str) -> None:
        """The job has ended on this node before its time; node 0 waits until the others know."""
        with contextlib.suppress(JobEnded):
            if not self._has("end"):
                if reason:
                    reason = f"{self.nodes.describe(self.nodes.index)}: {reason}"
                self._set("end", json.dumps({"code": code, "reason": reason}))
            self._set(f"knows/{self.nodes.index}", "")
            if self.nodes.index == 0:
                self._wait_for_others()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _open(self) -> TCPStore:
        try:
            return TCPStore(self.nodes.address, self.nodes.port, is_master=True, wait_for_workers=False, timeout=_CALL)
        except (RuntimeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            if "in use" in why:
                why = "the port is in use"
            raise UserError(
                f"{self.nodes.endpoint} cannot be opened: {why}; --rdzv-port takes another port, and "
                "the first address of --node-ip-list must be that of this machine"
            ) from error

    def _connect(self) -> TCPStore:
        what = f"{self.nodes.describe(0)}, which should listen on port {self.nodes.port} (--worker-idx 0)"
        for _ in self._until_deadline(what):
            try:
                socket.create_connection((self.nodes.addresses[0], self.nodes.port), timeout=1.0).close()
                return TCPStore(self.nodes.addresses[0], self.nodes.port, wait_for_workers=False, timeout=_CALL)
            except (OSError, RuntimeError, ValueError):
                continue
        raise AssertionError

    def _await(self, key: str, what: str) -> None:
        for _ in self._until_deadline(what):
            if self._has(key):
                return
            self.exchange()

    def _until_deadline(self, what: str) -> Iterator[None]:
        while True:
            if self._stop.requested:
                raise JobEnded(self._stop.exit_code, "")
            if time.monotonic() > self._deadline:
                raise JobEnded(EXIT_FAILED, f"timed out after {self._join_s:g} s, waiting for {what}")
            yield
            time.sleep(_POLL_S)

    def _send_heartbeat(self) -> None:
        """Node 0 checks those of the others, who notice its own end by the lost connection."""
        now = time.monotonic()
        was_suspended = now - self._last_heartbeat > self._silent_s / 2
        if now - self._last_heartbeat < min(_HEARTBEAT_S, self._silent_s / 4):
            return
        self._last_heartbeat = now
        self._add(f"heartbeat/{self.nodes.index}", 1)
        if self.nodes.index == 0:
            for other in range(1, self.nodes.count):
                self._check_heartbeat(other, now, was_suspended=was_suspended)

    def _check_heartbeat(self, other: int, now: float, *, was_suspended: bool) -> None:
        """`was_suspended`: this process has not run for a while, which says nothing about the other node."""
        count = self._add(f"heartbeat/{other}", 0)
        before, when = self._heartbeats.get(other, (0, now))
        if count != before or was_suspended:
            self._heartbeats[other] = (count, now)
        elif count and now - when > self._silent_s and not self._has(f"done/{other}"):
            raise JobEnded(EXIT_FAILED, f"{self.nodes.describe(other)} is lost: no heartbeat for {self._silent_s:g} s")

    def _wait_for_others(self) -> None:
        end = time.monotonic() + min(_SHUTDOWN_GRACE_S, self._join_s)
        others = [f"knows/{index}" for index in range(self.nodes.count) if index != self.nodes.index]
        while not self._stop.insisted and time.monotonic() < end and not self._has(*others):
            time.sleep(_POLL_S)

    # ---- the store -----------------------------------------------------------------------------------------------

    def _has(self, *keys: str) -> bool:
        with self._report_lost_connection():
            return self._store.check([f"{_PREFIX}{key}" for key in keys])

    def _get(self, key: str) -> str:
        with self._report_lost_connection():
            return self._store.get(f"{_PREFIX}{key}").decode()

    def _set(self, key: str, value: str) -> None:
        with self._report_lost_connection():
            self._store.set(f"{_PREFIX}{key}", value)

    def _add(self, key: str, number: int) -> int:
        with self._report_lost_connection():
            return self._store.add(f"{_PREFIX}{key}", number)

    @contextlib.contextmanager
    def _report_lost_connection(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise JobEnded(
                EXIT_FAILED, f"the connection to {self.nodes.describe(0)} is lost; see its output"
            ) from error


class _InOrder(DynamicRendezvousHandler):
    """torch numbers the nodes by address and process; here rank 0 belongs on node 0, which holds the run folder."""

    index = 0

    def next_rendezvous(self) -> RendezvousInfo:
        found = super().next_rendezvous()
        assert found.bootstrap_store_info is not None
        return RendezvousInfo(found.store, self.index, found.world_size, found.bootstrap_store_info)
