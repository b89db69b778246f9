"""What a reward starts ends with it, and no secret reaches it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from cosmos_rl_reward.config import RewardArgs
from cosmos_rl_reward.spool import Spool
from cosmos_rl_reward.worker import process_tree
from cosmos_rl_reward.worker.environment import filter_environment
from cosmos_rl_reward.worker.host import make_reward_spec
from cosmos_rl_reward.worker.replica import Replica
from tests.service import MOODY, TESTS, Service, body, image
from tests.test_pool import ident, spooled

KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HOME")
KEPT += ("TOKENIZERS_PARALLELISM", "https_proxy", "SSL_CERT_FILE", "TORCH_HOME", "XDG_CACHE_HOME", "LD_LIBRARY_PATH")
SECRETS = ("COSMOS_RL_REWARD_INTERNAL_BROKER", "COSMOS_RL_REWARD_BROKER_URL", "COSMOS_RL_REWARD_REDIS_PASSWORD")
SECRETS += ("COSMOS_RL_REWARD_TOKENS", "REDIS_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "WANDB_API_KEY")
SECRETS += ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "DATABASE_URL", "GITHUB_TOKEN", "MY_ENDPOINT_KEY")


def test_only_variables_of_the_list_reach_a_reward():
    found = filter_environment(dict.fromkeys((*KEPT, *SECRETS), "value"))
    assert found == {**dict.fromkeys(KEPT, "value"), "HF_HUB_OFFLINE": "1"}
    assert filter_environment({"HF_HUB_OFFLINE": "0"}) == {"HF_HUB_OFFLINE": "0"}
    # who downloads weights for its user may use that user's token, and nothing else
    found = filter_environment(dict.fromkeys((*KEPT, *SECRETS), "value"), downloads=True)
    assert set(found) == {*KEPT, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}


@pytest.mark.process
def test_no_secret_of_the_service_reaches_a_scorer(tmp_path):
    secret = {name: f"secret-{name}" for name in SECRETS if not name.startswith("COSMOS_RL_REWARD")}
    rewards = [{**MOODY, "environment": {"MINE": "given"}}]
    with Service(tmp_path, {"reward_args": rewards}, secret) as service:
        found = service.processes()["scorer"][0].environ()
    assert found["MINE"] == "given"
    assert [name for name in found if name.startswith("COSMOS_RL_REWARD")] == [process_tree.MARK]
    assert not [value for value in found.values() if "secret-" in value or "broker" in value]


def alive(pids):
    """Those of the processes that still run."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
    return found


def started(path):
    return [int(pid) for pid in path.read_text().split()]


@pytest.mark.process
def test_children_end_with_their_reward_however_it_ends(tmp_path):
    """Scorer killed by its host, host killed, root killed: in sessions of their own, or plainly forked."""
    with Service(tmp_path, {"reward_args": [{**MOODY, "deadline_s": 3}]}) as service:
        for victim in ("deadline", "workers", "root"):
            note = tmp_path / victim
            service.result(service.submit(image(), prompts=[f"leave {note}"]))
            children = started(note)
            assert len(alive(children)) == 3, victim
            if victim == "deadline":
                service.submit(image(), prompts=["sleep 60"])
            elif victim == "workers":
                service.kill("workers")
            else:
                service.kill_root()
            if victim == "workers":  # a bare environment has no mark: such a process is ended while its host lives
                children = [children[0], children[2]]
                os.kill(started(note)[1], signal.SIGKILL)
            _gone(children, victim)
            if victim == "deadline":
                service.until(lambda: service.get("/readyz").json()["ready"], 60, "it is back")
            elif victim == "workers":
                restarts = service.until(lambda: _host_restarts(service), 60, "the crash is counted")
                assert restarts == 1
                metric = "reward_host_restarts 1.0"
                service.until(lambda line=metric: line in service.get("/metrics").text, 20, metric)
                service.until(lambda: service.get("/readyz").json()["ready"], 60, "it is back")
        service.process = None


def _host_restarts(service):
    hosts = service.get("/api/reward/rewards").json()["hosts"]
    return max((host["restarts"] for host in hosts.values()), default=0)


def _gone(children, what):
    end = time.monotonic() + 60
    while alive(children) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(children) == [], what


@pytest.mark.process
def test_leftovers_of_a_host_that_is_gone_are_ended_and_no_others():
    code = (
        "import time; from cosmos_rl_reward.worker import process_tree\n"
        "print(process_tree.new_mark(), flush=True); time.sleep(600)"
    )
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert host.stdout
    mark = host.stdout.readline().strip()
    namespace, pid, ticks, name = mark.rsplit(":", 3)
    assert int(pid) == host.pid

    def child(mark):
        return subprocess.Popen(["sleep", "600"], env={**os.environ, process_tree.MARK: mark}, start_new_session=True)

    ours, theirs = child(mark), child(process_tree.new_mark())
    elsewhere, garbled = child(f"pid:[1]:{pid}:{ticks}:{name}"), child("x")
    reused = child(f"{namespace}:{os.getpid()}:1:{name}")  # the PID belongs to a later process now
    try:
        assert process_tree.kill_leftovers() == [reused.pid]
        host.kill()
        host.wait()
        assert process_tree.kill_leftovers() == [ours.pid]
        assert [p.poll() for p in (theirs, elsewhere, garbled)] == [None] * 3
    finally:
        for process in (host, ours, theirs, elsewhere, garbled, reused):
            process.kill()
            process.wait()


@pytest.mark.process
def test_a_replica_that_is_killed_takes_everything_along(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    spec = make_reward_spec(RewardArgs(**MOODY), 3)

    async def run():
        replica = Replica(spec.name, spec.workers.venv_python, spec.workers.environment)
        await replica.start(spec.message, 120)
        assert replica._process
        assert replica._process.pid in Replica.running
        note = tmp_path / "note"
        spool = Spool(tmp_path / "spool")
        job = spooled(spool, body(image(), prompts=[f"leave {note}"]), ident(1))
        await replica.score([{"id": job.id, "path": str(spool.job_path(job.id)), "decoded": ""}], 60)
        children = started(note)
        assert alive(children) == children
        await replica.kill()
        assert not Replica.running
        return children

    _gone(asyncio.run(run()), "all three")
