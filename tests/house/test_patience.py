"""A hang is known from a busy machine."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import patience


def test_a_process_that_does_nothing_hangs_and_one_that_works_does_not() -> None:
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(AssertionError, match="the end of it: nothing has moved for 1.5 s"):
            patience.wait_until(lambda: idle.poll() is not None, "the end of it", silent_s=1.5)
    finally:
        idle.kill()
        idle.wait()


@pytest.mark.slow
def test_work_is_seen_whatever_the_clock_says() -> None:
    busy = subprocess.Popen(["sh", "-c", f"'{sys.executable}' -c 'while True: pass'; true"], start_new_session=True)
    began = time.monotonic()
    try:
        patience.wait_until(lambda: time.monotonic() - began > 8.0, "the time", silent_s=4.0)
    finally:
        os.killpg(busy.pid, signal.SIGKILL)
        busy.wait()


def test_run_gives_what_was_printed() -> None:
    code = "import sys; print('x' * 200_000); print('wrong', file=sys.stderr); sys.exit(3)"
    done = patience.run([sys.executable, "-c", code])
    assert (done.returncode, len(done.stdout), done.stderr) == (3, 200_001, "wrong\n")
