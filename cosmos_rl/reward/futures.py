"""Several futures as one."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

Part = TypeVar("Part")
Whole = TypeVar("Whole")


def join_futures(parts: Sequence["Future[Part]"], finish: Callable[[list[Part]], Whole]) -> "Future[Whole]":
    """What ``finish`` makes of the results in order; fails with the first part that fails, or with ``finish``.

    Raises:
        ValueError: there are no parts, so it would never be done.
    """
    if not parts:
        raise ValueError("nothing to wait for")
    whole: Future[Whole] = Future()
    whole.set_running_or_notify_cancel()
    lock = threading.Lock()

    def look(part: "Future[Part]") -> None:
        with lock:  # the parts end in threads of their own
            if whole.done():
                return
            error: BaseException | None = RuntimeError("the rewards have been closed")
            if not part.cancelled():
                error = part.exception()
            if error is not None:
                whole.set_exception(error)
            elif all(part.done() for part in parts):
                _finish(whole, finish, parts)

    for part in parts:
        part.add_done_callback(look)
    return whole


def _finish(whole: "Future[Whole]", finish: Callable[[list[Part]], Whole], parts: Sequence["Future[Part]"]) -> None:
    try:
        whole.set_result(finish([part.result() for part in parts]))
    except BaseException as error:  # in a callback it would only be logged
        whole.set_exception(error)
