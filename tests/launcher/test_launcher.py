"""The `cosmos-rl` command: what it refuses and what it starts."""

import json
import os
import re
import subprocess
import sys

import pytest

from cosmos_rl.launcher.arguments import parse_launch, split_overrides
from cosmos_rl.launcher.cli import main
from tests.support.launched import Place, newest_run


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_need_no_torch(argument: str) -> None:
    code = (
        f"import sys; from cosmos_rl.launcher.cli import main; code = main(['{argument}']);"
        "sys.exit(code or 'torch' in sys.modules or 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cosmos-rl" in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config X.toml is required"),
        (["worker.py", "--config", "run.toml"], "flags of cosmos-rl go before the script"),
        (["--config", "run.toml", "--bogus", "worker.py"], "--bogus"),
        (["--config", "run.toml", "--nproc-per-node", "0"], "allowed: a whole number >= 1"),
        (["--config", "run.toml", "--max-restarts", "x"], "allowed: a whole number >= 0"),
        (["--config", "run.toml", "--log-dir", ""], '--log-dir: found ""; allowed: a folder (was a shell variable'),
        (["--config", "run.toml", "--log-dir=s3://b/logs"], '--log-dir: found "s3://b/logs"; addresses are not'),
        (["check", "--config", "run.toml", "--log-dir", "s3://b/logs"], "addresses are not supported yet"),
        (["--config", "none.toml"], "error: none.toml: no such file"),
        (["--config", "run.toml", "gone.py"], "gone.py: no such script"),
        (["--config", "run.toml", "no.such.module"], "no.such.module: no such module in"),
        (["--config", "run.toml", "./worker"], "did you mean the file ./worker.py?"),
        (["--config", "run.toml", "folder/worker"], "neither a .py file nor the name of a module"),
        (["--config", "run.toml", "--train.compile=true"], "not supported yet: train.compile"),
        (
            ["--config", "run.toml", "--nproc-per-node", "3", "--policy.parallelism.dp_replicate_size=2", "worker.py"],
            "2, the product of the other sizes",
        ),
        (
            ["--config", "run.toml", "--nproc-per-node", "2", "--policy.parallelism.tp_size=2"],
            "not supported yet: policy",
        ),
        (["--config", "run.toml", "worker.py", "--trian.epoch=3"], "--trian.epoch=3: did you mean --train.epoch=3?"),
        (["--config", "run.toml", "worker.py", "-train.epoch=3"], "-train.epoch=3: did you mean --train.epoch=3?"),
        (["--config", "run.toml", "worker.py", "--train.epch=3"], "train.epch: unknown key; did you mean train.epoch?"),
        (["--config", "run.toml", "worker.py", "--train.epch", "3"], "not an override; write --train.epoch=VALUE"),
        (["--config", "run.toml", "worker.py", "--nproc-per-node", "2"], "put it before the script"),
        (["--config", "run.toml", "--validation.enable", "worker.py"], "write --validation.enable=VALUE"),
        (["tiny-model", "unheard-of"], "unheard-of"),
    ],
)
def test_what_cannot_work_ends_with_2_and_a_hint_and_leaves_nothing(
    place: Place, capfd: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    folder, script = place
    script("")
    assert main(argv) == 2
    printed = capfd.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize("option", ["-model.ckpt=3", "-trained.pt", "-customs.x", "-v"])
def test_an_option_with_one_dash_that_only_resembles_a_table_is_the_scripts(option: str) -> None:
    assert split_overrides([option]) == ([], [option])


def test_all_config_problems_are_reported_before_torch_is_imported(place: Place) -> None:
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


def test_a_script_gets_its_arguments_the_config_and_the_environment(
    place: Place, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, script = place
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script(
        "def body(stop):\n"
        "    (here / 'seen.json').write_text(json.dumps([sys.argv, dict(os.environ), os.getcwd()]))\n"
        "    return 0\n"
        "supervise(body)\n"
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
def test_words_go_to_the_configuration_or_to_the_script(
    argv: list[str], overrides: list[str], script_args: list[str]
) -> None:
    asked = parse_launch(["--config", "run.toml", *argv], "0", "")
    assert list(asked.overrides) == overrides
    assert list(asked.script_args) == script_args


def test_one_rank_is_started_without_torch_and_has_the_environment_that_the_agent_would_give_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second torch would cost seconds at the start, and half a gigabyte for the whole run."""
    folder, script = place
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    script("supervise(lambda stop: (here / 'env.json').write_text(json.dumps(dict(os.environ))) * 0)\n")
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


def test_a_module_in_the_current_folder_is_run(place: Place) -> None:
    folder, script = place
    (folder / "own_package").mkdir()
    script("supervise(lambda stop: (here / 'ran').write_text(__name__) * 0)\n", "own_package/job.py")
    assert main(["--config", "run.toml", "own_package.job"]) == 0
    assert (folder / "own_package" / "ran").read_text() == "__main__"


def test_log_dir_collects_all_output_and_shows_the_end_of_a_failure(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
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


def test_debug_reaches_the_worker(place: Place) -> None:
    folder, script = place
    script("supervise(lambda stop: (here / 'level').write_text(os.environ['COSMOS_LOG_LEVEL']) * 0)\n")
    assert main(["--config", "run.toml", "--debug", "worker.py"]) == 0
    assert (folder / "level").read_text() == "DEBUG"


def test_several_ranks_share_the_cores_and_only_the_first_is_the_controller(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cosmos_rl.launcher.ranks.agent import run_workers
    from cosmos_rl.launcher.ranks.signals import StopRequest

    folder, script = place
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    keys = ["COSMOS_ROLE", "WORLD_SIZE", "OMP_NUM_THREADS", "COSMOS_RUN_DIR"]
    script(
        f"(here / os.environ['RANK']).write_text(json.dumps([os.environ[key] for key in {keys}]))\n"
        "supervise(lambda stop: 75 if os.environ['RANK'] == '1' else 0)\n"
    )
    command = [sys.executable, "worker.py"]
    assert run_workers(command, environment={"COSMOS_RUN_DIR": "r"}, stop=StopRequest(), nproc=2) == (75, "")
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert json.loads((folder / "0").read_text()) == ["Controller", "2", threads, "r"]
    assert json.loads((folder / "1").read_text()) == ["Policy", "2", threads, "r"]


def test_a_log_line_looks_as_documented() -> None:
    code = "from cosmos_rl.utils.logging import logger; logger.info('hidden'); logger.warning('seen')"
    several = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "COSMOS_LOG_LEVEL": "warning"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=several, check=True)
    line = r"\[rank1\]:\[cosmos\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - cosmos - WARNING - seen\n"
    assert re.fullmatch(line, done.stdout)
    one = {**several, "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=one, check=True)
    assert done.stdout.startswith("[cosmos] ")


def test_resume_writes_into_the_same_run_and_keeps_the_earlier_record(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, script = place
    script("supervise(lambda stop: 0)\n")
    assert main(["--config", "run.toml", "worker.py"]) == 0
    run = newest_run(folder)
    assert main(["--config", "run.toml", "--train.resume=true", "worker.py"]) == 0
    assert newest_run(folder) == run
    record = json.loads((run / "run.json").read_text())
    assert "--train.resume=true" in record["argv"]
    assert [earlier["argv"][-1] for earlier in record["earlier"]] == ["worker.py"]
    assert "holds no checkpoint yet: starting it again from step 0" in capfd.readouterr().out


def test_a_run_that_is_still_being_written_is_not_joined(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    folder, script = place
    script(
        "from cosmos_rl.launcher.cli import main\n"
        "def body(stop):\n"
        "    return 75 if main(['--config', 'run.toml', '--train.resume=true', 'worker.py']) == 2 else 0\n"
        "supervise(body)\n"
    )
    assert main(["--config", "run.toml", "worker.py"]) == 75
    run = newest_run(folder)
    assert f"error: {run} is being written by process {os.getpid()}" in capfd.readouterr().err
    assert json.loads((run / "run.json").read_text())["earlier"] == []


def test_verbs_have_their_own_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny-model", "--help"]) == 0
    assert "sd3" in capfd.readouterr().out


def test_a_run_folder_as_config_is_the_run_that_continues(place: Place) -> None:
    folder, script = place
    script("supervise(lambda stop: 0)\n")
    assert main(["--config", "run.toml", "--train.timestamp=20250101000000", "worker.py"]) == 0
    assert main(["--config", "run.toml", "worker.py"]) == 0
    assert main(["--config", "outputs/20250101000000", "--train.resume=true", "worker.py"]) == 0
    record = json.loads((folder / "outputs" / "20250101000000" / "run.json").read_text())
    assert len(record["earlier"]) == 1
    assert len([path for path in (folder / "outputs").iterdir() if path.name.isdigit()]) == 2
