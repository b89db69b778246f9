"""The `cosmos-rl` command: what it refuses, what it starts, how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cosmos_rl.launcher.arguments import parse_launch
from cosmos_rl.launcher.cli import main
from tests.patience import wait_until

CONFIG = """
[policy]
model_name_or_path = "MODEL"
is_diffusers = true
"""
# A worker without torch: `body(stop)` is what the trainer would be.
WORKER = """
import json, os, sys, time
from pathlib import Path
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.supervised import supervised as supervised_by_us
from cosmos_rl.storage.run_folder import RunFolder, begin

here = Path(__file__).parent

def supervised(body):
    def begun(stop):
        begin(RunFolder(Path(os.environ["COSMOS_RUN_DIR"])))
        return body(stop)
    supervised_by_us(begun)

def steps(stop):
    (here / "pid").write_text(str(os.getpid()))
    (here / "ready").touch()
    deadline = time.monotonic() + 30
    while not stop.requested:
        (here / "beat").write_text(str(time.monotonic()))
        assert time.monotonic() < deadline, "no signal came"
        time.sleep(0.02)
    (here / "saved").write_text(stop.requested)
    return stop.exit_code
"""


def wait_for(condition, seconds=60.0):
    wait_until(condition, "what a worker does", silent_s=seconds)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def signal_myself_when(path, *names):
    """Sends the signals, a moment apart, to this process (the launcher runs in it) once `path` exists."""

    def send():
        wait_for(path.exists)
        for name in names:
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.3)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with spaces in its path, a configuration and a writer of worker scripts."""
    folder = tmp_path / "my work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "model").mkdir()
    (folder / "model" / "model_index.json").write_text("{}")
    (folder / "run.toml").write_text(CONFIG.replace("MODEL", str(folder / "model")))

    def script(body, name="worker.py"):
        (folder / name).write_text(WORKER + body)

    return folder, script


def newest_run(folder):
    return sorted(path for path in (folder / "outputs").iterdir() if path.name.isdigit())[-1]


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_need_no_torch(argument):
    code = (
        f"import sys; from cosmos_rl.launcher.cli import main; code = main(['{argument}']);"
        "sys.exit(code or 'torch' in sys.modules or 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cosmos-rl" in done.stdout


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "--config X.toml is required"),
        (["worker.py", "--config", "run.toml"], "flags of cosmos-rl go before the script"),
        (["--config", "run.toml", "--bogus", "worker.py"], "--bogus"),
        (["--config", "run.toml", "--nproc-per-node", "0"], "allowed: a whole number >= 1"),
        (["--config", "run.toml", "--max-restarts", "x"], "allowed: a whole number >= 0"),
        (["--config", "none.toml"], "error: none.toml: no such file"),
        (["--config", "run.toml", "gone.py"], "gone.py: no such script"),
        (["--config", "run.toml", "no.such.module"], "no.such.module: no such module in"),
        (["--config", "run.toml", "./worker"], "did you mean the file ./worker.py?"),
        (["--config", "run.toml", "folder/worker"], "neither a .py file nor the name of a module"),
        (["--config", "run.toml", "--policy.diffusers.is_video=true"], "not runnable yet: policy.diffusers.is_video"),
        (
            ["--config", "run.toml", "--nproc-per-node", "3", "--policy.parallelism.dp_replicate_size=2", "worker.py"],
            "2, the product of the other sizes",
        ),
        (
            ["--config", "run.toml", "--nproc-per-node", "2", "--policy.parallelism.tp_size=2"],
            "not runnable yet: policy",
        ),
        (["--config", "run.toml", "worker.py", "--trian.epoch=3"], "--trian.epoch=3: did you mean --train.epoch=3?"),
        (["--config", "run.toml", "worker.py", "--train.epch=3"], "train.epch: unknown key; did you mean train.epoch?"),
        (["--config", "run.toml", "worker.py", "--train.epch", "3"], "not an override; write --train.epoch=VALUE"),
        (["--config", "run.toml", "worker.py", "--nproc-per-node", "2"], "put it before the script"),
        (["--config", "run.toml", "--validation.enable", "worker.py"], "write --validation.enable=VALUE"),
        (["tiny-model", "unheard-of"], "unheard-of"),
    ],
)
def test_what_cannot_work_ends_with_2_and_a_hint_and_leaves_nothing(place, capfd, argv, told):
    folder, script = place
    script("")
    assert main(argv) == 2
    printed = capfd.readouterr()
    assert told in printed.err
    assert "Traceback" not in printed.err
    assert not (folder / "outputs").exists()


