"""The spool in an S3-compatible store: the same promises as in a folder, and what happens when the store is away."""

import asyncio
import os
import re
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import boto3
import pytest

from cosmos_rl_reward import bucket, cli, s3
from cosmos_rl_reward.config import build
from cosmos_rl_reward.errors import StoreUnavailable, UserError
from cosmos_rl_reward.front.reconciler import Reconciler
from cosmos_rl_reward.payload.arrays import ArrayRef, row_major
from cosmos_rl_reward.results import encode
from cosmos_rl_reward.s3 import S3Spool
from cosmos_rl_reward.spool import HEADER_BYTES, Job, Spool, pack_header
from cosmos_rl_reward.worker.jobs import RetryingSpool
from tests.fronts import front_in_memory
from tests.object_store import BUCKET, PREFIX, SECRET, URL, in_store
from tests.service import MOODY, body, image, toml


@pytest.fixture(params=["folder", "store"])
def spools(request, tmp_path):
    """Two processes' views of one spool."""
    if request.param == "folder":
        return Spool(tmp_path / "spool"), Spool(tmp_path / "spool")
    request.getfixturevalue("store")
    return in_store(tmp_path / "one"), in_store(tmp_path / "two")


def put(spool, content=b"{}\nbody", job_id=None, media="image", rewards=("a", "b")):
    """Hand a body in as the front does; returns what was to be accepted, and what ``accept`` said."""
    upload = spool.upload()
    try:
        upload.add(content)
        shape = {"image": (1, 4), "latent": (1, 16, 1, 1, 1)}[media]
        array = ArrayRef("|u1", shape, row_major(shape), HEADER_BYTES + 3)
        ident = job_id or str(uuid.uuid4())
        upload.flush()
        digest, size = upload.sha256, upload.size
        job = Job(ident, time.time(), tuple(rewards), (), digest, HEADER_BYTES + 2, media, array, size)
        upload.seal(job)
        return job, spool.accept(upload, job)
    finally:
        upload.discard()


def ids(jobs):
    return sorted(job.id for job in jobs)


def test_an_accepted_job_is_there_for_all_and_only_once(spools):
    one, two = spools
    job, older = put(one)
    assert older is None
    assert list(two.open_jobs()) == [job] == [two.job(job.id)]
    assert put(two, job_id=job.id)[1] == job
    assert put(two, b"{}\nother", job.id)[1] == job
    assert list(one.open_jobs()) == [job]
    assert two.missing_rewards(job) == ["a", "b"]
    files = two.acquire(job, True)
    assert (files.id, files.decoded) == (job.id, "")
    assert Path(files.path).read_bytes() == pack_header(job) + b"{}\nbody"
    two.release(files)
    two.release(files)
    assert os.listdir(one.incoming) == os.listdir(two.incoming) == []


def test_a_body_that_is_not_accepted_leaves_nothing(spools):
    upload = spools[0].upload()
    upload.add(b"half a bo")
    upload.flush()
    assert upload.on_disk
    upload.discard()
    upload.discard()
    assert not upload.on_disk
    upload.add(b"dy")
    with pytest.raises(ValueError, match="closed file"):  # a thread may still be about to store it
        upload.flush()
    assert list(spools[1].open_jobs()) == []
    assert os.listdir(spools[0].incoming) == []


def test_of_eight_that_race_one_wins(spools):
    ident = str(uuid.uuid4())
    with ThreadPoolExecutor(8) as threads:
        tried = list(threads.map(lambda i: put(spools[i % 2], b"{}\n%d" % i, ident), range(8)))
        [(job, _)] = [(job, older) for job, older in tried if older is None]
        assert [older for _, older in tried if older is not None] == [job] * 7
        assert list(spools[0].open_jobs()) == [job]
        won = list(threads.map(lambda i: spools[i % 2].write_result(ident, "a", b"%d" % i), range(8)))
    assert won.count(True) == 1
    assert spools[0].result(ident, "a") == spools[1].result(ident, "a") == b"%d" % won.index(True)
    assert spools[0].write_results([(ident, "a", b"late"), (ident, "b", b"first")]) == 1
    assert spools[1].result(ident, "b") == b"first"


