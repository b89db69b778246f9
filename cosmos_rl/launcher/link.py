"""What the launchers of several machines tell each other, through torch's TCPStore on node 0.

Node 0 makes the run folder and the configuration and publishes them as a plan. Every other node looks whether it can
follow and answers. Only when all have agreed does torch's elastic rendezvous, which goes through the same store, begin.
Afterwards a stop request or the end of one node reaches the others here. Importing this costs seconds.
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
from cosmos_rl.launcher.nodes import JobEnded, JobPlan, Nodes
from cosmos_rl.launcher.signals import EXIT_FAILED, StopRequest

MEET_S = 600.0
"""So long the nodes wait for each other at the start."""
_PARTING_S = 20.0
"""So long a node that ends with an error waits until the others know."""
_SEEN_S = 60.0
"""So long a node waits until a folder that node 0 has made is seen on its own disk."""
_BEAT_S = 1.0
"""Between two signs of life."""
SILENT_S = 90.0
"""A node without one for so long is gone; ending workers that hang may take it 30 s."""
_REJOIN = datetime.timedelta(minutes=5)
_CALL = datetime.timedelta(seconds=60)
_POLL_S = 0.1


class Link:
    """The connection of one launcher to the others."""

    def __init__(self, nodes: Nodes, stop: StopRequest, *, meet_s: float = MEET_S, silent_s: float = SILENT_S) -> None:
        """Open the store (node 0) or find it.

        Raises:
            UserError: the port cannot be opened.
            JobEnded: node 0 does not come, or a stop request does.
        """
        self.nodes = nodes
        self._stop = stop
        self._meet_s = meet_s
        self._deadline = time.monotonic() + meet_s
        self._silent_s = silent_s
        self._stop_told = False
        self._last_beat = -math.inf
        self._beats: dict[int, tuple[int, float]] = {}  # other node -> its signs of life, and when the last came
        self._store = self._open() if nodes.index == 0 else self._found()

    # ---- before the job ----------------------------------------------------------------------------------------

    def lead(self, plan: JobPlan) -> None:
        """Node 0: publish the plan and wait until all others have agreed to it.

        Raises:
            UserError: one of them cannot follow.
            JobEnded: one of them does not come, or a stop request does.
        """
        self._set("plan", json.dumps(asdict(plan)))
        for index in range(1, self.nodes.count):
            self._await(f"answer/{index}", f"{self.nodes.described(index)} (--worker-idx {index})")
            problem = self._get(f"answer/{index}")
            if problem:
                raise UserError(f"{self.nodes.described(index)}: {problem}")
        self._set("go", "")

    def follow(self) -> JobPlan:
        """Other nodes: the plan of node 0.

        Raises:
            UserError: this command is not for the job of node 0.
            JobEnded: node 0 has an error, or a stop request came.
        """
        index = self.nodes.index
        if self._call("add", f"came/{index}", 1) > 1:
            raise UserError(f"--worker-idx {index}: another command has come to {self.nodes.meeting_point} with it")
        self._await("plan", f"a plan of {self.nodes.described(0)}")
        return JobPlan(**json.loads(self._get("plan")))

    def agree(self, plan: JobPlan, check: Callable[[Path], None]) -> None:
        """Other nodes: run `check` on the configuration of the plan, answer, and wait until all nodes have agreed.

        Raises:
            UserError: this machine cannot follow; node 0 knows.
            JobEnded: another one cannot, or a stop request came.
        """
        try:
            if plan.nodes != self.nodes.count:
                raise UserError(f"--num-workers {self.nodes.count}: node 0 was started with {plan.nodes}")
            check(self._seen(Path(plan.run)))
        except UserError as error:
            self._set(f"knows/{self.nodes.index}", "")
            self._set(f"answer/{self.nodes.index}", str(error))
            raise
        self._set(f"answer/{self.nodes.index}", "")
        self._await("go", "all other nodes")

    def _seen(self, run: Path) -> Path:
        """The run folder, once this machine sees what node 0 has written there: network disks take a moment."""
        end = time.monotonic() + min(_SEEN_S, self._meet_s)
        while not (run / ".next" / "config.toml").is_file():
            if time.monotonic() > end:
                raise UserError(
                    f"{run} of {self.nodes.described(0)} is not seen on {self.nodes.described(self.nodes.index)}: "
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
        """Give a sign of life, hand a stop request of this node on to the others, and take over theirs.

        Raises:
            JobEnded: another node has ended or is gone.
        """
        self._beat()
        if self._stop.requested and not self._stop_told:
            self._stop_told = True
            self._set("stop", self._stop.requested)
        elif not self._stop.requested and self._has("stop"):
            self._stop_told = True
            self._stop.note(self._get("stop"))
        if self._has("end"):
            end = json.loads(self._get("end"))
            self._set(f"knows/{self.nodes.index}", "")
            raise JobEnded(end["code"], end["reason"])

    def finished(self) -> None:
        """The workers of this node are done; from now on it gives no sign of life."""
        self._set(f"done/{self.nodes.index}", "")

    def ended(self, code: int, reason: str) -> None:
        """Tell the others that the job has ended on this node before its time; node 0 waits until they know."""
        with contextlib.suppress(JobEnded):
            if not self._has("end"):
                where = f"{self.nodes.described(self.nodes.index)}: {reason}" if reason else ""
                self._set("end", json.dumps({"code": code, "reason": where}))
            self._set(f"knows/{self.nodes.index}", "")
            if self.nodes.index == 0:
                self._part()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _open(self) -> TCPStore:
        try:
            return TCPStore(self.nodes.address, self.nodes.port, is_master=True, wait_for_workers=False, timeout=_CALL)
        except (RuntimeError, ValueError) as error:
            in_use = "in use" in str(error)
            why = "the port is in use" if in_use else str(error).partition("\n")[0]
            raise UserError(
                f"{self.nodes.meeting_point} cannot be opened: {why}; --rdzv-port takes another port, and "
                "the first address of --node-ip-list must be that of this machine"
            ) from error

    def _found(self) -> TCPStore:
        what = f"{self.nodes.described(0)}, which should listen on port {self.nodes.port} (--worker-idx 0)"
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
                raise JobEnded(EXIT_FAILED, f"waited {self._meet_s:g} s in vain for {what}")
            yield
            time.sleep(_POLL_S)

    def _beat(self) -> None:
        """A sign of life; node 0 looks for those of the others, who notice its own end by the lost connection."""
        now = time.monotonic()
        looked_away = now - self._last_beat > self._silent_s / 2
        if now - self._last_beat < min(_BEAT_S, self._silent_s / 4):
            return
        self._last_beat = now
        self._call("add", f"beat/{self.nodes.index}", 1)
        for other in range(1, self.nodes.count) if self.nodes.index == 0 else ():
            beats = self._call("add", f"beat/{other}", 0)
            before, when = self._beats.get(other, (0, now))
            if beats != before or looked_away:
                self._beats[other] = (beats, now)
            elif beats and now - when > self._silent_s and not self._has(f"done/{other}"):
                raise JobEnded(EXIT_FAILED, f"{self.nodes.described(other)} is gone: silent for {self._silent_s:g} s")

    def _part(self) -> None:
        end = time.monotonic() + min(_PARTING_S, self._meet_s)
        others = [f"knows/{index}" for index in range(self.nodes.count) if index != self.nodes.index]
        while not self._stop.insisted and time.monotonic() < end and not self._call("check", others):
            time.sleep(_POLL_S)

    def _has(self, key: str) -> bool:
        return self._call("check", [key])

    def _get(self, key: str) -> str:
        return self._call("get", key).decode()

    def _set(self, key: str, value: str) -> None:
        self._call("set", key, value)

    def _call(self, name: str, key: str | list[str], *values: str | int):
        keys = [f"cosmos/{one}" for one in key] if isinstance(key, list) else f"cosmos/{key}"
        try:
            return getattr(self._store, name)(keys, *values)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise JobEnded(
                EXIT_FAILED, f"the connection to {self.nodes.described(0)} is lost; see its output"
            ) from error


class _InOrder(DynamicRendezvousHandler):
    """torch numbers the nodes by address and process; here rank 0 belongs on node 0, which holds the run folder."""

    index = 0

    def next_rendezvous(self) -> RendezvousInfo:
        found = super().next_rendezvous()
        assert found.bootstrap_store_info is not None
        return RendezvousInfo(found.store, self.index, found.world_size, found.bootstrap_store_info)