def test_all_config_problems_are_reported_before_torch_is_imported(place):
    folder, _ = place
    code = (
        "import sys; from cosmos_rl.launcher.cli import main;"
        "code = main(['--config', 'run.toml', '--train.epoch=0', '--train.lr=1', '--validation.enable=true']);"
        "sys.exit(10 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: 3 problems in run.toml and the command line:"
    assert len(done.stderr.splitlines()) == 4


def test_a_script_gets_its_arguments_the_config_and_the_environment(place, capfd, monkeypatch):
    folder, script = place
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script(
        "def body(stop):\n"
        "    (here / 'seen.json').write_text(json.dumps([sys.argv, dict(os.environ), os.getcwd()]))\n"
        "    return 0\n"
        "supervised(body)\n"
    )
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    os.chdir(elsewhere)
    before = ["--config", "../run.toml", "--train.epoch=3", "--custom.note=x y"]
    after = ["one", "--train.seed=0", "--own.flag=1", "--", "--config-like", "", "two words"]
    assert main([*before, "../worker.py", *after]) == 0
    argv, environment, cwd = json.loads((folder / "seen.json").read_text())
    run = newest_run(elsewhere)
    script_args = ["one", "--own.flag=1", "--", "--config-like", "", "two words"]
    assert argv[1:] == [*script_args, "--config", str(run / ".next" / "config.toml")]
    assert cwd == str(elsewhere)
    assert environment["COSMOS_ROLE"] == "Controller"
    assert environment["COSMOS_RUN_DIR"] == str(run)
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    resolved = (run / "config.toml").read_text()
    assert "epoch = 3\n" in resolved
    assert "seed = 0\n" in resolved
    assert 'note = "x y"\n' in resolved
    record = json.loads((run / "run.json").read_text())
    assert record["argv"] == ["cosmos-rl", *before, "../worker.py", *after]
    assert record["seed"] == 0
    assert record["versions"]["pydantic"]
    for name in ("checkpoints", "safetensors"):
        assert os.readlink(elsewhere / "outputs" / name) == f"{run.name}/{name}"
    assert f"run folder: {run}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("argv", "overrides", "script_args"),
    [
        (["--train.epoch", "2", "w.py"], ["--train.epoch=2"], []),
        (
            ["--train.seed", "-1", "--validation.enable", "true", "w.py"],
            ["--train.seed=-1", "--validation.enable=true"],
            [],
        ),
        (["--policy.model_name_or_path", "a/b", "w.py", "x"], ["--policy.model_name_or_path=a/b"], ["x"]),
        (["w.py", "a", "--train.epoch", "2", "b"], ["--train.epoch=2"], ["a", "b"]),
        (
            ["w.py", "--own.flag=1", "--policy", "x", "--log-dir", "d"],
            [],
            ["--own.flag=1", "--policy", "x", "--log-dir", "d"],
        ),
        (["w.py", "--", "--trian.x=1", "--train.seed=3"], [], ["--", "--trian.x=1", "--train.seed=3"]),
        (["--train.resume", "w.py"], ["--train.resume"], []),
    ],
)
def test_words_go_to_the_configuration_or_to_the_script(argv, overrides, script_args):
    asked = parse_launch(["--config", "run.toml", *argv], "0", "")
    assert list(asked.overrides) == overrides
    assert list(asked.script_args) == script_args


