"""Starting, failing, being killed and ending, with real processes."""

import os
import signal
import ssl
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import psutil
import pytest

from tests.service import MOODY, Service, body, image

pytestmark = pytest.mark.process


def test_kill_any_process_and_nothing_is_lost(tmp_path):
    """One after the other: scorer, workers, broker, front, and the whole tree by its root."""
    with Service(tmp_path, {"reward_args": [MOODY, {"reward_type": "mock"}]}) as service:
        for victim in ("scorer", "workers", "broker", "front", "root"):
            slow = service.submit(image(1), prompts=["sleep 0.7"])
            jobs = [service.submit(image(i)) for i in range(2, 8)]
            time.sleep(0.3)  # the slow one is being scored
            began = time.monotonic()
            if victim == "root":
                service.kill_root()
                service.until(lambda: not _children(service), 30, "the tree ends with its root", killed=True)
                service.start(ready=False)
            else:
                service.kill(victim)
            results = [_patient(service, job) for job in (slow, *jobs)]
            assert [r["scores"]["mean"] for r in results] == [[float(i)] for i in range(1, 8)], victim
            assert time.monotonic() - began < 20, victim  # not a measurement: a lost job would wait for a minute
            service.until(lambda: service.get("/readyz").status_code == 200, 20, "all is well again")
        assert service.stop() == 0


def _children(service):
    mark = str(service.state)
    return [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or [])]


def _patient(service, job):
    """Pull as a client that survives a broken connection."""

    def attempt():
        answer = service.pull(job, wait=5)
        return answer.json() if answer.status_code == 200 else None

    return service.until(attempt, 40, f"job {job} ends")


def test_a_short_storm_of_kills(tmp_path):
    """A short run of ``benchmarks/chaos.py``."""
    options = ["--jobs=60", "--kills=6", "--max-outage=120", f"--folder={tmp_path}"]
    report = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *options],
        cwd=os.path.dirname(os.path.dirname(__file__)),
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.getcwd() + os.pathsep + os.environ.get("PYTHONPATH", "")},
    )
    assert report.returncode == 0, report.stdout[-3000:] + report.stderr[-3000:]


def test_one_broken_reward_harms_no_other(tmp_path):
    flag = tmp_path / "flag"
    rewards = [
        MOODY,
        {**MOODY, "reward_type": "unready", "options": {"start": "not ready"}, "required": False},
        {**MOODY, "reward_type": "unimportable", "options": {"start": "import error"}, "required": False},
        {**MOODY, "reward_type": "venvless", "venv_python": "/nowhere/bin/python", "required": False},
        {**MOODY, "reward_type": "mistaken", "options": {"strat": "x"}, "required": False},
        {**MOODY, "reward_type": "later", "options": {"start": "until flag", "flag": str(flag)}},
        {"reward_type": "no_such_reward", "required": False},
        {"reward_type": "disabled", "reward_class": "never.imported:Thing", "enable": False},
    ]
    service = Service(tmp_path, {"reward_args": rewards}).start(ready=False)
    with service:
        names = ("unready", "unimportable", "venvless", "mistaken", "later", "no_such_reward")

        def reasons():
            found = service.get("/api/reward/rewards").json()["rewards"]
            done = all(found[name]["state"] == "failed" for name in names) and found["moody"]["state"] == "ready"
            return found if done else None

        found = service.until(reasons, 30, "each reward has its state")
        assert "disabled" not in found
        for name, words in {
            "unready": "weights missing: put them into /nowhere",
            "unimportable": "ImportError: cannot import name 'helper'",
            "venvless": "interpreter /nowhere/bin/python cannot be started: No such file or directory",
            "mistaken": "no such option of moody; did you mean 'start'?",
            "no_such_reward": "no reward is called 'no_such_reward'; known are",
        }.items():
            assert words in found[name]["reason"], found[name]
            refused = service.enqueue(body(image(), name))
            assert refused.status_code == 503
            assert words in refused.json()["message"]
        assert "interpreter" in found["unready"]["reason"]
        assert service.result(service.submit(image(3)))["scores"]["mean"] == [3.0]
        assert service.get("/readyz").status_code == 503  # "later" is required
        flag.touch()
        service.until(lambda: service.get("/readyz").status_code == 200, 60, "the reward was tried again")
        job = service.submit(image(4), "later")
        assert service.result(job, "later")["scores"]["mean"] == [4.0]


def test_loading_ready_failed_restarted_are_visible(tmp_path):
    rewards = [{**MOODY, "options": {"start": "slow"}}]
    service = Service(tmp_path, {"reward_args": rewards}).start(ready=False)
    with service:
        seen = service.until(lambda: _state(service) == "loading" and "loading", 15, "loading is seen")
        assert service.get("/readyz").status_code == 503
        early = service.submit(image(2))  # taken while it loads
        service.until(lambda: _state(service) == "ready", 15, "ready is seen")
        assert service.get("/readyz").status_code == 200
        assert service.result(early)["scores"]["mean"] == [2.0]
        service.kill("scorer")
        restarted = 'reward_worker_restarts{reward="moody"} 1.0'
        service.until(lambda: restarted in service.get("/metrics").text, 15, "the restart is counted")
        service.until(lambda: _state(service) == "ready", 15, "ready again")
        assert seen == "loading"


