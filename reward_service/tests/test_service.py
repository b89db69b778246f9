"""The service as clients see it: protocol v1 and its additions, against real processes."""

import json
import platform
import time

import numpy as np
import pytest

from tests.service import MOODY, Service, body, image, npy

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    rewards = [
        {**MOODY, "deadline_s": 2},
        {"reward_type": "function", "function": "moody_reward:brightness"},
        {"reward_type": "constant", "reward_class": "moody_reward:Constant"},
        {"reward_type": "jpeg_compressibility", "device": "cpu"},
    ]
    config = {"reward_args": rewards}
    with Service(tmp_path_factory.mktemp("service"), config, {"LEPTON_REPLICA_ID": "replica-7"}) as running:
        yield running


def test_ping_answers_byte_for_byte(service):
    for path in ("ping", "pin"):
        answer = service.client.post(f"/api/reward/{path}", data={"info_data": "{}"})
        assert (answer.status_code, answer.content) == (200, b'{"message":"Ping request received"}')
    assert service.client.post("/api/reward/ping", json={"info_data": "{}"}).status_code == 200
    assert service.client.post("/api/reward/ping").status_code == 200
    assert service.client.post("/api/reward/ping", data={"other": "1"}).status_code == 422


def test_image_job_from_enqueue_to_pull(service):
    images = np.stack([image(10)[0], image(30)[0]])
    answer = service.enqueue(body(images), headers={"Content-Type": "application/octet-stream"})
    assert answer.status_code == 200
    assert list(answer.json()) == ["uuid", "replica_id"]
    assert answer.json()["replica_id"] == "replica-7"
    result = service.result(answer.json()["uuid"])
    assert result["scores"]["mean"] == [10.0, 30.0]
    assert result["input_info"] == {"shape": [2, 8, 8, 3], "dtype": "torch.uint8", "min": "10.000", "max": "30.000"}
    assert result["type"] == "moody"
    assert float(result["duration"]) >= 0
    assert isinstance(result["duration"], str)
    assert result["decoded_duration"] == "0.00"
    assert result["state"] == "succeeded"
    assert result["provenance"]["reward_version"] == "1"


def test_pull_is_repeatable_and_takes_json_and_multipart(service):
    job = service.submit(image(5))
    first = service.result(job)
    fields = {"uuid": job, "type": "moody"}
    assert service.client.post("/api/reward/pull", json=fields).json() == first
    assert service.client.post("/api/reward/pull", data=fields, files={}).json() == first
    multipart = {k: (None, v) for k, v in fields.items()}
    assert service.client.post("/api/reward/pull", files=multipart).json() == first


def test_not_ready_and_unknown_answer_400_as_ever(service):
    job = service.submit(image(), prompts=["sleep 1"])
    answer = service.pull(job, wait=0)
    assert answer.status_code == 400
    assert answer.json()["message"] == f"Not found scores for {job}"
    assert answer.json()["state"] == "queued"
    assert answer.json()["position"] >= 0
    assert answer.headers["X-Job-State"] == "queued"
    assert answer.headers["Retry-After"] == "1"
    for unknown in ("0" * 8 + "-0000-0000-0000-" + "0" * 12, "../../../etc/passwd", "x\0y", ""):
        answer = service.client.post("/api/reward/pull", data={"uuid": unknown, "type": "moody"})
        assert answer.status_code == 400
        assert answer.json()["message"] == f"Not found scores for {unknown}"
        assert answer.json()["state"] == "unknown"
    assert service.client.post("/api/reward/pull", data={"type": "moody"}).status_code == 422
    assert service.result(job)["state"] == "succeeded"


def test_video_and_several_rewards(service):
    video = np.zeros((2, 3, 4, 8, 8), np.uint8)
    video[1] = 50
    metadata = {"media_type": "Video", "prompts": ["a", "b"], "reward_fn": {"moody": 1, "function": 2, "constant": 0}}
    metadata["video_infos"] = [{"fps": 8}, {"video_fps": 16.0}]
    job = service.enqueue(json.dumps(metadata).encode() + b"\n" + npy(video)).json()["uuid"]
    moody = service.result(job)
    assert moody["scores"]["mean"] == [0.0, 50.0]
    assert moody["input_info"]["video_infos"] == [{"fps": 8, "video_fps": 8}, {"video_fps": 16.0}]
    assert service.result(job, "function")["scores"]["function"] == [0.0, 50.0]
    dropped = service.result(job, "constant")
    assert dropped["scores"] is None
    assert "weight" in dropped["error"]
    never = service.result(job, "jpeg_compressibility")
    assert "did not ask" in never["error"]


