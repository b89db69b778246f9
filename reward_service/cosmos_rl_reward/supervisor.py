"""The process of ``cosmos-rl-reward``: starts broker, workers and front, restarts them when they exit, stops them."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cosmos_rl_reward.broker.embedded import (
    BROKER_LOG,
    die_with_parent,
    make_private_folder,
    make_server_command,
    wait_for_socket,
)
from cosmos_rl_reward.config import RESTARTS_VARIABLE, ServiceConfig
from cosmos_rl_reward.errors import UserError
from cosmos_rl_reward.front.auth import Auth
from cosmos_rl_reward.locks import try_lock
from cosmos_rl_reward.store import open_spool
from cosmos_rl_reward.worker import process_tree

logger = logging.getLogger(__name__)
BROKER_VARIABLE = "COSMOS_RL_REWARD_INTERNAL_BROKER"
_BACK_OFF_S = (0.1, 0.3, 1.0, 2.0, 5.0)
_MAX_SOCKET = 100  # characters; a unix socket's path has room for 107

# of the C library: no heap for each thread, and the memory of one body serves for the next one instead of going back to
# the kernel, which would have to clear it again
_MALLOC = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
}


@dataclass
class Child:
    """One process to keep alive. ``text`` is written to its standard input."""

    name: str
    command: list[str]
    text: bytes = b""
    fds: tuple[int, ...] = ()
    before: Callable[[], None] | None = None
    process: asyncio.subprocess.Process | None = None
    wanted: bool = True
    restarts: int = 0
    log: Path | None = None  # its last lines are shown when the process exits

    async def run(self) -> int:
        """Run the process, and restart it when it exits, until ``end``. Returns 2 when its settings are wrong."""
        failures = 0
        while self.wanted:
            if self.before is not None:
                self.before()
            began = asyncio.get_running_loop().time()
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                pass_fds=self.fds,
                start_new_session=True,
                preexec_fn=die_with_parent,
                env={**os.environ, RESTARTS_VARIABLE: str(self.restarts)},
            )
            with contextlib.suppress(ConnectionError):
                await self.process.communicate(self.text)
            code = await self.process.wait()
            if not self.wanted:
                return 0
            if code == 2:
                return 2
            self.restarts += 1
            failures += 1
            if asyncio.get_running_loop().time() - began >= 10:
                failures = 0
            logger.error("%s ended with code %s, restarting it%s", self.name, code, self._last_lines())
            await asyncio.sleep(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])
        return 0

    def _last_lines(self) -> str:
        if self.log is None or not self.log.is_file():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
        if not lines:
            return ""
        return "; its last lines: " + " | ".join(lines)

    def signal(self, number: int) -> None:
        """Send a signal if it runs."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def end(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL after ``timeout_s``."""
        self.wanted = False
        if self.process is None:
            return
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            logger.warning("%s did not end within %g s and is killed", self.name, timeout_s)
            self.signal(signal.SIGKILL)
            await self.process.wait()


def bind(config: ServiceConfig) -> socket.socket:
    """The listening socket; a new front takes it over, so no connection is refused while one is replaced.

    Raises:
        UserError: the address is not of this machine or the port is in use.
    """
    host = "127.0.0.1" if config.host == "localhost" else config.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, config.port))
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{config.port}: {error.strerror}; set host and port") from error
    listener.listen(1024)
    return listener


def lock(folder: Path) -> IO[str]:
    """Own the state folder as long as the returned file is open.

    Raises:
        UserError: another service has it, or it cannot be written.
    """
    try:
        make_private_folder(folder)
        file = try_lock(folder / "lock")
    except OSError as error:
        raise UserError(f"state_dir {folder}: {error.strerror}; set state_dir to a folder of your own") from error
    if file is None:
        raise UserError(f"state_dir {folder} is in use by another service; stop it, or set another state_dir")
    return file


def make_role_command(role: str, *arguments: str) -> list[str]:
    """Command line of a process of the service; its configuration is sent to standard input."""
    return [sys.executable, "-P", "-m", "cosmos_rl_reward.roles", role, *arguments]


class Service:
    """Everything that one ``cosmos-rl-reward`` runs."""

    def __init__(self, config: ServiceConfig, workers: bool = True) -> None:
        Auth(config)  # wrong tokens are found here, not in a child
        self.config = config
        self._lock = lock(config.state)
        open_spool(config).check()
        self._listener = bind(config)
        self._run = make_private_folder(config.state / "run")
        if len(str(self._run)) > _MAX_SOCKET - len("/broker.sock"):
            self._run = Path(tempfile.mkdtemp(prefix="cosmos-rl-reward-"))
        self._socket = self._run / "broker.sock"
        self._broker_url = config.external_broker or f"unix://{self._socket}"
        text = config.model_dump_json().encode()
        fd = self._listener.fileno()
        self.front = Child("front", make_role_command("front", str(fd)), text, (fd,))
        self.workers = Child("workers", make_role_command("workers"), text)
        self.broker = Child("broker", [], before=lambda: self._socket.unlink(missing_ok=True))
        self._children = [self.front]
        if workers:
            self._children.append(self.workers)
        if not config.external_broker:
            self.broker.command = make_server_command(self._socket, self._run)
            self.broker.log = self._run / BROKER_LOG
            self._children.insert(0, self.broker)

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT (a second one does not wait for jobs). Returns the exit code."""
        os.environ[BROKER_VARIABLE] = self._broker_url
        for name, value in _MALLOC.items():
            os.environ.setdefault(name, value)
        stop, now = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                now.set()
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        running: list[asyncio.Task[int]] = []
        code = 0
        try:
            for child in self._children:
                running.append(asyncio.create_task(child.run()))
                if child is self.broker:
                    await wait_for_socket(self._socket, 10)
            host, port = self._listener.getsockname()[:2]
            logger.info("listening on http%s://%s:%d", "s" if self.config.tls_cert else "", host, port)
            stopping = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait({stopping, *running}, return_when=asyncio.FIRST_COMPLETED)
            code = max((task.result() for task in done & set(running)), default=0)
        finally:
            await self._end(now)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return code

    async def _end(self, now: asyncio.Event) -> None:
        """Front first refuses new jobs, workers finish, then the front ends, then the broker."""
        logger.info("stopping: running jobs get %g s", self.config.drain_s)
        self.front.signal(signal.SIGUSR1)
        draining = asyncio.create_task(self.workers.end(self.config.drain_s + 5))
        skipping = asyncio.create_task(now.wait())
        await asyncio.wait({draining, skipping}, return_when=asyncio.FIRST_COMPLETED)
        if now.is_set():
            self.workers.signal(signal.SIGKILL)
        await draining
        skipping.cancel()
        await asyncio.to_thread(process_tree.kill_leftovers)
        await self.front.end(8)
        await self.broker.end(3)
        self._listener.close()
        shutil.rmtree(self._run, ignore_errors=True)
        self._lock.close()
        logger.info("stopped")
