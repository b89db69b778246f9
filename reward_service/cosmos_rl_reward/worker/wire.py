"""Messages between the host and a scorer: a length, then JSON. Only the standard library."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

HEAD = struct.Struct(">I")


def pack(message: dict[str, Any]) -> bytes:
    """Bytes of one message."""
    data = json.dumps(message).encode()
    return HEAD.pack(len(data)) + data


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """Wait for the next message; None when the other side has disconnected."""
    try:
        (length,) = HEAD.unpack(_read_exactly(channel, HEAD.size))
        return json.loads(_read_exactly(channel, length))
    except EOFError:
        return None


def _read_exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
