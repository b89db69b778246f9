"""Merging of jobs, checking of what handlers return, and a pool with a real worker process."""

import asyncio
import errno
import io
import json
import os
import time

import numpy as np
import pytest

from cosmos_rl_reward.config import RewardArgs
from cosmos_rl_reward.payload.media import read_payload
from cosmos_rl_reward.results import encode, without_scores
from cosmos_rl_reward.spool import HEADER_BYTES, Job, Spool
from cosmos_rl_reward.worker.host import make_reward_spec
from cosmos_rl_reward.worker.inputs import Input, group_inputs, merge, read_input
from cosmos_rl_reward.worker.outcome import BadOutput, check
from cosmos_rl_reward.worker.pool import Pool
from tests.service import TESTS, body, image


def spooled(spool, content, job_id, kind="image"):
    """Put a body into the spool as the front does."""
    upload = spool.upload()
    upload.add(content)
    upload.flush()
    end = content.index(b"\n")
    media = read_payload(io.BytesIO(bytes(HEADER_BYTES) + content), HEADER_BYTES + end + 1, upload.size, kind)
    job = Job(job_id, time.time(), ("mock",), (), upload.sha256, HEADER_BYTES + end, kind, media.array, upload.size)
    upload.seal(job)
    assert spool.accept(upload, job) is None
    upload.discard()
    return job


def ident(number):
    return f"00000000-0000-0000-0000-{number:012d}"


def inputs(tmp_path, *contents):
    spool = Spool(tmp_path)
    jobs = [spooled(spool, content, ident(i)) for i, content in enumerate(contents)]
    return [read_input(job.id, str(spool.job_path(job.id)), "") for job in jobs]


def test_only_what_belongs_together_is_merged(tmp_path):
    found = inputs(
        tmp_path,
        body(image(1), "mock"),
        body(image(2, 2), "mock", reward_fn={"mock": 3, "other": 1}),
        body(image(3, 1, 16), "mock"),
        body(image(4), "mock", ocr_use_gpu=True),
        body(image(5), "mock", references=["r5"]),
        body(image(6), "mock", references=["r6"]),
        body(image(7), "mock", note=["x"]),
        body(image(8), "mock", geneval_tags=["counting"]),
    )
    groups = group_inputs(found, ("references",))
    assert [[int(one.id[-2:]) for one in group] for group in groups] == [[0, 1], [2], [3], [4, 5], [6], [7]]
    images, metadata = merge(groups[0], ())
    assert images[:, 0, 0, 0].tolist() == [1, 2, 2]
    assert metadata["prompts"] == ["a", "a", "a"]
    assert metadata["input_info"]["shape"] == [3, 8, 8, 3]
    _, metadata = merge(groups[3], ("references",))
    assert metadata["references"] == ["r5", "r6"]


def test_a_job_alone_keeps_what_it_came_with(tmp_path):
    (one,) = inputs(tmp_path, body(image(9), "mock", prompts=["p"], extra={"deep": [1]}))
    images, metadata = merge([one], ())
    assert images is one.images
    assert isinstance(one, Input)
    assert metadata["extra"] == {"deep": [1]}
    assert metadata["uuid"] == ident(0)
    assert metadata["media_type"] == "image"


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0], "not a dictionary"),
        ({}, "no scores"),
        ({"scores": {}}, "no table of scores"),
        ({"scores": {"a": 1.0}}, "scores.a is float, not a list"),
        ({"scores": {"a": [1.0]}}, "scores.a has 1 entries for 2 samples"),
        ({"scores": {"a": {"b": [1.0, 2.0, 3.0]}}}, "scores.a.b has 3 entries"),
        ({"scores": {"a": [[1.0], [2.0]]}}, "scores.a[0] is list, not a number"),
        ({"scores": {"a": [1, 2]}, "item_errors": {5: "x"}}, "item_errors names a sample outside 0..1"),
        ({"scores": None, "error": "because"}, "because"),
    ],
)
def test_bad_output_is_named(returned, words):
    with pytest.raises(BadOutput) as refused:
        check(returned, 2)
    assert words in str(refused.value)


def test_good_output_becomes_plain_numbers():
    returned = {
        "scores": {
            "array": np.array([1, 2], np.float32),
            "mixed": [np.float64(0.5), None],
            "words": ["Good", "Bad"],
            "table": {"x": [1, float("inf")]},
        },
        "item_errors": ["", "no text"],
    }
    scores, errors = check(returned, 2)
    assert json.loads(json.dumps(scores, allow_nan=False)) == {
        "array": [1.0, 2.0],
        "mixed": [0.5, None],
        "words": ["Good", "Bad"],
        "table": {"x": [1, None]},
    }
    assert errors == {1: "no text"}


def read_result(spool, job):
    """The result that was written."""
    found = spool.result(job.id, "mock")
    assert found is not None
    return json.loads(found)