def test_one_rank_is_started_without_torch_and_has_the_place_that_the_agent_would_give_it(place, monkeypatch):
    """A second torch would cost seconds at the start, and half a gigabyte for the whole run."""
    folder, script = place
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    script("supervised(lambda stop: (here / 'env.json').write_text(json.dumps(dict(os.environ))) * 0)\n")
    code = (
        "import sys; from cosmos_rl.launcher.cli import main;"
        "code = main(sys.argv[1:]); sys.exit(10 if 'torch' in sys.modules else code)"
    )
    command = [sys.executable, "-c", code, "--config", "run.toml"]
    assert subprocess.run([*command, "worker.py"], cwd=folder).returncode == 0
    alone = json.loads((folder / "env.json").read_text())
    assert main(["--config", "run.toml", "--max-restarts", "1", "worker.py"]) == 0
    with_agent = json.loads((folder / "env.json").read_text())
    of_the_agent = {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    assert with_agent.keys() - alone.keys() <= {*of_the_agent, "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"):
        assert alone[name] == with_agent[name], name


def test_a_worker_that_hangs_after_a_mistake_is_ended(place, capfd, monkeypatch):
    from cosmos_rl.launcher import workers

    _, script = place
    monkeypatch.setattr(workers, "ALONE_SECONDS", 0.3)
    script(
        "import threading\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "def body(stop):\n    raise UserError('no such pictures')\nsupervised(body)\n"
    )
    assert main(["--config", "run.toml", "worker.py"]) == 2
    assert capfd.readouterr().err == "error: no such pictures\n"


def test_a_module_in_the_current_folder_is_run(place):
    folder, script = place
    (folder / "mine").mkdir()
    script("supervised(lambda stop: (here / 'ran').write_text(__name__) * 0)\n", "mine/job.py")
    assert main(["--config", "run.toml", "mine.job"]) == 0
    assert (folder / "mine" / "ran").read_text() == "__main__"


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("return 0", 0, ""),
        ("return 75", 75, ""),
        ("return 130", 130, ""),
        ("raise UserError('no pictures in x')", 2, "error: no pictures in x"),
        ("raise ValueError('boom')", 1, "ValueError: boom\nerror: the worker of rank 0 ended with exit code 1"),
        ("os._exit(3)", 1, "error: the worker of rank 0 ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", 1, "ended by SIGKILL (out of memory?)"),
    ],
)
def test_the_end_of_the_worker_is_the_end_of_the_command(place, capfd, body, code, told):
    _, script = place
    script(f"def body(stop):\n    {body}\nsupervised(body)\n")
    assert main(["--config", "run.toml", "worker.py"]) == code
    printed = capfd.readouterr()
    assert told in printed.err
    assert "elastic" not in printed.err + printed.out
    assert ("Traceback" in printed.err) == ("ValueError" in body)


@pytest.mark.parametrize("restarts", ["0", "3"])
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_stop_signal_lets_the_worker_save_and_is_not_a_failure_to_restart(place, capfd, name, code, restarts):
    folder, script = place
    script("supervised(steps)\n")
    sender = signal_myself_when(folder / "ready", name)
    assert main(["--config", "run.toml", "--max-restarts", restarts, "worker.py"]) == code
    sender.join()
    assert (folder / "saved").read_text() == name
    assert capfd.readouterr().err == ""


def test_a_second_ctrl_c_ends_everything_now(place):
    folder, script = place
    script("def body(stop):\n    steps(stop)\n    time.sleep(60)\n    return 0\nsupervised(body)\n")
    sender = signal_myself_when(folder / "ready", "SIGINT", "SIGINT")
    start = time.monotonic()
    assert main(["--config", "run.toml", "worker.py"]) == 130
    sender.join()
    assert time.monotonic() - start < 30  # the worker alone would take a minute
    assert not is_alive(int((folder / "pid").read_text()))


@pytest.mark.parametrize("restarts", ["0", "3"])
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_stop_signal_while_the_worker_still_imports_ends_it_quietly(place, capfd, name, code, restarts):
    folder, script = place
    script("(here / 'ready').touch()\ntime.sleep(60)\n")
    sender = signal_myself_when(folder / "ready", name)
    assert main(["--config", "run.toml", "--max-restarts", restarts, "worker.py"]) == code
    sender.join()
    assert capfd.readouterr().err == ""