def _state(service):
    return service.get("/api/reward/rewards").json()["rewards"]["moody"]["state"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ending_drains_and_leaves_nothing(tmp_path, number):
    service = Service(tmp_path, {"reward_args": [MOODY]}).start()
    running = service.submit(image(1), prompts=["sleep 1.5"])
    time.sleep(0.4)
    stopper = threading.Thread(target=lambda: codes.append(service.stop(number)))
    codes: list[int] = []
    other = httpx.Client(base_url=f"http://127.0.0.1:{service.port}", timeout=30)
    stopper.start()
    service.until(lambda: other.get("/readyz").json()["draining"] or None, 5, "it is draining")
    assert other.post("/api/reward/enqueue", content=body(image())).status_code == 503
    answer = other.post("/api/reward/pull", data={"uuid": running, "type": "moody", "wait": "5"})
    assert answer.json()["scores"]["mean"] == [1.0]  # the running job was finished, and its result returned
    other.close()
    stopper.join(30)
    assert codes == [0]
    assert not (service.state / "run").exists()


def test_what_does_not_finish_in_time_is_done_after_the_next_start(tmp_path):
    service = Service(tmp_path, {"reward_args": [MOODY], "drain_s": 0.5}).start()
    jobs = [service.submit(image(i), prompts=["sleep 2"]) for i in range(3)]
    time.sleep(0.5)
    assert service.stop() == 0
    with service.start():
        assert [service.result(job)["scores"]["mean"] for job in jobs] == [[0.0], [1.0], [2.0]]


def test_secrets_show_up_nowhere(tmp_path):
    token, key = "token-" + "t" * 20, "endpoint-key-very-secret"
    rewards = [{**MOODY, "endpoint_api_key": key}]
    service = Service(tmp_path, {"reward_args": rewards}, {"COSMOS_RL_REWARD_TOKENS": token})
    service.headers = {"Authorization": f"Bearer {token}"}
    with service.start():
        service.result(service.submit(image()))
        service.client.get("/metrics", headers={"Authorization": "Bearer wrong-token-here"})
        lines = [" ".join(p.cmdline()) for group in service.processes().values() for p in group]
        environments = [p.environ() for p in service.processes()["scorer"]]
        shown = service.get("/api/reward/rewards").text
    saved = [p.read_bytes() for p in service.state.rglob("*") if p.is_file()]
    everything = "\n".join([*lines, shown, service.log.read_text(), *(s.decode("latin1") for s in saved)])
    assert token not in everything
    assert key not in everything
    assert "wrong-token-here" not in everything
    assert not any("COSMOS_RL_REWARD_TOKENS" in environment for environment in environments)


def test_starts_that_are_refused(tmp_path):
    def start(config, **environment):
        service = Service(tmp_path / "x", config, environment)
        command = [sys.executable, "-m", "cosmos_rl_reward.cli", "--config", str(service.config)]
        done = subprocess.run(command, env=service.environment, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    code, text = start({"reward_args": [MOODY], "host": "0.0.0.0"})
    assert (code, "there is no token" in text) == (2, True)
    code, text = start({"reward_args": [{**MOODY, "devise": "cpu"}]})
    assert (code, "reward_args[0].devise: unknown key; did you mean 'device'?" in text) == (2, True)
    code, text = start({"reward_args": []})
    assert (code, "no reward is enabled" in text) == (2, True)
    with Service(tmp_path / "y", {"reward_args": [{"reward_type": "mock"}]}) as running:
        taken = {"reward_args": [MOODY], "port": running.port}
        code, text = start(taken)
        assert (code, "cannot listen on 127.0.0.1" in text) == (2, True)
        code, text = start({"reward_args": [MOODY], "state_dir": str(running.state)})
        assert (code, "is in use by another service" in text) == (2, True)


def test_a_large_body_does_not_grow_the_front(tmp_path):
    """91 MiB of latents from a client of old; the decoder is off, so only the front is at work."""
    config = {"reward_args": [{"reward_type": "mock"}], "decode_args": {"model_path": str(tmp_path)}}
    with Service(tmp_path, config) as service:
        front = service.processes()["front"][0]
        content = body(np.zeros((1, 64, 1024, 1456, 1), np.uint8)[:, :3], "mock", media_type="video")
        big = body(np.zeros((1, 3, 64, 497, 1000), np.uint8), "mock", media_type="video")
        assert len(big) > 90 << 20
        service.submit(image(), "mock")
        del content
        base, peak, stop = front.memory_info().rss, [0], threading.Event()

        def watch():
            while not stop.wait(0.005):
                peak[0] = max(peak[0], front.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        job = service.enqueue(big).json()["uuid"]
        stop.set()
        watcher.join()
        assert peak[0] - base < 32 << 20
        assert service.result(job, "mock", 60)["scores"]["mock"] == [0.0]


def test_tls(tmp_path):
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", key, "-out", cert]
    subprocess.run([*new, *names], check=True, capture_output=True)
    config = {"reward_args": [{"reward_type": "mock"}], "tls_cert": str(cert), "tls_key": str(key)}
    service = Service(tmp_path / "s", config).start(ready=False)
    with service:
        trusted = httpx.Client(
            base_url=f"https://localhost:{service.port}", verify=ssl.create_default_context(cafile=cert)
        )
        service.until(lambda: trusted.get("/readyz").status_code == 200, 20, "it is ready, over TLS")
        trusted.close()
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{service.port}/healthz")