def test_results_are_found(spools):
    one, two = spools
    jobs = [put(one)[0] for _ in range(3)]
    wanted = [(job.id, reward) for job in jobs for reward in job.rewards]
    assert list(two.find_results(wanted)) == []
    one.write_results([(jobs[0].id, "a", b"0"), (jobs[2].id, "b", b"2")])
    assert sorted(two.find_results(wanted)) == sorted([(jobs[0].id, "a", b"0"), (jobs[2].id, "b", b"2")])
    assert two.missing_rewards(jobs[0]) == ["b"]
    assert [two.has_result(job.id, "a") for job in jobs] == [True, False, False]
    assert two.without_result([job.id for job in jobs], "a") == {jobs[1].id, jobs[2].id}
    assert list(two.find_results([(jobs[1].id, "a")])) == []


def test_a_finished_job_keeps_its_header_and_results_alone(spools, request):
    one, two = spools
    job, other = put(one, media="latent")[0], put(one)[0]
    one.write_results([(job.id, reward, b"1") for reward in job.rewards])
    decode(one, job)
    for spool in (one, two, one):
        spool.finish(job)
        assert list(spool.open_jobs()) == [other]
    assert two.job(job.id) == job
    assert two.result(job.id, "a") == b"1"
    assert not two.has_decoded(job.id)
    assert put(two, job_id=job.id)[1] == job
    assert list(spool.open_jobs()) == [other]
    if two.remote:
        kept = [f"jobs/{job.id}", f"results/{job.id}/a", f"results/{job.id}/b"]
        assert [key for key in request.getfixturevalue("store").names() if job.id in key] == kept
        with pytest.raises(FileNotFoundError):
            two.acquire(job, False)
    else:
        assert two.job_path(job.id).stat().st_size == HEADER_BYTES


def decode(spool, job, pixels=b"\7" * 12):
    """Decode a job's latents as ``LatentDecoder.decode`` does."""
    files = spool.acquire(job, False)
    aside = Spool(Path(files.decoded).parents[2]).incoming / "aside"
    aside.write_bytes(pack_header(job) + pixels)
    os.replace(aside, files.decoded)
    spool.publish_decoded(job)
    spool.release(files)


def test_decoded_latents_reach_other_machines(spools):
    one, two = spools
    jobs = [put(one, media="latent")[0] for _ in range(6)]
    image_ = put(one)[0]
    assert two.find_undecoded([*jobs, image_]) == {job.id for job in jobs}
    decode(one, jobs[0])
    assert two.find_undecoded([*jobs, image_]) == {job.id for job in jobs[1:]}
    assert two.find_undecoded(jobs[:2]) == {jobs[1].id}
    assert [two.has_decoded(job.id) for job in jobs[:2]] == [True, False]
    files = two.acquire(jobs[0], True)
    assert Path(files.decoded).read_bytes() == pack_header(jobs[0]) + b"\7" * 12


def test_results_go_by_age_and_by_number(spools):
    one, two = spools
    jobs = [put(one)[0] for _ in range(5)]
    for job in jobs[:4]:
        one.write_results([(job.id, reward, b"1") for reward in job.rewards])
        one.finish(job)
        if not one.remote:
            os.utime(one.job_path(job.id), (job.accepted, job.accepted))
    assert two.sweep(3600, keep=4) == 0
    assert two.sweep(3600, keep=3) == 1
    assert [two.job(job.id) is None for job in jobs].count(True) == 1
    assert two.sweep(-3600, keep=9) == 3
    assert [one.job(job.id) for job in jobs] == [None, None, None, None, jobs[4]]
    assert [one.result(job.id, "a") for job in jobs] == [None] * 5
    assert list(one.open_jobs()) == [jobs[4]]


