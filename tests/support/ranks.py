"""Starts real ranks on this machine, joined by gloo."""

import os
import socket
import subprocess
from pathlib import Path

from cosmos_rl.launcher.ranks.worker_script import python_call
from tests.support.paths import ROOT
from tests.support.patience import exit_code


def train_on_ranks(
    count: int,
    config: Path,
    folder: Path,
    *overrides: str,
    resume_step: int = 0,
    module: str = "tests.support.rank_job",
) -> Path:
    """Train with ``count`` ranks into ``folder``; the folder. Fails with the first failing rank's output."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = python_call(["-m", module, str(config), str(folder), str(resume_step), *overrides])
    processes = []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for rank in range(count):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, "PYTHONPATH": path, **{k: str(v) for k, v in place.items()}}
        with (folder / f"rank_{rank}.log").open("ab") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [exit_code(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = [(folder / f"rank_{rank}.log").read_text() for rank in range(count)]
    failed = [f"rank {rank}:\n{log[-3000:]}" for rank, (code, log) in enumerate(zip(codes, logs, strict=True)) if code]
    assert not failed, "\n".join(failed)
    return folder


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
