"""Old clients, the examples, the benchmark and the commands, as they are documented."""

import io
import json
import os
import re
import runpy
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from benchmarks import latency
from tests.service import Service, image

pytestmark = pytest.mark.process
EXAMPLES = Path(__file__).parents[1] / "examples"


def tiny_vae(folder, channels):
    torch.manual_seed(channels)
    mean, std = [0.1 * i for i in range(channels)], [1 + 0.05 * i for i in range(channels)]
    shape: dict[str, Any] = {"base_dim": 8, "z_dim": channels, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    model = AutoencoderKLWan(**shape, latents_mean=mean, latents_std=std).eval()
    model.save_pretrained(folder / "vae")
    return model


@pytest.fixture(scope="module")
def vaes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vaes")
    return folder, {16: tiny_vae(folder / "wan21", 16), 48: tiny_vae(folder / "wan22", 48)}


@pytest.fixture(scope="module")
def service(tmp_path_factory, vaes):
    folder, _ = vaes
    rewards = ("mock", "ocr", "jpeg_compressibility")
    config = {
        "reward_args": [{"reward_type": name, "device": "cpu"} for name in rewards],
        "decode_args": {
            "model_path": str(folder / "wan21"),
            "wan2pt2_model_path": str(folder / "wan22"),
            "dtype": "float32",
            "device": "cpu",
        },
    }
    with Service(tmp_path_factory.mktemp("clients"), config) as running:
        yield running


def reference(model, latents):
    """Pixels by the documented formula, sample by sample."""
    mean = torch.tensor(model.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(model.config.latents_std).view(1, -1, 1, 1, 1)
    videos = []
    for sample in latents.bfloat16().float():
        with torch.no_grad():
            video = model.decode(sample[None] * std + mean).sample[0]
        videos.append(((video.clamp(-1, 1) + 1) / 2 * 255).round().to(torch.uint8))
    return torch.stack(videos).numpy()


@pytest.mark.parametrize("channels", [16, 48])
@pytest.mark.parametrize("wire", ["float16", "bfloat16 bytes", "torch file"])
def test_latents_of_every_client_generation_are_decoded(service, vaes, channels, wire):
    torch.manual_seed(1)
    latents = torch.randn(2, channels, 2, 4, 6).half().bfloat16()
    metadata = {
        "prompts": ["a", "b"],
        "reward_fn": {"mock": 1, "jpeg_compressibility": 1},
        "video_infos": [{"video_fps": 16}] * 2,
    }
    file = io.BytesIO()
    if wire == "float16":
        np.save(file, latents.half().numpy())
        metadata["media_type"] = "latent"
    elif wire == "bfloat16 bytes":
        np.save(file, latents.view(torch.uint8).numpy())
        metadata["media_type"] = "latent"
    else:  # the oldest trainer said nothing about the media
        torch.save(latents, file)
    job = service.enqueue(json.dumps(metadata).encode() + b"\n" + file.getvalue()).json()["uuid"]
    result = service.result(job, "mock", 60)
    videos = reference(vaes[1][channels], latents)
    np.testing.assert_allclose(result["scores"]["mock"], videos.mean((1, 2, 3, 4)) / 255, atol=1e-6)
    assert result["input_info"]["shape"] == [2, channels, 2, 4, 6]
    assert result["input_info"]["dtype"] == "torch.bfloat16"
    assert float(result["decoded_duration"]) >= 0
    assert service.result(job, "jpeg_compressibility")["state"] == "succeeded"
    decoded = list((service.state / "spool" / "decoded").rglob("*.job"))
    service.until(lambda: not any(path.exists() for path in decoded), 5, "decoded videos are removed")


def run_example(monkeypatch, name, **environment):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_the_example_clients_get_scores(service, monkeypatch, capsys):
    host = f"http://127.0.0.1:{service.port}"
    run_example(monkeypatch, "image_client", REWARD_HOST=host, REWARD_NAMES="ocr,mock")
    shown = capsys.readouterr().out
    assert shown.startswith("Ping request received\njob ")
    scores = re.search(r'"ocr_reward": \[\s+(\S+),\s+(\S+)\s', shown)
    assert scores
    first, second = map(float, scores.groups())
    assert first == 1.0 > second
    assert '"mock": [' in shown
    run_example(monkeypatch, "video_client", REWARD_HOST=host, REWARD_NAMES="mock", REWARD_SHAPE="1,16,2,4,6")
    assert '"state": "succeeded"' in capsys.readouterr().out


def test_an_old_client_with_a_polling_loop_works(service):
    """As trainers of three generations do it: bearer token always sent, any status but 2xx means again."""
    metadata = {"media_type": "image", "prompts": ['the word "OPEN"'], "reward_fn": {"ocr": 1.0}}
    file = io.BytesIO()
    np.save(file, image(255, 1, 64))

    def post(path, content):
        url = f"http://127.0.0.1:{service.port}/api/reward/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, content, {"Authorization": "Bearer "})) as answer:
            return json.load(answer)

    job = post("enqueue", json.dumps(metadata).encode() + b"\n" + file.getvalue())["uuid"]

    def pulled():
        try:
            return post("pull", urllib.parse.urlencode({"uuid": job, "type": "ocr"}).encode())
        except urllib.error.HTTPError:
            return None

    result = service.until(pulled, 30, "the old client gets its result")
    assert result["scores"]["ocr_reward"] == [0.0]


def test_the_request_of_the_readme_is_true(service, tmp_path):
    """The lines as they stand there, run in a shell, but for the port."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```bash\n(.*?curl.*?)```", readme, re.S)
    ours = lines.replace("localhost:8080", f"127.0.0.1:{service.port}")
    assert ours.count(f":{service.port}/v2/score") == 1
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-ec", ours],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["state"] == "succeeded"
    assert answer["rewards"]["jpeg_compressibility"]["scores"]["jpeg_compressibility"][0] < 0
    assert list(answer) == ["id", "state", "rewards"]


def test_the_latency_benchmark_takes_the_documented_flags(service, tmp_path, capsys):
    host = f"http://127.0.0.1:{service.port}"
    common = ["--host", host, "--token", "", "--poll-interval", "0.5", "--max-wait", "60", "--enqueue-timeout", "60"]
    common += ["--assume-upload-mbps", "20", "--pull-timeout", "10", "--print-response", "last"]
    common += ["--print-max-chars", "100"]
    assert latency.main([*common, "--num-requests", "1", "--shape", "1,32,32,3"]) == 0  # no hpsv2 here
    capsys.readouterr()
    image = ["--num-requests", "6", "--shape", "[1,32,32,3]", "--reward-fn", "mock=2", "--reward-fn", "ocr"]
    report = tmp_path / "report.json"
    assert latency.main([*common, *image, "--concurrency", "3", "--json", str(report)]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"request \d+: ", shown)) == 6
    assert re.search(r"n 6 mean \S+ min \S+ max \S+\n.* p50 \S+ p90 \S+ p95 \S+", shown)
    data = json.loads(report.read_text())
    assert (data["n"], data["errors"]) == (6, {})
    video = [
        "--num-requests",
        "1",
        "--media-type",
        "video",
        "--shape",
        "1,16,1,2,2",
        "--reward-fn",
        "mock",
        "--no-ping",
    ]
    for dtype in ("bfloat16", "float16", "float32"):
        assert latency.main([*common, *video, "--video-dtype", dtype]) == 0
    assert latency.main([*common, "--num-requests", "2", "--rate", "50", "--reward-fn", "none"]) == 1
    assert "RuntimeError" in capsys.readouterr().out


def test_commands(tmp_path):
    """``--rewards mock`` needs no file; the broker command starts a server that can be used from elsewhere."""
    assert latency.main(["--self-test", "--num-requests", "2", "--shape", "1,8,8,3"]) == 0
    run = [sys.executable, "-c", "import sys; from cosmos_rl_reward.cli import redis_main; sys.exit(redis_main())"]
    assert subprocess.run([*run, "--port", "0"], capture_output=True).returncode == 1
    open_to_all = subprocess.run([*run, "--port", "7000", "--bind", "0.0.0.0"], capture_output=True, text=True)
    assert open_to_all.returncode == 2
    assert "password" in open_to_all.stderr
    started = subprocess.run(
        [*run, "--port", "17111"],
        capture_output=True,
        text=True,
        env={**os.environ, "COSMOS_RL_REWARD_REDIS_PASSWORD": "p" * 20, "TMPDIR": str(tmp_path)},
    )
    assert started.returncode == 0, started.stderr
    log = Path(started.stderr.strip().removeprefix("log: "))
    assert log.parent.parent == tmp_path
    assert log.parent.stat().st_mode & 0o777 == 0o700
    assert log.exists()
    url = started.stdout.strip()
    assert re.fullmatch(r"redis://127.0.0.1:\d+", url)
    url = url.replace("//", f"//:{'p' * 20}@")
    try:
        scale_out(tmp_path, url)
    finally:
        subprocess.run([sys.executable, "-c", _SHUTDOWN, url], check=True)


_SHUTDOWN = """
import sys
from valkey import Valkey
Valkey.from_url(sys.argv[1]).shutdown()
"""


def scale_out(tmp_path, url):
    """Two fronts and a worker process elsewhere, joined by a broker and a folder alone."""
    shared = {"blob_store": str(tmp_path / "blobs"), "reward_args": [{"reward_type": "mock"}]}
    environment = {"COSMOS_RL_REWARD_BROKER_URL": url}
    one = Service(tmp_path / "one", {**shared, "reward_args": [{"reward_type": "mock"}]}, environment)
    two = Service(tmp_path / "two", shared, environment)
    command = [sys.executable, "-m", "cosmos_rl_reward.cli", "worker", "--config", str(two.config), "--reward", "mock"]
    with open(tmp_path / "worker.log", "w") as log:
        worker = subprocess.Popen(command, stdout=log, stderr=log, env=one.environment)
    try:
        with one.start_front_only(), two.start_front_only():
            job = one.submit(image(51), "mock")
            assert two.result(job, "mock")["scores"]["mock"] == [0.2]  # any front answers for any other
            worker.terminate()
            assert worker.wait(20) == 0
    finally:
        worker.kill()
    assert "p" * 20 not in (tmp_path / "worker.log").read_text() + one.log.read_text()
