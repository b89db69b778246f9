"""Tasks that a test has built and nobody else closes: their reward threads would stay until the end of the session."""

from typing import Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)
_open: list[Closable] = []


def close_after_test(task: T) -> T:
    """``task``, which ``close_all`` will close."""
    _open.append(task)
    return task


def close_all() -> None:
    while _open:
        _open.pop().close()
