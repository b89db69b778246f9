"""How a worker's script runs, and how worker and launcher end: as python does, but no thread aborts them."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.ranks.signals import StopRequest
from cosmos_rl.launcher.ranks.worker_script import python_call
from tests.support import patience
from tests.support.launched import Place

COMPUTING = """
import threading, torch
def compute():
    x = torch.ones(100)
    while True:
        x + x
        computing.set()
computing = threading.Event()
threading.Thread(target=compute, daemon=True).start()
computing.wait()
"""


def ends(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Exit code, output, and the last line of the errors."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout, (done.stderr.splitlines() or [""])[-1]


@pytest.mark.parametrize(
    "body",
    [
        "import sys; print(sys.argv[1:], sys.path, __name__, __file__)",
        "raise SystemExit",
        "raise SystemExit(75)",
        "raise SystemExit(-1)",
        "raise SystemExit('no images')",
        "raise ValueError('boom')",
        "raise KeyboardInterrupt",
        "import atexit; atexit.register(print, 'last'); print('first', end=' ')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('awaited'))).start()",
        "import ctypes; ctypes.CDLL(None).puts(b'of a library')",
        "import multiprocessing as m\nif __name__ == '__main__':\n    p = m.get_context('spawn').Process(target=print, "
        "args=('a child',))\n    p.start()\n    p.join()\n    raise SystemExit(p.exitcode)",
    ],
)
@pytest.mark.parametrize("call", [["script.py"], ["-m", "script"]])
def test_a_script_runs_and_ends_as_under_python(tmp_path: Path, body: str, call: list[str]) -> None:
    (tmp_path / "script.py").write_text(body)
    if call[0] == "script.py":
        call = [str(tmp_path / "script.py")]  # as the launcher names it
    expected = ends([sys.executable, *call, "--a", "b"], tmp_path)
    assert ends(python_call([*call, "--a", "b"]), tmp_path) == expected


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(75)", "raise ValueError('boom')"])
def test_a_file_that_a_script_has_left_open_is_written(tmp_path: Path, end: str) -> None:
    """As the log of a reward function, in its module."""
    (tmp_path / "rewards.py").write_text("scores = open('scores.csv', 'w')")
    (tmp_path / "script.py").write_text(f"import gc, rewards\nrewards.scores.write('0.5,0.25\\n')\ngc.freeze()\n{end}")
    ends(python_call(["script.py"]), tmp_path)
    assert (tmp_path / "scores.csv").read_text() == "0.5,0.25\n"


def test_a_thread_that_reads_what_never_comes_does_not_keep_a_script_from_ending(tmp_path: Path) -> None:
    reading = "threading.Thread(target=ctypes.CDLL(None).getchar, daemon=True).start()"
    (tmp_path / "script.py").write_text(f"import ctypes, threading, time\n{reading}\ntime.sleep(0.2)")
    with subprocess.Popen(python_call(["script.py"]), cwd=tmp_path, stdin=subprocess.PIPE) as process:
        try:
            assert process.wait(patience.SILENT_S) == 0
        finally:
            process.kill()


@pytest.mark.zoo
@pytest.mark.parametrize(("body", "code"), [("return 0", 0), ("return 75", 75), ("raise UserError('no images')", 2)])
def test_a_thread_that_computes_aborts_no_worker_that_ends(place: Place, body: str, code: int) -> None:
    _, script = place
    script(COMPUTING + f"def body(stop):\n    {body}\nsupervise(body)\n")
    assert main(["--config", "run.toml", "worker.py"]) == code


@pytest.mark.zoo
def test_no_thread_of_the_launcher_outlives_the_ranks() -> None:
    from cosmos_rl.launcher.ranks.agent import run_workers

    before = set(threading.enumerate())
    run_workers([sys.executable, "-c", ""], environment={}, stop=StopRequest(), nproc=2)
    assert set(threading.enumerate()) <= before
