"""How the `cosmos-rl` command ends: exit codes, stop signals, restarts, errors that a worker raises."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.ranks.signals import StopRequest
from cosmos_rl.launcher.ranks.workers import outcome
from cosmos_rl.storage.run_folder import RunFolder, begin_run, is_worked_on, record_end
from tests.support.launched import Place, is_alive, newest_run, signal_myself_when, wait_for


def test_a_worker_that_hangs_after_an_error_is_ended(
    place: Place, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cosmos_rl.launcher.ranks import workers

    _, script = place
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.3)
    script(
        "import threading\n"
        "threading.Thread(target=time.sleep, args=(HANG_S,)).start()\n"
        "def body(stop):\n    raise UserError('no such images')\nsupervise(body)\n"
    )
    assert main(["--config", "run.toml", "worker.py"]) == 2
    assert capfd.readouterr().err == "error: no such images\n"


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("return 0", 0, ""),
        ("return 75", 75, ""),
        ("return 130", 130, ""),
        ("raise UserError('no images in x')", 2, "error: no images in x"),
        ("raise ValueError('boom')", 1, "ValueError: boom\nerror: the worker of rank 0 ended with exit code 1"),
        ("os._exit(3)", 1, "error: the worker of rank 0 ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", 1, "ended by SIGKILL (out of memory?)"),
    ],
)
def test_the_end_of_the_worker_is_the_end_of_the_command(
    place: Place, capfd: pytest.CaptureFixture[str], body: str, code: int, message: str
) -> None:
    _, script = place
    script(f"def body(stop):\n    {body}\nsupervise(body)\n")
    assert main(["--config", "run.toml", "worker.py"]) == code
    printed = capfd.readouterr()
    assert message in printed.err
    assert "elastic" not in printed.err + printed.out
    assert ("Traceback" in printed.err) == ("ValueError" in body)


@pytest.mark.parametrize(
    ("body", "code", "reason"), [("return 0", 0, ""), ("os._exit(3)", 1, "the worker of rank 0 ended with exit code 3")]
)
def test_a_run_that_has_begun_says_how_its_command_ended_until_the_next_one_begins(
    place: Place, body: str, code: int, reason: str
) -> None:
    folder, script = place
    script(f"def body(stop):\n    {body}\nsupervise(body)\n")
    assert main(["--config", "run.toml", "worker.py"]) == code
    run = RunFolder(newest_run(folder))
    assert json.loads(run.ended.read_text()) == {"code": code, "reason": reason}
    assert is_worked_on(run) is True  # this process, in which the launcher ran
    begin_run(run)
    assert not run.ended.exists()


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [("return 75", 75, ""), ("raise UserError('no images in x')", 2, "error: no images in x"), ("os._exit(3)", 1, "3")],
)
def test_an_end_that_cannot_be_written_down_is_the_end_all_the_same(
    place: Place, capfd: pytest.CaptureFixture[str], body: str, code: int, message: str
) -> None:
    _, script = place
    blocked = "(RunFolder(Path(os.environ['COSMOS_RUN_DIR'])).ended / 'x').mkdir(parents=True)"
    script(f"def body(stop):\n    {blocked}\n    {body}\nsupervise(body)\n")
    assert main(["--config", "run.toml", "worker.py"]) == code
    printed = capfd.readouterr()
    assert message in printed.err
    assert "ended.json: how the run has ended cannot be written there" in printed.err + printed.out
    assert "Traceback" not in printed.err


def test_a_command_that_has_not_begun_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "20260101000000")
    for folder, started in ((run, "earlier"), (RunFolder(run.next), "now")):
        folder.root.mkdir()
        folder.run_json.write_text(json.dumps({"started": started, "host": "elsewhere"}))
    record_end(run, 2, "no such images")
    assert not run.ended.exists()
    assert is_worked_on(run) is None


def launch_and_signal(folder: Path, *names: str, options: Sequence[str] = ()) -> int:
    """Exit code of a launch that gets the signals once the worker is ready."""
    sender = signal_myself_when(folder / "ready", *names)
    code = main(["--config", "run.toml", *options, "worker.py"])
    sender.join()
    return code


@pytest.mark.parametrize("restarts", ["0", "3"])
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_stop_signal_lets_the_worker_save_and_is_not_a_failure_to_restart(
    place: Place, capfd: pytest.CaptureFixture[str], name: str, code: int, restarts: str
) -> None:
    folder, script = place
    script("supervise(steps)\n")
    assert launch_and_signal(folder, name, options=("--max-restarts", restarts)) == code
    assert (folder / "saved").read_text() == name
    assert capfd.readouterr().err == ""


def test_a_second_ctrl_c_ends_everything_now(place: Place) -> None:
    folder, script = place
    script("def body(stop):\n    steps(stop)\n    time.sleep(HANG_S)\n    return 0\nsupervise(body)\n")
    assert launch_and_signal(folder, "SIGINT", "SIGINT") == 130
    assert not is_alive(int((folder / "pid").read_text()))


@pytest.mark.parametrize("restarts", ["0", "3"])
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_stop_signal_while_the_worker_still_imports_ends_it_quietly(
    place: Place, capfd: pytest.CaptureFixture[str], name: str, code: int, restarts: str
) -> None:
    folder, script = place
    script("(here / 'ready').touch()\ntime.sleep(HANG_S)\n")
    assert launch_and_signal(folder, name, options=("--max-restarts", restarts)) == code
    assert capfd.readouterr().err == ""


def test_signal_handlers_are_as_before_after_a_launch(place: Place) -> None:
    _, script = place
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    script("supervise(lambda stop: 0)\n")
    assert main(["--config", "run.toml", "worker.py"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


@pytest.mark.slow
def test_a_restarted_worker_continues_its_own_run(place: Place) -> None:
    folder, script = place
    script(
        "from cosmos_rl.checkpoint.layout import COMMIT_MARKER, build_marker_text, policy_dir\n"
        "from cosmos_rl.launcher.resume import resume_from\n"
        "from cosmos_rl.policy.config import load_config\n"
        "from cosmos_rl.storage.run_folder import RunFolder\n"
        "def body(stop):\n"
        "    run = RunFolder(Path(os.environ['COSMOS_RUN_DIR']))\n"
        "    count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "    start = resume_from(load_config(sys.argv[-1]), run, count)\n"
        "    with (here / 'starts').open('a') as file:\n"
        "        print(count, run.root, start, file=file)\n"
        "    if count == 2:\n"
        "        return 75\n"
        "    policy = policy_dir(run.checkpoints, 10 * count + 10)\n"
        "    policy.mkdir(parents=True, exist_ok=True)\n"
        "    (policy / 'state').write_text('x')\n"
        "    (policy / COMMIT_MARKER).write_text(build_marker_text(policy))\n"
        "    os._exit(1)\n"
        "supervise(body)\n"
    )
    assert main(["--config", "run.toml", "--max-restarts", "5", "worker.py"]) == 75
    run = newest_run(folder)
    assert (folder / "starts").read_text().splitlines() == [
        f"0 {run} None",
        f"1 {run} {run}/checkpoints/step_10/policy",
        f"2 {run} {run}/checkpoints/step_20/policy",
    ]


def test_the_restarts_are_counted_and_the_last_failure_is_printed(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, script = place
    script("with (here / 'starts').open('a') as file:\n    print(file=file)\nos._exit(4)\n")
    assert main(["--config", "run.toml", "--max-restarts", "1", "worker.py"]) == 1
    assert (folder / "starts").read_text() == "\n\n"
    assert "ended with exit code 4" in capfd.readouterr().err


@pytest.mark.slow
def test_an_error_is_printed_once_whichever_ranks_raise_it(
    place: Place, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cosmos_rl.launcher.ranks import workers

    folder, script = place
    script("def body(stop):\n    raise UserError('no such images')\nsupervise(body)\n")
    command = ["--config", "run.toml", "--nproc-per-node", "3", "--max-restarts", "2", "worker.py"]
    assert main(command) == 2
    assert capfd.readouterr().err == "error: no such images\n"
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.5)
    script(
        "def body(stop):\n    if os.environ['RANK'] == '1':\n        raise UserError('rank 1 cannot read x')\n"
        "    time.sleep(HANG_S)\n    (here / 'late').touch()\nsupervise(body)\n"
    )
    assert main(command) == 2
    assert not (folder / "late").exists()
    assert capfd.readouterr().err == "error: rank 1 cannot read x\n"


def test_the_message_of_a_failed_worker_is_printed_once_and_is_still_a_failure(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    _, script = place
    script(
        "from cosmos_rl.launcher.ranks.worker_process import report_error\n"
        "def body(stop):\n    report_error('out of memory while x')\n    return 1\nsupervise(body)\n"
    )
    assert main(["--config", "run.toml", "--nproc-per-node", "2", "worker.py"]) == 1
    assert capfd.readouterr().err == "error: out of memory while x; its output is above\n"


def test_no_worker_outlives_a_killed_launcher(place: Place) -> None:
    folder, script = place
    script("supervise(steps)\n")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "cosmos_rl.launcher.cli", "--config", "run.toml", "worker.py"],
        cwd=folder,
        start_new_session=True,
    )
    try:
        wait_for((folder / "ready").exists)
        pid = int((folder / "pid").read_text())
        os.killpg(launcher.pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(pid))
    finally:
        launcher.kill()
        launcher.wait()


def test_a_script_that_never_calls_us_is_a_failure(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    folder, _ = place
    (folder / "forgot.py").write_text("print('hi')\n")
    assert main(["--config", "run.toml", "forgot.py"]) == 1
    assert "ended without calling cosmos_rl.launcher.worker_entry.main" in capfd.readouterr().err


def test_a_command_that_is_refused_late_leaves_runs_and_links_as_they_were(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, script = place
    script("supervise(lambda stop: 0)\n")
    assert main(["--config", "run.toml", "worker.py"]) == 0
    run = newest_run(folder)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    (folder / "refused.py").write_text(
        "from cosmos_rl.errors import UserError\nfrom cosmos_rl.launcher.ranks.worker_process import supervise\n"
        "def body(stop):\n    raise UserError('other weights')\nsupervise(body)\n"
    )
    for options in (["--train.resume=true"], []):
        assert main(["--config", "run.toml", "--train.seed=7", *options, "refused.py"]) == 2
        assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == before
        assert newest_run(folder) == run
        assert (folder / "outputs" / "checkpoints").resolve() == run / "checkpoints"


@pytest.mark.parametrize(
    ("codes", "text"),
    [
        ({0: 1, 1: 17}, "rank 1 ended with exit code 17"),
        ({0: 1, 1: -9}, "rank 1 was ended by SIGKILL (out of memory?)"),
        ({1: 17, 0: 1}, "rank 1 ended with exit code 17"),
        ({1: 1, 0: 1}, "rank 1 ended with exit code 1"),
        ({0: 3, 1: 17}, "rank 0 ended with exit code 3"),
    ],
)
def test_the_rank_that_died_is_named_and_not_those_that_lost_their_connection_to_it(
    tmp_path: Path, codes: dict[int, int], text: str
) -> None:
    """Both may be seen at once, as ranks are looked at ten times a second."""
    assert outcome(StopRequest(), tmp_path / "exit", codes) == (1, f"the worker of {text}")
