"""Runs a script as python does, in the place of this file, and ends the process without taking the interpreter down.

Threads of torch (of gloo, of autograd, and any daemon thread inside an operation) ask for the interpreter's lock, for
instance to free a tensor. One that waits for it while the interpreter goes down is ended inside a destructor: before
Python 3.14 the process then aborts ("terminate called without an active exception", SIGABRT), although all is saved.
`destroy_process_group` does not join gloo's threads while a mesh refers to the group, and torch's caches keep meshes.
https://github.com/pytorch/pytorch/issues/38228, https://github.com/pytorch/pytorch/issues/190489
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def python_call(script: Sequence[str]) -> list[str]:
    """The command that runs `script`, a file or `-m` and a module, with its arguments."""
    return [sys.executable, __file__, *script]


def main() -> None:
    """Run the script that the arguments name."""
    code: list[int] = []
    # The first that is registered runs last: threads that are no daemons have ended, and all others have run.
    atexit.register(_leave, code)
    del sys.argv[0]
    is_module = sys.argv[0] == "-m"
    if is_module:
        del sys.argv[0]
    script = sys.argv[0]
    if not sys.flags.safe_path:  # the folder of this file is there
        sys.path[0] = str(Path(script).resolve().parent)
        if is_module:
            sys.path[0] = os.getcwd()
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(script).absolute()), run_name="__main__")
        code.append(0)
    except SystemExit as end:
        code.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except Exception:
        code.append(1)
        raise


def _leave(code: Sequence[int]) -> None:
    """End the process with its code. A process that is interrupted has none and is left to python."""
    if code:
        gc.unfreeze()  # else those that are frozen are not listed
        for one in gc.get_objects():  # files that a script has left open, which python writes when it goes down
            if issubclass(type(one), io.IOBase):
                with contextlib.suppress(Exception):
                    one.flush()
        libc = ctypes.CDLL(None)
        for name in ("stdout", "stderr"):  # not all: a thread that reads from one holds its lock
            libc.fflush(ctypes.c_void_p.in_dll(libc, name))
        os._exit(code[0] & 0xFF)


if __name__ == "__main__":
    main()
