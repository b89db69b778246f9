"""Limits of a connection before its token is checked.

The parser of uvicorn's fast protocol has no limits of its own. Here the bytes that lead to nothing (a request line,
headers, trailers, chunk extensions without end) are counted, every head and every rest of a body has its time, and when
there are too many connections those without a whole request make room. When thousands of connections send or end at
once, a few are handled at a time, so that the health check is answered in between.
"""

import asyncio
import functools
import resource
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_BYTES = 64 << 10  # of a request line and its headers, and of anything else that is neither body nor request
HEAD_S = 20.0  # for a whole head
_BODY_BYTES = 256 << 10  # of a body that wait for the application: what the event loop reads at a time
_REST_S = 10.0  # for the rest of a body whose answer is already given
_READ_S = 60.0  # for a client to read something of an answer that waits for it
_PIPELINED = 8  # requests of one connection that wait for an answer before them
_RESERVED_FILES = 96  # open files and sockets that are not connections
_HEALTH_CHECK = b"GET /healthz "
_PER_ROUND = 16  # pieces of input, or ends, that one round of the event loop handles: about 1 ms with their requests


class Turns:
    """What connections do in this round of the event loop, and what waits for the next one."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._taken = 0

    def run(self, loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
        """Do it now, or in its turn when this round has done enough."""
        if self._taken == 0:
            loop.call_soon(self._next_round, loop)
        if self._taken < _PER_ROUND:
            self._taken += 1
            action()
        else:
            self._waiting.append(action)

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._taken = min(_PER_ROUND, len(self._waiting))
        turn = [self._waiting.popleft() for _ in range(self._taken)]
        if turn:
            loop.call_soon(self._next_round, loop)
        for action in turn:
            action()


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Use the class that ``make_protocol`` returns."""

    max_connections: ClassVar[int]
    unidentified: ClassVar[dict["LimitedProtocol", None]]  # without a whole request so far, the oldest first
    idle: ClassVar[dict["LimitedProtocol", None]]  # between two requests
    turns: ClassVar[Turns]

    _held_back = b""  # input that waits for its turn
    _bytes_without_progress = 0  # received since the last progress
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it in; the one that has waited longest makes room when there are too many."""
        super().connection_made(transport)
        while len(self.connections) > self.max_connections and (waiting := self.unidentified or self.idle):
            next(iter(waiting))._drop()
        if len(self.connections) > self.max_connections:
            self._drop()
            return
        self.unidentified[self] = None
        self._set_deadline(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it; the request under way, if any, notices in its turn."""
        self._forget()
        self._held_back = b""
        self.connections.discard(self)
        self.turns.run(self.loop, functools.partial(super().connection_lost, exc))

    def data_received(self, data: bytes) -> None:
        """Parse it in its turn; a health check has priority."""
        if self._held_back:
            self._held_back += data
            if len(self._held_back) > _BODY_BYTES:
                self.flow.pause_reading()
        elif data.startswith(_HEALTH_CHECK):
            self._parse(data)
        else:
            self._held_back = data
            self.turns.run(self.loop, self._parse_held_back)

    def _parse_held_back(self) -> None:
        """Parse what waited for its turn."""
        data, self._held_back = self._held_back, b""
        if data and not self.transport.is_closing():
            self.flow.resume_reading()
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Parse no more at a time than may lead to nothing; more of it where a body is under way."""
        rest = memoryview(data)
        while rest and not self.transport.is_closing():
            room = HEAD_BYTES - self._bytes_without_progress
            if room == HEAD_BYTES and self.cycle is not None and self.cycle.more_body:
                room = _BODY_BYTES
            if room <= 0:
                self._refuse(431)
                return
            self._bytes_without_progress += min(room, len(rest))
            super().data_received(rest[:room])  # type: ignore[arg-type]
            rest = rest[room:]
        if self._bytes_without_progress and self._deadline is None and not self.transport.is_closing():
            self._set_deadline(HEAD_S)

    def on_headers_complete(self) -> None:
        """A request: it is the application's now."""
        if len(self.pipeline) >= _PIPELINED:
            raise ValueError("too many requests before the first answer")  # the parser makes a 400 of it
        self.unidentified.pop(self, None)
        self.idle.pop(self, None)
        self._progress()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body; what arrives after the answer is dropped and does not count as progress."""
        self._bytes_without_progress = 0
        if self.cycle.response_complete:
            return
        self._progress()
        self.cycle.body += body
        if len(self.cycle.body) > _BODY_BYTES:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The body is whole, or there is none."""
        self._progress()
        super().on_message_complete()
        self.cycle.more_body = False  # also when the answer was sent first

    def on_response_complete(self) -> None:
        """The answer is sent."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.idle[self] = None
            if self.cycle.more_body:
                self._set_deadline(_REST_S)

    def pause_writing(self) -> None:
        """The client does not read its answers."""
        super().pause_writing()
        self._unread = self.loop.call_later(_READ_S, self._drop)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _progress(self) -> None:
        self._bytes_without_progress = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _set_deadline(self, seconds: float) -> None:
        self._progress()
        self._deadline = self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        if self in self.unidentified and not self._bytes_without_progress:
            self._drop()  # it never said anything
        else:
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
        self._forget()

    def _drop(self) -> None:
        self.connections.discard(self)
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self._progress()
        if self._unread is not None:
            self._unread.cancel()
        self.unidentified.pop(self, None)
        self.idle.pop(self, None)


def make_protocol(max_connections: int) -> type[LimitedProtocol]:
    """The protocol for one server; as many open files as the system allows are allowed, and kept in mind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = hard if hard != resource.RLIM_INFINITY else soft
    most = min(max_connections, (files - _RESERVED_FILES) * 8 // 9)  # every eighth may have a file open as well
    members: dict[str, Any] = {"max_connections": max(1, most), "unidentified": {}, "idle": {}, "turns": Turns()}
    return type("LimitedConnection", (LimitedProtocol,), members)
