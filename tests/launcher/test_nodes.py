"""Several launchers, one for each machine, form one job. Here all machines are this one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.ranks import coordinator
from cosmos_rl.launcher.ranks.nodes import JobEnded, Nodes, read_nodes
from cosmos_rl.launcher.ranks.signals import StopRequest
from cosmos_rl.policy.config import Config, world_size
from cosmos_rl.policy.config.ranks import resolve_world_size
from tests.support import patience
from tests.support.launched import CONFIG, WORKER
from tests.support.paths import ROOT
from tests.support.patience import exit_code, wait_until
from tests.support.ranks import free_port
from tests.support.states import trace

HERE = "127.0.0.1;127.0.0.1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((2, 2, HERE, 1), "--worker-idx 2: --num-workers 2 has the indices 0 to 1"),
        ((1, 1, HERE, 1), "--worker-idx 1: --num-workers 1 has the indices 0 to 0"),
        ((2, 0, None, 1), "--node-ip-list: --num-workers 2 needs 2 addresses"),
        ((3, 0, "10.0.0.1; 10.0.0.2;", 1), "--num-workers 3 needs 3 addresses"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_by_name(
    given: tuple[int, int, str | None, int], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as caught:
        read_nodes(*given)
    assert message in str(caught.value)
    workers, index, addresses, port = given
    flags = ["--num-workers", str(workers), "--worker-idx", str(index), "--rdzv-port", str(port)]
    flags += ["--node-ip-list", addresses] if addresses else []
    assert main([*flags, "--config", "x.toml"]) == 2
    assert message in capsys.readouterr().err


def test_the_flags_name_the_machines() -> None:
    nodes = read_nodes(2, 1, "10.0.0.1; 10.0.0.2", 7)
    assert nodes == Nodes(("10.0.0.1", "10.0.0.2"), 1, 7)
    assert (nodes.count, nodes.address, nodes.endpoint) == (2, "10.0.0.2", "10.0.0.1:7")
    assert read_nodes(1, 0, "10.0.0.1", 7).count == 1


@pytest.mark.parametrize(
    ("shards", "nproc", "gpus", "nodes", "ranks"),
    [(8, None, 0, 2, 2), (1, 4, 0, 2, 8), (16, None, 8, 2, 16), (-1, None, 8, 2, 16), (16, 4, 8, 2, 8)],
)
def test_ranks_are_counted_over_all_machines(shards: int, nproc: int | None, gpus: int, nodes: int, ranks: int) -> None:
    config = Config.from_dict({"policy": {"parallelism": {"dp_shard_size": shards}}})
    assert world_size(resolve_world_size(config, nproc, gpus, nodes).policy.parallelism) == ranks


@pytest.mark.parametrize(
    ("shards", "nproc", "message"),
    [
        (32, None, "(dp_shard_size 32 = 32 ranks) needs 16 GPUs on each of 2 nodes, this machine has 8 GPUs"),
        (3, None, "(dp_shard_size 3 = 3 ranks) is not a multiple of --num-workers 2"),
        (3, 9, "--nproc-per-node 9 needs 9 GPUs on each of 2 nodes"),
    ],
)
def test_more_ranks_than_the_machines_have_is_refused(shards: int, nproc: int | None, message: str) -> None:
    config = Config.from_dict({"policy": {"parallelism": {"dp_shard_size": shards}}})
    with pytest.raises(UserError) as caught:
        resolve_world_size(config, nproc, 8, 2)
    assert message in str(caught.value)


def test_node_0_that_does_not_come_is_named() -> None:
    nodes = Nodes(("127.0.0.1", "127.0.0.1"), 1, free_port())
    with pytest.raises(JobEnded) as caught:
        coordinator.Coordinator(nodes, StopRequest(), join_s=0.5)
    assert caught.value.code == 1
    where = f"node 0 (127.0.0.1), which should listen on port {nodes.port} (--worker-idx 0)"
    expected = f"timed out after 0.5 s, waiting for {where}"
    assert expected in str(caught.value)


def joined(silent_s: float) -> tuple[coordinator.Coordinator, coordinator.Coordinator]:
    port = free_port()
    made = [Nodes(("127.0.0.1", "127.0.0.1"), index, port) for index in (0, 1)]
    return tuple(coordinator.Coordinator(nodes, StopRequest(), join_s=20.0, silent_s=silent_s) for nodes in made)  # pyright: ignore


def test_a_node_that_falls_silent_is_gone_unless_it_was_done() -> None:
    first, second = joined(silent_s=0.4)

    def look(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            first.exchange()
            time.sleep(0.02)

    look(1.0)  # it has not come yet
    second.exchange()
    with pytest.raises(JobEnded, match=r"node 1 \(127.0.0.1\) is lost: no heartbeat for 0.4 s"):
        look(20.0)
    second.announce_done()
    look(1.0)


def test_a_stop_request_and_the_end_of_a_node_reach_the_others() -> None:
    first, second = joined(silent_s=60.0)
    second._stop.note("SIGUSR1")
    second.exchange()
    first.exchange()
    assert first._stop.requested == "SIGUSR1"
    second.announce_failure(1, "no disk")
    with pytest.raises(JobEnded) as caught:
        first.exchange()
    assert (caught.value.code, caught.value.reason) == (1, "node 1 (127.0.0.1): no disk")


def test_two_commands_with_the_same_index_are_noticed() -> None:
    first, second = joined(silent_s=60.0)
    duplicate = coordinator.Coordinator(second.nodes, StopRequest(), join_s=1.0)
    with pytest.raises(JobEnded, match="timed out after 1 s, waiting for a plan of node 0"):
        duplicate.receive_plan()
    with pytest.raises(UserError, match="--worker-idx 1: another command has joined"):
        second.receive_plan()
    with pytest.raises(UserError, match="the port is in use; --rdzv-port takes another"):
        coordinator.Coordinator(first.nodes, StopRequest())


# ---- two launchers -------------------------------------------------------------------------------------------------

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the launcher of a node; its output goes to `node_<index>.log`."""
    port, started = free_port(), []

    def launcher(index: int, *arguments: str, count: int = 2) -> subprocess.Popen[bytes]:
        flags = ["--num-workers", str(count), "--worker-idx", str(index), "--rdzv-port", str(port)]
        flags += ["--node-ip-list", ";".join(["127.0.0.1"] * count)]
        command = [sys.executable, "-m", "cosmos_rl.launcher.cli", *flags, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with (tmp_path / f"node_{index}.log").open("ab") as log:
            started.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
        return started[-1]

    yield launcher
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def plain(tmp_path: Path) -> Callable[[str], None]:
    """Writes `run.toml` and `worker.py`, a worker without torch whose body is given."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    (tmp_path / "run.toml").write_text(CONFIG.replace("MODEL", "model"))

    def write(body: str) -> None:
        (tmp_path / "worker.py").write_text(WORKER.replace("here /", "here / os.environ['RANK'] /") + body)
        for rank in range(3):
            (tmp_path / str(rank)).mkdir(exist_ok=True)

    return write


def codes_of(*launchers: subprocess.Popen[bytes]) -> list[int]:
    return [exit_code(launcher) for launcher in launchers]


def run_folders(output: Path) -> list[Path]:
    return sorted(path for path in output.iterdir() if path.name.isdigit()) if output.exists() else []


@pytest.mark.process
def test_two_launchers_train_like_one_stop_together_and_resume(
    write_toml: Callable[..., Path], tmp_path: Path, start: Start
) -> None:
    config = str(write_toml(lora=False))
    options = ["--train.global_batch_size=8", "--train.max_num_steps=24", "--train.optm_lr=1e-3"]
    options += ["--train.ckpt.save_freq=100", "--train.ckpt.export_safetensors=false"]
    one, two = tmp_path / "one", tmp_path / "two"
    command = [sys.executable, "-m", "cosmos_rl.launcher.cli", "--config", config, "--nproc-per-node", "2", *options]
    done = patience.run([*command, f"--train.output_dir={one}"], cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    options += [f"--train.output_dir={two}", "--config", config]
    pair = [start(1, *options), start(0, *options)]
    wait_until(lambda: any("\n" in f.read_text() for f in two.glob("2*/metrics.jsonl")), "the first step")
    os.kill(pair[0].pid, signal.SIGTERM)
    assert codes_of(*pair) == [75, 75], (tmp_path / "node_0.log").read_text() + (tmp_path / "node_1.log").read_text()
    (run,) = run_folders(two)
    stopped = len(trace(run))
    assert 1 <= stopped < 24
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{stopped}"]

    assert codes_of(*[start(index, *options, "--train.resume=true") for index in (0, 1)]) == [0, 0]
    assert run_folders(two) == [run]
    (reference,) = run_folders(one)
    np.testing.assert_allclose(trace(run), trace(reference), rtol=1e-6, atol=1e-6)
    assert json.loads((run / "run.json").read_text())["earlier"]


@pytest.mark.process
def test_rank_0_is_on_node_0_whichever_comes_first(tmp_path: Path, start: Start, plain: Callable[[str], None]) -> None:
    keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "COSMOS_ROLE", "COSMOS_RUN_DIR"]
    plain(
        f"(here / os.environ['RANK'] / 'seen').write_text(json.dumps([os.environ[k] for k in {keys}]\n"
        "    + [os.environ['NODE']]))\nsupervise(lambda stop: 0)\n"
    )
    for index in (2, 0, 1):
        os.environ["NODE"] = str(index)
        process = start(index, "--config", "run.toml", "worker.py", count=3)
        del os.environ["NODE"]
        time.sleep(0.5 * (index == 2))
    assert exit_code(process) == 0
    (run,) = run_folders(tmp_path / "outputs")
    for rank in range(3):
        seen = json.loads((tmp_path / str(rank) / "seen").read_text())
        assert seen == [str(rank), "0", "3", "Policy" if rank else "Controller", str(run), str(rank)]


@pytest.mark.process
def test_a_killed_node_0_ends_the_other_with_an_error(
    tmp_path: Path, start: Start, plain: Callable[[str], None]
) -> None:
    plain("supervise(steps)\n")
    pair = [start(index, "--config", "run.toml", "worker.py") for index in (0, 1)]
    wait_until(lambda: all((tmp_path / str(rank) / "ready").exists() for rank in (0, 1)), "both workers")
    os.killpg(pair[0].pid, signal.SIGKILL)
    assert exit_code(pair[1]) == 1
    log = (tmp_path / "node_1.log").read_text()
    assert log.splitlines()[-1] == "error: the connection to node 0 (127.0.0.1) is lost; see its output"
    assert "Traceback" not in log


@pytest.mark.process
def test_a_failure_on_one_node_is_reported_on_the_other(
    tmp_path: Path, start: Start, plain: Callable[[str], None]
) -> None:
    plain(
        "def body(stop):\n    if os.environ['RANK'] == '1':\n        os._exit(4)\n    return steps(stop)\n"
        "supervise(body)\n"
    )
    assert codes_of(*[start(index, "--config", "run.toml", "worker.py") for index in (0, 1)]) == [1, 1]
    message = "node 1 (127.0.0.1): the worker of rank 1 ended with exit code 4"
    assert message in (tmp_path / "node_0.log").read_text()
    (run,) = run_folders(tmp_path / "outputs")
    ended = json.loads((run / "ended.json").read_text())
    assert (ended["code"], message in ended["reason"]) == (1, True)


@pytest.mark.process
def test_a_restart_is_counted_on_all_nodes(tmp_path: Path, start: Start, plain: Callable[[str], None]) -> None:
    plain(
        "def body(stop):\n    count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "    with (here / os.environ['RANK'] / 'starts').open('a') as file:\n        file.write(count)\n"
        "    if count == '0' and os.environ['RANK'] == '1':\n        os._exit(4)\n"
        "    return steps(stop) if count == '0' else 0\nsupervise(body)\n"
    )
    command = ["--max-restarts", "1", "--config", "run.toml", "worker.py"]
    assert codes_of(*[start(index, *command) for index in (0, 1)]) == [0, 0]
    assert [(tmp_path / str(rank) / "starts").read_text() for rank in (0, 1)] == ["01", "01"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("of_0", "of_1", "message"),
    [
        (["--train.epoch=0"], [], "train.epoch: found 0"),
        ([], ["--nproc-per-node", "2"], "--nproc-per-node 2: node 0 runs 1 ranks on each node"),
    ],
)
def test_what_one_node_refuses_ends_all_and_leaves_nothing(
    tmp_path: Path, start: Start, plain: Callable[[str], None], of_0: list[str], of_1: list[str], message: str
) -> None:
    plain("supervise(steps)\n")
    pair = [start(index, *own, "--config", "run.toml", "worker.py") for index, own in ((0, of_0), (1, of_1))]
    assert codes_of(*pair) == [2, 2]
    for index in (0, 1):
        assert message in (tmp_path / f"node_{index}.log").read_text()
    assert run_folders(tmp_path / "outputs") == []


@pytest.mark.process
def test_a_stop_while_the_workers_still_import_ends_all_nodes_quietly(
    tmp_path: Path, start: Start, plain: Callable[[str], None]
) -> None:
    plain("(here / os.environ['RANK'] / 'ready').touch()\ntime.sleep(60)\n")
    pair = [start(index, "--config", "run.toml", "worker.py") for index in (0, 1)]
    wait_until(lambda: all((tmp_path / str(rank) / "ready").exists() for rank in (0, 1)), "both workers")
    os.kill(pair[1].pid, signal.SIGTERM)
    assert codes_of(*pair) == [75, 75]
    assert "error" not in (tmp_path / "node_0.log").read_text() + (tmp_path / "node_1.log").read_text()
