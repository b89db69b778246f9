"""Fronts and workers that share nothing but a broker and an S3-compatible store."""

import contextlib
import json
import re
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch

from cosmos_rl_reward.broker.embedded import make_server_command
from tests.object_store import SECRET, URL, until
from tests.service import MOODY, Service, body, image
from tests.test_clients import reference, tiny_vae


@pytest.fixture
def broker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("b")
    server = subprocess.Popen(make_server_command(folder / "s", folder), stdin=subprocess.PIPE)
    yield f"unix://{folder / 's'}"
    server.kill()
    server.wait()


@contextlib.contextmanager
def worker(there, *rewards):
    """A worker process on the machine ``there``; gives the process and the path of its log."""
    command = [sys.executable, "-m", "cosmos_rl_reward.cli", "worker", "--config", str(there.config)]
    log = there.folder / "worker.log"
    with open(log, "w") as file:
        asked = [part for name in rewards for part in ("--reward", name)]
        process = subprocess.Popen([*command, *asked], stdout=file, stderr=file, env=there.environment)
    try:
        yield process, log
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()


@pytest.mark.process
def test_fronts_and_workers_share_nothing_but_a_broker_and_a_store(store, tmp_path, broker):
    """A front is killed for good while a job runs, another one answers; the store goes away while a job runs."""
    config = {"blob_store": URL, "reward_args": [MOODY]}
    environment = {**store.environment, "AWS_SESSION_TOKEN": SECRET, "COSMOS_RL_REWARD_BROKER_URL": broker}
    environment["COSMOS_RL_REWARD_LOG_LEVEL"] = "DEBUG"
    one, two, there = (Service(tmp_path / name, config, environment) for name in ("one", "two", "worker"))
    with worker(there) as (process, log):
        with one.start_front_only():
            assert one.result(one.submit(image(51)))["scores"]["mean"] == [51.0]
            job = one.submit(image(52), prompts=["sleep 1"])
            one.kill_root()
        with two.start_front_only():
            assert two.result(job)["scores"]["mean"] == [52.0]
            slow = two.submit(image(53), prompts=["sleep 1"])
            time.sleep(0.5)  # it is being scored
            store.stop()
            try:
                refused = two.enqueue(body(image(54)))
                until(lambda: "cannot be read or written" in log.read_text(), 20, log)
            finally:
                store.start()
            assert (refused.status_code, "Could not connect" in refused.json()["message"]) == (503, True)
            assert two.result(slow)["scores"]["mean"] == [53.0]
            assert two.result(two.submit(image(55)))["scores"]["mean"] == [55.0]
            two.until(lambda: not any(key.startswith("open/") for key in store.names()), 40, "all jobs are cut off")
            assert not list((there.state / "store").rglob("*.job"))
            family = psutil.Process(process.pid).children(recursive=True)
            arguments = json.dumps([p.cmdline() for group in (*two.processes().values(), family) for p in group])
            [scorer] = [p for p in family if "scorer.py" in " ".join(p.cmdline())]
            assert SECRET not in scorer.environ().values()
    assert SECRET not in arguments + log.read_text() + one.log.read_text() + two.log.read_text()


@pytest.mark.process
def test_latents_are_decoded_on_one_machine_and_scored_on_another(store, tmp_path, broker):
    vae = tiny_vae(tmp_path / "vae", 16)
    decoding = {"model_path": str(tmp_path / "vae"), "dtype": "float32", "device": "cpu"}
    config = {"blob_store": URL, "reward_args": [{"reward_type": "mock"}], "decode_args": decoding}
    environment = {**store.environment, "COSMOS_RL_REWARD_BROKER_URL": broker}
    front, decoder, scorer = (Service(tmp_path / name, config, environment) for name in ("front", "decoder", "scorer"))
    latents = torch.randn(2, 16, 2, 4, 6, generator=torch.Generator().manual_seed(1)).half()
    with worker(decoder, "_decode") as (_, decoding_log), worker(scorer, "mock") as (_, log), front.start_front_only():
        job = front.submit(latents.numpy(), "mock", media_type="latent")
        scores = front.result(job, "mock", 60)["scores"]["mock"]
        front.until(lambda: not any(key.startswith("open/") for key in store.names()), 40, "latents are removed")
    # each says what it has done itself
    for path, text in ((decoding_log, "_decode 2 samples"), (log, "mock 2 samples"), (front.log, "mock 2 samples")):
        assert len(re.findall(rf" INFO last \d+ s: {text}", path.read_text())) == 1
    np.testing.assert_allclose(scores, reference(vae, latents).mean((1, 2, 3, 4)) / 255, atol=2e-3)
