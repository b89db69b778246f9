"""A worker process: it receives stop signals, ends with the right code, and never outlives its launcher."""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.ranks.signals import DELIBERATE, EXIT_INTERRUPTED, StopRequest, listen
from cosmos_rl.utils.logging import print_anything

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.3


def supervise(body: Callable[[StopRequest], int]) -> None:
    """Run `body`, then end the process when its code is not 0.

    A `UserError` becomes one message and its exit code. Under the launcher the message is left to it in a file, since
    several ranks have the same error; and a code that is meant (1, 2, 75, 130) is written to the exit file and the
    process itself ends with 0, so that it is not restarted.
    """
    follow_launcher()
    print_anything()
    stop = StopRequest()

    def leave_now() -> None:
        # Under the launcher a signal to all processes arrives here twice, and only the launcher counts the interrupts.
        if stop.insisted and _exit_file() is None:
            os._exit(EXIT_INTERRUPTED)

    stop.forward = leave_now
    with listen(stop):
        exit_file = _exit_file()
        if exit_file is not None:
            exit_file.unlink(missing_ok=True)  # of the attempt before a restart
            ready_file(exit_file).touch()
        try:
            code = body(stop)
        except UserError as error:
            report_error(str(error))
            code = error.exit_code
    gc.freeze()  # else python looks through all objects of the libraries as it ends: seconds
    if code != 0:
        sys.stdout.flush()
        sys.exit(_process_code(code))


def follow_launcher() -> None:
    """End this process as soon as the launcher that started it is gone, whatever ended it."""
    launcher = os.environ.get("COSMOS_LAUNCHER_PID")
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:
        while os.getppid() == int(launcher):
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="follow-launcher", daemon=True).start()


def ready_file(exit_file: Path) -> Path:
    """Exists once the worker receives stop signals; before that a signal simply ends it."""
    return exit_file.with_name(exit_file.name + ".ready")


def message_file(exit_file: Path) -> Path:
    """Holds the error that the worker reports to the user."""
    return exit_file.with_name(exit_file.name + ".message")


def report_error(message: str) -> None:
    """Show an error to the user, at the end of the command and once, whichever ranks report it."""
    exit_file = _exit_file()
    if exit_file is None:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        message_file(exit_file).write_text(message, encoding="utf-8")


def _exit_file() -> Path | None:
    base = os.environ.get("COSMOS_EXIT_FILE")
    if not base:
        return None
    return Path(f"{base}.{os.environ.get('RANK', '0')}")


def _process_code(code: int) -> int:
    exit_file = _exit_file()
    if exit_file is None or code not in DELIBERATE:
        return code
    exit_file.write_text(str(code), encoding="utf-8")
    return 0
