"""One scorer process as the host uses it: start, score within a deadline, kill."""

import asyncio
import collections
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, ClassVar

from cosmos_rl_reward.worker import process_tree
from cosmos_rl_reward.worker.environment import filter_environment
from cosmos_rl_reward.worker.wire import HEAD, pack

logger = logging.getLogger(__name__)
_SCORER = Path(__file__).with_name("scorer.py")
_MAX_REPLY = 64 << 20  # bytes
_GRACE_S = 0.2
_KILLED_S = 10.0  # longest wait for a process that got SIGKILL


class Failed(Exception):
    """The scorer cannot start; the message is the reason."""


class ReplicaExited(Exception):
    """The scorer ended, or was killed, while it had jobs.

    Attributes:
        repeated: all these jobs had been tried before, so it is no evidence against the reward.
    """

    repeated = False


def find_interpreter(venv_python: str) -> str:
    """``python`` is the service's own interpreter; anything else is taken as it is."""
    if venv_python == "python":
        return sys.executable
    return str(Path(venv_python).expanduser())


class Replica:
    """A scorer process. ``start`` once, then ``score`` any number of times, then ``kill``."""

    running: ClassVar[set[int]] = set()  # PIDs of all scorers of this process

    def __init__(self, name: str, venv_python: str, environment: dict[str, str], downloads: bool = False) -> None:
        """``environment``: variables on top of those that every reward gets; ``downloads``: it may use the hub."""
        self.name = name
        self.python = find_interpreter(venv_python)
        self._mark = process_tree.new_mark()
        self._environment = {**filter_environment(os.environ, downloads), **environment, "PYTHONUNBUFFERED": "1"}
        self._environment[process_tree.MARK] = self._mark
        self._log: collections.deque[str] = collections.deque(maxlen=20)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._logging: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def start(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Start the process and load the reward; returns the description of the reward.

        Raises:
            Failed: with the reason.
        """
        own_end, scorer_end = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(self.python, str(_SCORER), str(scorer_end.fileno()), str(os.getpid())),
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[scorer_end.fileno()],
                start_new_session=True,  # Ctrl-C reaches the supervisor only; children of the reward are in it
            )
        except OSError as error:
            own_end.close()
            raise Failed(
                f"interpreter {self.python} cannot be started: {error.strerror}; run cosmos-rl-reward-prepare"
            ) from error
        finally:
            scorer_end.close()
        self.running.add(self._process.pid)
        self._logging = asyncio.create_task(self._keep_log(self._process))
        self._reader, self._writer = await asyncio.open_unix_connection(sock=own_end)
        self._closing = asyncio.create_task(self._close_when_ended())
        try:
            answer = await self._ask(message, timeout_s)
        except TimeoutError:
            await self.kill()
            raise Failed(f"not loaded after {timeout_s:g} s (start_timeout_s)") from None
        except ReplicaExited as error:
            raise Failed(f"{error} while loading") from None
        if not answer["ready"]:
            await self.kill()
            raise Failed(answer["reason"])
        return answer["about"]

    async def score(self, jobs: list[dict[str, str]], deadline_s: float) -> list[dict[str, Any]]:
        """Replies for ``jobs``, in their order.

        Raises:
            ReplicaExited: the process ended or passed the deadline; it has ended in both cases.
        """
        try:
            replies = (await self._ask({"jobs": jobs}, deadline_s))["replies"]
        except TimeoutError:
            await self.kill()
            raise ReplicaExited(f"no answer within {deadline_s:g} s (deadline_s)") from None
        except (ValueError, KeyError, TypeError) as error:  # another process wrote into its channel
            await self.kill()
            raise ReplicaExited(f"the worker's answer cannot be read: {type(error).__name__}: {error}") from error
        if len(replies) != len(jobs):
            await self.kill()
            raise ReplicaExited(f"the worker answered {len(replies)} of {len(jobs)} jobs")
        return replies

    async def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._reader is not None
        assert self._writer is not None
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(pack(message))
                await self._writer.drain()
                length = HEAD.unpack(await self._reader.readexactly(HEAD.size))[0]
                if length > _MAX_REPLY:
                    raise OSError("the reply is too long")
                return json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise ReplicaExited(await self.exit_reason()) from None

    async def wait_until_ended(self) -> None:
        """Wait until the process has ended."""
        assert self._process is not None
        await self._process.wait()

    async def _close_when_ended(self) -> None:
        """Close the channel when the process has ended, even when a child of it still holds the other end."""
        await self.wait_until_ended()
        await asyncio.sleep(_GRACE_S)  # its last answer may be on the way
        assert self._writer is not None
        self._writer.close()

    async def exit_reason(self) -> str:
        """How the process ended; it does not run any more afterwards."""
        await self.kill(5.0)  # its side of the channel is closed, so it is ending by itself: wait for its own exit code
        assert self._process is not None
        code = self._process.returncode or 0
        text = f"the worker process ended with exit code {code}"
        if code < 0:
            text = f"the worker process ended by signal {signal.Signals(-code).name}"
        if last := " | ".join(list(self._log)[-3:]):
            text += f"; its last lines: {last}"
        return text

    async def kill(self, grace_s: float = 0.0) -> None:
        """Kill the process and its descendants; it may end by itself within ``grace_s``."""
        if self._process is None:
            return
        if self._process.returncode is None:
            if self._writer is not None:
                self._writer.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        children = await asyncio.to_thread(process_tree.list_descendants, self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(process_tree.kill_marked, self._mark, children)
        with contextlib.suppress(TimeoutError):  # asyncio also waits for processes that still have its standard output
            async with asyncio.timeout(_KILLED_S):
                await self._process.wait()
        self.running.discard(self._process.pid)
        if self._logging is not None:
            await asyncio.wait({self._logging}, timeout=1)

    async def _keep_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await _line(process.stdout):
            text = line.decode(errors="replace").rstrip()
            if text:
                self._log.append(text[:500])
                logger.info("[%s] %s", self.name, text[:2000])


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:  # a line longer than the buffer; the rest comes next
        return await stream.read(1 << 16)