def test_a_bare_prompt_channels_first_and_fortran_order(service):
    array = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(1, 3, 4, 5)
    metadata = {"media_type": "IMAGE", "prompts": "one", "reward_fn": {"moody": 1}}
    for payload in (npy(array), npy(np.asfortranarray(array)), npy(array.astype(">i4")), npy(array.astype(np.float32))):
        job = service.enqueue(json.dumps(metadata).encode() + b"\n" + payload).json()["uuid"]
        result = service.result(job)
        assert result["scores"]["mean"] == [29.5]
        assert result["input_info"]["shape"] == [1, 4, 5, 3]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("raise out of memory", "gave up after 3 attempts: RuntimeError: out of memory"),
        ("bad", "metadata.prompts: bad"),
        ("short", "scores.mean has 1 entries for 2 samples"),
        ("nothing", "calculate_reward returned NoneType"),
        ("envelope", "as requested"),
        (
            "die",
            "gave up after 3 attempts: the worker process ended by signal SIGKILL; its last lines: exit as requested",
        ),
        ("exit", "gave up after 3 attempts: RuntimeError: the reward raised SystemExit: 3"),
        ("sleep 60", "gave up after 3 attempts: no answer within 2 s (deadline_s)"),
    ],
)
def test_every_failure_ends_in_a_stated_state(service, words, expected):
    job = service.submit(image(1, 2), prompts=[words, "fine"])
    others = service.submit(image(9), "function")  # another reward does not notice
    assert service.result(others, "function", 5)["state"] == "succeeded"
    result = service.result(job)
    assert result["scores"] is None
    assert result["state"] == "failed"
    assert result["error"].startswith(expected)
    assert service.result(service.submit(image(3)))["scores"]["mean"] == [3.0]


def test_a_job_that_killed_its_worker_once_is_scored_in_the_end(service, tmp_path):
    job = service.submit(image(4), prompts=[f"diefirst {tmp_path / 'crashed'}"])
    assert service.result(job)["scores"]["mean"] == [4.0]


def test_an_exit_of_the_handler_fails_the_try_and_not_the_process(service):
    before = service.result(service.submit(image(1)))["scores"]["pid"]
    assert service.result(service.submit(image(), prompts=["exit"]))["state"] == "failed"
    assert service.result(service.submit(image(1)))["scores"]["pid"] == before


def test_an_error_that_is_no_unicode_is_answered(service):
    """It used to end the worker host, again and again, with all its rewards."""
    hosts = [process.pid for process in service.processes()["workers"]]
    result = service.result(service.submit(image(), prompts=["surrogate"]), wait=30)
    assert (result["state"], result["error"]) == ("failed", "bad prompt \\ud800")
    assert [process.pid for process in service.processes()["workers"]] == hosts


def test_bad_jobs_of_one_client_close_no_reward_for_others(service):
    """Each kills the scorer three times; what the others send meanwhile is taken and scored."""
    bad, good, end = [service.submit(image(i), prompts=["die"]) for i in range(3)], [], time.monotonic() + 100
    while time.monotonic() < end and any(service.pull(job, wait=0).status_code != 200 for job in bad):
        good.append(service.submit(image(len(good) % 200)))  # asserts that it was accepted
        time.sleep(0.1)
    assert [service.result(job, wait=60)["state"] for job in bad] == ["failed"] * 3
    scores = [service.result(job, wait=60)["scores"]["mean"] for job in good]
    assert scores == [[float(n % 200)] for n in range(len(good))]
    assert service.get("/api/reward/rewards").json()["rewards"]["moody"]["state"] != "failed"


def test_a_bad_job_does_not_spoil_those_it_was_merged_with(service):
    slow = service.submit(image(), prompts=["sleep 0.5"])  # the next ones gather meanwhile
    jobs = [service.submit(image(i), prompts=["raise x" if i == 2 else "fine"]) for i in range(5)]
    states = [service.result(job)["state"] for job in jobs]
    assert states == ["succeeded", "succeeded", "failed", "succeeded", "succeeded"]
    assert service.result(slow)["state"] == "succeeded"
    killers = [service.submit(image(i), prompts=["die" if i == 1 else "fine"]) for i in range(4)]
    assert [service.result(job)["state"] for job in killers] == ["succeeded", "failed", "succeeded", "succeeded"]


def test_jobs_that_kill_every_worker_end_and_the_others_are_scored(service):
    """More crashes in a row than a reward is allowed, but by jobs that were tried before."""
    jobs = [service.submit(image(i), prompts=["die" if i < 2 else "fine"]) for i in range(5)]
    states = [service.result(job, wait=60)["state"] for job in jobs]
    assert states == ["failed", "failed", "succeeded", "succeeded", "succeeded"]
    service.until(lambda: service.get("/readyz").json()["ready"], 30, "the reward is back")
    assert service.result(service.submit(image(3)))["scores"]["mean"] == [3.0]


def test_nan_is_no_number(service):
    result = service.result(service.submit(image(6, 2), prompts=["nan", "fine"]))
    assert result["scores"]["mean"] == [None, 6.0]
    assert result["item_errors"] == {"0": "mean: the score is nan"}
    assert result["state"] == "succeeded"


def test_pixels_that_were_not_scaled_are_refused(service):
    job = service.submit(np.full((1, 8, 8, 3), 0.5, np.float32))
    assert "within [0, 1]" in service.result(job)["error"]
    job = service.submit(np.full((1, 8, 8, 3), 300, np.int32))
    assert "0..255" in service.result(job)["error"]


