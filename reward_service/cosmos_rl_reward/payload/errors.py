"""Why a request is not accepted."""

from __future__ import annotations


class Refused(Exception):
    """A request is rejected. ``status`` is the HTTP status, the message says why, and which field is wrong."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