def test_unknown_jobs(spools):
    spool = spools[0]
    job = replace(put(spool)[0], id=str(uuid.uuid4()))
    assert spool.job(job.id) is spool.job("../x") is spool.result(job.id, "a") is None
    assert not spool.has_result(job.id, "a")
    assert spool.missing_rewards(job) == ["a", "b"]
    spool.finish(job)
    assert spool.job(job.id) is None
    assert job.id not in ids(spool.open_jobs())


# only in a store


def test_listings_of_several_pages_and_headers_that_are_read_once(store, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "PAGE", 2)
    spool, asked = in_store(tmp_path), []
    jobs = [put(spool)[0] for _ in range(5)]
    spool._bucket.client.meta.events.register("before-call.s3", lambda model, **_: asked.append(model.name))
    assert ids(spool.open_jobs()) == ids(jobs)
    assert (asked.count("GetObject"), asked.count("ListObjectsV2")) == (5, 3)
    asked.clear()
    assert ids(spool.open_jobs()) == ids(jobs)
    assert asked == ["ListObjectsV2"] * 3
    for job in jobs:
        spool.write_results([(job.id, reward, b"1") for reward in job.rewards])
        spool.finish(job)
    assert list(spool.open_jobs()) == []
    assert spool.sweep(-3600, keep=1) == 5
    assert store.names() == []


def test_what_belongs_to_no_open_job_is_swept(store, tmp_path, monkeypatch):
    spool = in_store(tmp_path)
    done, job, never = (put(spool)[0] for _ in range(3))
    spool.finish(done)
    spool.write_result(done.id, "a", b"late")
    boto3.client("s3").delete_object(Bucket=BUCKET, Key=f"{PREFIX}/jobs/{never.id}")  # its front crashed before this
    spool.sweep(3600, keep=9)
    assert len([key for key in store.names() if key.startswith("open/")]) == 3  # they may be on their way
    monkeypatch.setattr(s3, "_ABANDONED_S", -10.0)
    spool.sweep(3600, keep=9)
    assert [key for key in store.names() if key.startswith("open/")] == [f"open/{job.id}/body-{job.sha256}"]
    assert list(spool.open_jobs()) == [job]


def test_a_write_whose_answer_was_lost_is_still_ours(store, tmp_path, monkeypatch):
    spool = in_store(tmp_path)
    put_object = spool._bucket.client.put_object

    def twice(**arguments):
        if "IfNoneMatch" in arguments:
            put_object(**arguments)
        return put_object(**arguments)

    monkeypatch.setattr(spool._bucket.client, "put_object", twice)
    job, older = put(spool)
    assert older is None
    assert list(spool.open_jobs()) == [job]


def test_the_body_of_a_job_that_came_second_is_removed(store, tmp_path, monkeypatch):
    spool, known = in_store(tmp_path), S3Spool.job
    first = put(spool)[0]
    looks = []
    monkeypatch.setattr(S3Spool, "job", lambda *a: known(*a) if looks else looks.append(a))  # both come at once
    assert put(spool, b"{}\nother", first.id)[1] == first
    assert store.names() == [f"jobs/{first.id}", f"open/{first.id}/body-{first.sha256}"]


def test_a_worker_tries_until_the_store_is_back(store, tmp_path, monkeypatch):
    retrying = RetryingSpool(in_store(tmp_path), "mock")
    tried = []

    def write():
        tried.append(1)
        if len(tried) < 50:
            raise StoreUnavailable("nobody there")
        return "written"

    monkeypatch.setattr(asyncio, "sleep", no_word)
    assert asyncio.run(retrying.retry(write)) == "written"


async def no_word(*_):
    pass