def test_same_key_same_job(service):
    content = body(image(8))
    key = {"Idempotency-Key": f"key-{time.time()}"}
    jobs = {service.enqueue(content, headers=key).json()["uuid"] for _ in range(3)}
    assert len(jobs) == 1
    job = jobs.pop()
    service.result(job)
    assert service.enqueue(content, headers=key).json()["uuid"] == job
    assert service.enqueue(body(image(9)), headers=key).status_code == 409
    assert service.enqueue(content, headers={"Idempotency-Key": "x" * 300}).status_code == 400


def test_reward_list_readiness_and_metrics(service):
    service.until(lambda: service.get("/readyz").json()["ready"], 10, "what was killed is back")
    data = service.get("/api/reward/rewards").json()
    assert data["rewards"]["moody"]["state"] == "ready"
    assert data["rewards"]["moody"]["score_keys"] == ["mean"]
    assert "both probes got the same scores" in data["rewards"]["constant"]["warning"]
    assert data["rewards"]["function"]["provenance"]["function"] == "moody_reward:brightness"
    assert service.get("/healthz").json() == {"status": "ok"}
    assert service.get("/readyz").json()["ready"] is True
    assert "<h1>Reward service</h1>" in service.get("/").text
    service.result(service.submit(image()))
    for line in ('reward_jobs_total{reward="moody",state="succeeded"}', 'reward_worker_up{reward="moody"} 1.0'):
        service.until(lambda line=line: line in service.get("/metrics").text, 5, line)
    assert "/v2/score" in service.get("/openapi.json").json()["paths"]
    for path in ("/docs", "/redoc"):  # pages of the framework that load scripts from foreign hosts
        assert service.get(path).status_code == 404
    assert service.get("/nothing").status_code == 404
    assert service.get("/api/reward/pull").status_code == 405


def test_the_page_has_scores_latencies_versions_and_hosts(service):
    """What it shows is what the route has; and the first line of the log is ours, not the broker's."""
    for value in (10, 20, 60):
        service.result(service.submit(image(value, 2), "function"), "function")

    def shown():
        about = service.get("/api/reward/rewards").json()
        last = about["rewards"]["function"]["scores"].get("function", {}).get("last", [])
        return about if last[-3:] == [10.0, 20.0, 60.0] else None  # other tests' jobs were counted before

    about = service.until(shown, 20, "three jobs are counted")
    reward = about["rewards"]["function"]
    assert 0 < reward["latency_s"]["p50"] <= reward["latency_s"]["p95"] < 60
    assert reward["versions"]["python"] == platform.python_version()
    assert reward["versions"]["numpy"] == np.__version__
    assert [host["restarts"] for host in about["hosts"].values()] == [0]
    first = service.log.read_text().splitlines()[0]
    assert "[service] INFO" in first
    assert "Memory overcommit" not in service.log.read_text()


def test_v2_shows_a_whole_job(service):
    metadata = {"media_type": "image", "prompts": ["a"], "reward_fn": {"moody": 1, "function": 1}}
    content = json.dumps(metadata).encode() + b"\n" + npy(image(2))
    done = service.client.post("/v2/jobs", content=content, headers={"Prefer": "wait=20"})
    assert done.status_code == 200
    assert done.json()["state"] == "succeeded"
    assert done.json()["rewards"]["moody"]["scores"]["mean"] == [2.0]
    assert service.client.post("/v2/score", content=content).json()["rewards"]["function"]["scores"] == {
        "function": [2.0]
    }
    job = done.json()["id"]
    assert service.get(f"/v2/jobs/{job}").json() == done.json()
    assert service.get("/v2/jobs/none").status_code == 404
    batch = service.client.post("/v2/jobs:batchGet", json={"ids": [job, "none"]}).json()["jobs"]
    assert batch[job] == done.json()
    assert batch["none"] is None
    assert service.client.post("/v2/jobs:batchGet", json={"ids": "no"}).status_code == 422
    assert "moody" in service.get("/v2/rewards").json()["rewards"]


def test_cancel_keeps_results_that_are_there(service):
    blocker = service.submit(image(), prompts=["sleep 1.5"])
    job = service.submit(image(), prompts=["never mind"])
    cancelled = service.client.delete(f"/v2/jobs/{job}").json()
    assert cancelled["state"] == "cancelled"
    assert service.result(job)["error"] == "cancelled by a client"
    done = service.result(blocker)
    assert done["state"] == "succeeded"
    assert service.client.delete(f"/v2/jobs/{blocker}").json()["rewards"]["moody"] == done
    assert service.result(job)["state"] == "cancelled"
    assert service.client.delete("/v2/jobs/" + "0" * 36).status_code == 404


def test_wait_returns_with_the_result(service):
    job = service.submit(image(), prompts=["sleep 1"])
    answer = service.pull(job, wait=20)  # one request, no polling
    assert answer.status_code == 200
    assert service.client.post("/api/reward/pull", data={"uuid": job, "type": "moody", "wait": "x"}).status_code == 422
