"""What a client did wrong with a body."""

from __future__ import annotations


class Refused(Exception):
    """The request can never be scored. ``status`` is the HTTP status, the message says which field and why."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