class Disk:
    """Fails the first ``times`` calls of one of the spool's functions."""

    def __init__(self, monkeypatch, name, times, error=None):
        self.left, self.calls = times, 0
        self.error = error or OSError(errno.ENOSPC, "No space left on device")
        work = getattr(Spool, name)

        def function(spool, *arguments):
            self.calls += 1
            if self.left:
                self.left -= 1
                raise self.error
            return work(spool, *arguments)

        monkeypatch.setattr(Spool, name, function)


def served(spool, jobs, monkeypatch, reward="mock", **more):
    """Have a pool score the jobs; returns what it announced and how often its scorer was started."""
    monkeypatch.setattr("cosmos_rl_reward.worker.jobs._PAUSES_S", (0.02,))
    announced = []

    async def announce(event):
        announced.append(event)

    async def requeue(name, job_id):
        raise AssertionError("only latents that nobody has decoded are asked for again")

    async def test():
        args = {"reward_type": reward, "device": "cpu", **more}
        pool = Pool(make_reward_spec(RewardArgs(**args), 3), spool, announce, requeue)
        serving = asyncio.create_task(pool.serve())
        runs = [pool.run(*job) for job in jobs]
        done, _ = await asyncio.wait(
            {serving, asyncio.gather(*runs, return_exceptions=True)}, timeout=120, return_when=asyncio.FIRST_COMPLETED
        )
        assert done, "neither scored nor failed"
        assert not serving.done(), serving.exception()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return pool.health.restarts

    return announced, asyncio.run(test())


@pytest.mark.process
def test_results_wait_for_room_on_the_disk(tmp_path, monkeypatch):
    """The disk is full for long when a result is to be written; the job is not scored again and not lost."""
    spool, full = Spool(tmp_path), Disk(monkeypatch, "write_results", 40)
    job = spooled(spool, body(image(51), "mock"), ident(1))
    # delivered twice, and once more after its end
    announced, restarts = served(spool, [(job.id, 1), (job.id, 2)], monkeypatch)
    again, _ = served(spool, [(job.id, 3)], monkeypatch)
    result = read_result(spool, job)
    assert (result["scores"], full.left, full.calls) == ({"mock": [0.2]}, 0, 41)
    assert [event["state"] for event in announced] == ["succeeded"]
    assert (again, restarts) == ([], 0)
    assert [j.id for j in spool.open_jobs()] == [job.id]  # the front, which knows all its rewards, cuts it off
    spool.finish(job)
    assert list(spool.open_jobs()) == []
    assert spool.job(job.id) == job


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("without_result", OSError(errno.ENOSPC, "full")),
        ("write_results", PermissionError(13, "not allowed")),
        ("write_results", FileNotFoundError(2, "no such folder")),
        ("job", NotADirectoryError(20, "not a folder")),
        ("acquire", OSError(errno.EIO, "broken")),
    ],
)
def test_a_disk_that_fails_anywhere_ends_no_host(tmp_path, monkeypatch, name, error):
    spool = Spool(tmp_path)
    jobs = [spooled(spool, body(image(51 * n), "mock"), ident(n)) for n in range(1, 4)]
    disk = Disk(monkeypatch, name, 9, error)
    announced, restarts = served(spool, [(job.id, 1) for job in jobs], monkeypatch)
    found = [read_result(spool, job)["scores"]["mock"] for job in jobs]
    assert (found, disk.left, restarts) == ([[0.2], [0.4], [pytest.approx(0.6)]], 0, 0)
    assert len(announced) == 3


@pytest.mark.process
def test_a_result_that_cannot_be_written_for_another_reason_costs_its_own_job(tmp_path, monkeypatch):
    """An internal error: the job is returned to its queue, the scorer and the host keep running."""
    spool = Spool(tmp_path)
    first, second = [spooled(spool, body(image(51 * n), "mock"), ident(n)) for n in (1, 2)]
    disk = Disk(monkeypatch, "write_results", 1, ValueError("of our own"))
    announced, restarts = served(spool, [(first.id, 1)], monkeypatch, max_wait_ms=0)
    assert (announced, disk.left, restarts, spool.result(first.id, "mock")) == ([], 0, 0, None)
    announced, restarts = served(spool, [(first.id, 2), (second.id, 1)], monkeypatch)
    assert sorted(event["id"] for event in announced) == [first.id, second.id]


def test_text_that_is_no_unicode_becomes_escapes():
    result = json.loads(without_scores("moody", "failed", "bad prompt: \ud800 ü"))
    assert result["error"] == "bad prompt: \\ud800 ü"
    assert json.loads(encode({"ocr_text": "a\udfffb"})) == {"ocr_text": "a\udfffb"}


@pytest.mark.process
def test_crashes_by_jobs_that_were_tried_before_do_not_close_the_reward(tmp_path, monkeypatch):
    """Three jobs kill their scorer seven times, with no result in between; only the first time says anything."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    spool = Spool(tmp_path)
    jobs = [spooled(spool, body(image(n), "mock", prompts=["die"]), ident(n)) for n in (1, 2, 3)]
    announced, restarts = served(spool, [(job.id, 1) for job in jobs], monkeypatch, reward_class="moody_reward:Moody")
    assert [event["error"].partition(" attempts")[0] for event in announced] == ["gave up after 3"] * 3
    assert restarts >= 5