def test_signal_handlers_are_as_before_after_a_launch(place):
    _, script = place
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    script("supervised(lambda stop: 0)\n")
    assert main(["--config", "run.toml", "worker.py"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_a_restarted_worker_continues_its_own_run(place):
    folder, script = place
    script(
        "from cosmos_rl.checkpoint.layout import COMMIT_MARKER, marker_text, policy_dir\n"
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
        "    (policy / COMMIT_MARKER).write_text(marker_text(policy))\n"
        "    os._exit(1)\n"
        "supervised(body)\n"
    )
    assert main(["--config", "run.toml", "--max-restarts", "5", "worker.py"]) == 75
    run = newest_run(folder)
    assert (folder / "starts").read_text().splitlines() == [
        f"0 {run} None",
        f"1 {run} {run}/checkpoints/step_10/policy",
        f"2 {run} {run}/checkpoints/step_20/policy",
    ]


def test_the_restarts_are_counted_and_the_last_failure_is_told(place, capfd):
    folder, script = place
    script("with (here / 'starts').open('a') as file:\n    print(file=file)\nos._exit(4)\n")
    assert main(["--config", "run.toml", "--max-restarts", "1", "worker.py"]) == 1
    assert (folder / "starts").read_text() == "\n\n"
    assert "ended with exit code 4" in capfd.readouterr().err


def test_log_dir_collects_all_output_and_shows_the_end_of_a_failure(place, capfd):
    folder, script = place
    script(
        "print('from python', flush=True)\n"
        "os.system('echo from a child; echo to stderr >&2')\n"
        "raise ValueError('boom')\n"
    )
    assert main(["--config", "run.toml", "--log-dir", "logs", "worker.py"]) == 1
    printed = capfd.readouterr()
    log = folder / "logs" / "logs_latest" / "policy_0.log"
    assert os.readlink(folder / "logs" / "logs_latest") == log.resolve().parent.name
    assert log.read_text().splitlines()[:3] == ["from python", "from a child", "to stderr"]
    assert str(log.resolve()) in printed.out
    assert "from python" not in printed.out
    assert printed.err.rstrip().endswith("ValueError: boom")
    assert main(["--config", "run.toml", "--log-dir", "logs", "worker.py"]) == 1
    assert len(list((folder / "logs").glob("logs_2*"))) == 2
    assert os.readlink(folder / "logs" / "logs_latest") != log.parent.name


def test_debug_reaches_the_worker(place):
    folder, script = place
    script("supervised(lambda stop: (here / 'level').write_text(os.environ['COSMOS_LOG_LEVEL']) * 0)\n")
    assert main(["--config", "run.toml", "--debug", "worker.py"]) == 0
    assert (folder / "level").read_text() == "DEBUG"


def test_several_ranks_share_the_cores_and_only_the_first_is_the_controller(place, monkeypatch):
    from cosmos_rl.launcher.agent import run_workers
    from cosmos_rl.launcher.signals import StopRequest

    folder, script = place
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    keys = ["COSMOS_ROLE", "WORLD_SIZE", "OMP_NUM_THREADS", "COSMOS_RUN_DIR"]
    script(
        f"(here / os.environ['RANK']).write_text(json.dumps([os.environ[key] for key in {keys}]))\n"
        "supervised(lambda stop: 75 if os.environ['RANK'] == '1' else 0)\n"
    )
    command = [sys.executable, "worker.py"]
    assert run_workers(command, environment={"COSMOS_RUN_DIR": "r"}, stop=StopRequest(), nproc=2) == (75, "")
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert json.loads((folder / "0").read_text()) == ["Controller", "2", threads, "r"]
    assert json.loads((folder / "1").read_text()) == ["Policy", "2", threads, "r"]


def test_a_mistake_is_told_once_whichever_ranks_meet_it(place, capfd, monkeypatch):
    from cosmos_rl.launcher import workers

    folder, script = place
    script("def body(stop):\n    raise UserError('no such pictures')\nsupervised(body)\n")
    command = ["--config", "run.toml", "--nproc-per-node", "3", "--max-restarts", "2", "worker.py"]
    assert main(command) == 2
    assert capfd.readouterr().err == "error: no such pictures\n"
    monkeypatch.setattr(workers, "ALONE_SECONDS", 0.5)
    script(
        "def body(stop):\n    if os.environ['RANK'] == '1':\n        raise UserError('rank 1 cannot read x')\n"
        "    time.sleep(60)\n    (here / 'late').touch()\nsupervised(body)\n"
    )
    assert main(command) == 2
    assert not (folder / "late").exists()
    assert capfd.readouterr().err == "error: rank 1 cannot read x\n"


def test_what_a_failed_worker_says_is_told_once_and_is_still_a_failure(place, capfd):
    _, script = place
    script(
        "from cosmos_rl.launcher.supervised import tell\n"
        "def body(stop):\n    tell('out of memory while x')\n    return 1\nsupervised(body)\n"
    )
    assert main(["--config", "run.toml", "--nproc-per-node", "2", "worker.py"]) == 1
    assert capfd.readouterr().err == "error: out of memory while x; its output is above\n"


def test_no_worker_outlives_a_killed_launcher(place):
    folder, script = place
    script("supervised(steps)\n")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "cosmos_rl.launcher.cli", "--config", "run.toml", "worker.py"],
        cwd=folder,
        start_new_session=True,
    )
    try:
        wait_for((folder / "beat").exists)
        pid = int((folder / "pid").read_text())
        os.killpg(launcher.pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(pid), seconds=2)
    finally:
        launcher.kill()
        launcher.wait()


