"""The worker of a job of one rank that is never restarted. Needs no agent, so the launcher never loads torch."""

import os
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cosmos_rl.launcher.ranks.signals import StopRequest, hold_interrupts
from cosmos_rl.launcher.ranks.workers import MONITOR_SECONDS, Workers, outcome, worker_environment


def run_worker(command: Sequence[str], *, environment: Mapping[str, str], stop: StopRequest) -> tuple[int, str]:
    """Run `command` as the only rank until it ends; the exit code and what failed, as `agent.run_workers` returns them.

    The caller records signals in `stop`; from here on they are handed on to the worker.
    """
    with tempfile.TemporaryDirectory(prefix="cosmos-rl-") as folder:
        exit_file = Path(folder) / "exit"
        workers = Workers(stop, exit_file)
        stop.forward = workers.forward
        if stop.requested:
            return stop.exit_code, ""
        surroundings = {
            **os.environ,
            **_rank_variables(),
            **worker_environment(environment, exit_file, rank=0, nproc=1),
        }
        with hold_interrupts():
            process = subprocess.Popen(command, env=surroundings, start_new_session=True)
        try:
            workers.record_started({0: process.pid})
            while process.returncode is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(MONITOR_SECONDS)
                workers.end_after_user_error()
        finally:
            if process.poll() is None:
                workers.kill()
                process.wait()
        return outcome(stop, exit_file, {0: process.returncode} if process.returncode else {})


def _rank_variables() -> dict[str, str]:
    """Rank and addresses of the only rank, by the names that torch's agent gives, for scripts that read them."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    zero, one = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {
        **dict.fromkeys(zero, "0"),
        **dict.fromkeys((*one, "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1"),
        "ROLE_NAME": "policy",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
    }