def test_a_store_that_cannot_be_used_is_refused_at_the_start(store, tmp_path, monkeypatch, capsys):
    spool = in_store(tmp_path / "good")
    spool.check()
    assert store.names() == []
    spool._bucket.client.meta.events.register("before-parameter-build.s3.PutObject", forget_condition)
    with pytest.raises(UserError, match="^blob_store: .*ignores If-None-Match"):
        spool.check()
    for role in ([], ["worker"]):
        settings = {
            "state_dir": str(tmp_path / "a"),
            "blob_store": "s3://no-such-bucket",
            "broker_url": "redis://nobody",
        }
        (tmp_path / "my.toml").write_text(toml({**settings, "reward_args": [MOODY]}))
        assert cli.main(["--config", str(tmp_path / "my.toml"), *role]) == 2
        assert re.search(
            "^blob_store: s3://no-such-bucket: .*NoSuchBucket.*; check the bucket", capsys.readouterr().err, re.M
        )
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="^blob_store: .*Could not connect.*; check the bucket, AWS_ENDPOINT_URL_S3"):
        in_store(tmp_path / "b").check()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "nonsense")
    with pytest.raises(UserError, match="^blob_store: the AWS environment"):
        in_store(tmp_path / "c")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UserError, match=r'^blob_store: .*pip install "cosmos_rl_reward\[s3\]"'):
        in_store(tmp_path / "d")


def forget_condition(params, **_):
    params.pop("IfNoneMatch", None)


@pytest.mark.parametrize("url", ["s3://", "s3://B", f"s3://key:{SECRET}@bucket", "gs://bucket", "s3://bucket/a b"])
def test_a_wrong_address_is_refused_and_not_shown(url):
    with pytest.raises(UserError, match=r"^my.toml: blob_store: .*s3://bucket/prefix") as refused:
        build({"blob_store": url}, "my.toml")
    assert SECRET not in str(refused.value)


def test_files_stay_while_somebody_reads_them_and_have_a_limit(store, tmp_path):
    spool = in_store(tmp_path, max_spool_bytes=HEADER_BYTES + 100)
    first, second = put(spool)[0], put(spool)[0]
    readers = [spool.acquire(first, True), spool.acquire(first, True)]
    with pytest.raises(StoreUnavailable, match="max_spool_bytes"):
        spool.acquire(second, True)
    spool.release(readers[0])
    assert Path(readers[1].path).exists()
    spool.release(readers[1])
    assert not Path(readers[1].path).exists()
    assert Path(spool.acquire(second, True).path).exists()
    with pytest.raises(StoreUnavailable, match="min_free_bytes"):
        in_store(tmp_path, min_free_bytes=1 << 60).acquire(first, True)


def test_folders_of_processes_that_are_gone_are_removed(store, tmp_path):
    kept = in_store(tmp_path)
    gone = in_store(tmp_path)
    (gone.root / "something").write_text("left")
    gone._lock.close()
    third = in_store(tmp_path)
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"lock", kept.root.name, third.root.name}


def test_a_front_says_that_the_store_is_away_and_continues_later(store, tmp_path):
    async def test():
        async with front_in_memory(tmp_path, blob_store=URL).run() as front:
            job = (await front.enqueue(body(image(), "a"))).json()["uuid"]
            store.stop()
            try:
                refused = await front.enqueue(body(image(), "a"))
                asked = await front.client.post("/api/reward/pull", data={"uuid": job, "type": "a"})
                alive = await front.client.get("/readyz")
            finally:
                store.start()
            assert (refused.status_code, asked.status_code, alive.status_code) == (503, 503, 200)
            assert "Could not connect to the endpoint" in refused.json()["message"]
            assert "Could not connect to the endpoint" in asked.json()["message"]
            again = await front.enqueue(body(image(), "a"))
            in_store(tmp_path / "two").write_result(job, "a", encode({"scores": {"a": [1]}, "state": "succeeded"}))
            await Reconciler(front.front.tracker).reconcile()  # there was no event for the result
            assert list(front.front.tracker.open) == [again.json()["uuid"]]
            return (await front.client.post("/api/reward/pull", data={"uuid": job, "type": "a"})).json()

    assert asyncio.run(test())["scores"] == {"a": [1]}
    assert sorted(key.split("/")[0] for key in store.names()) == ["jobs", "jobs", "open", "results"]