def test_a_log_line_looks_as_documented():
    code = "from cosmos_rl.utils.logging import logger; logger.info('hidden'); logger.warning('seen')"
    several = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "COSMOS_LOG_LEVEL": "warning"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=several, check=True)
    line = r"\[rank1\]:\[cosmos\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - cosmos - WARNING - seen\n"
    assert re.fullmatch(line, done.stdout)
    one = {**several, "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=one, check=True)
    assert done.stdout.startswith("[cosmos] ")


def test_resume_writes_into_the_same_run_and_keeps_the_earlier_record(place, capfd):
    folder, script = place
    script("supervised(lambda stop: 0)\n")
    assert main(["--config", "run.toml", "worker.py"]) == 0
    run = newest_run(folder)
    assert main(["--config", "run.toml", "--train.resume=true", "worker.py"]) == 0
    assert newest_run(folder) == run
    record = json.loads((run / "run.json").read_text())
    assert "--train.resume=true" in record["argv"]
    assert [earlier["argv"][-1] for earlier in record["earlier"]] == ["worker.py"]
    assert "holds no checkpoint yet: starting it again from step 0" in capfd.readouterr().out


def test_a_run_that_is_still_being_written_is_not_joined(place, capfd):
    folder, script = place
    script(
        "from cosmos_rl.launcher.cli import main\n"
        "def body(stop):\n"
        "    return 75 if main(['--config', 'run.toml', '--train.resume=true', 'worker.py']) == 2 else 0\n"
        "supervised(body)\n"
    )
    assert main(["--config", "run.toml", "worker.py"]) == 75
    run = newest_run(folder)
    assert f"error: {run} is being written by process {os.getpid()}" in capfd.readouterr().err
    assert json.loads((run / "run.json").read_text())["earlier"] == []


def test_verbs_have_their_own_help(capfd):
    assert main(["tiny-model", "--help"]) == 0
    assert "sd3" in capfd.readouterr().out


def test_a_script_that_never_calls_us_is_a_failure(place, capfd):
    folder, _ = place
    (folder / "forgot.py").write_text("print('hi')\n")
    assert main(["--config", "run.toml", "forgot.py"]) == 1
    assert "ended without calling cosmos_rl.launcher.worker_entry.main" in capfd.readouterr().err


def test_a_command_that_is_refused_late_leaves_runs_and_links_as_they_were(place, capfd):
    folder, script = place
    script("supervised(lambda stop: 0)\n")
    assert main(["--config", "run.toml", "worker.py"]) == 0
    run = newest_run(folder)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    (folder / "refused.py").write_text(
        "from cosmos_rl.errors import UserError\nfrom cosmos_rl.launcher.supervised import supervised\n"
        "def body(stop):\n    raise UserError('other weights')\nsupervised(body)\n"
    )
    for options in (["--train.resume=true"], []):
        assert main(["--config", "run.toml", "--train.seed=7", *options, "refused.py"]) == 2
        assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == before
        assert newest_run(folder) == run
        assert (folder / "outputs" / "checkpoints").resolve() == run / "checkpoints"


def test_a_run_folder_as_config_is_the_run_that_goes_on(place):
    folder, script = place
    script("supervised(lambda stop: 0)\n")
    assert main(["--config", "run.toml", "--train.timestamp=20250101000000", "worker.py"]) == 0
    assert main(["--config", "run.toml", "worker.py"]) == 0
    assert main(["--config", "outputs/20250101000000", "--train.resume=true", "worker.py"]) == 0
    record = json.loads((folder / "outputs" / "20250101000000" / "run.json").read_text())
    assert len(record["earlier"]) == 1
    assert len([path for path in (folder / "outputs").iterdir() if path.name.isdigit()]) == 2
