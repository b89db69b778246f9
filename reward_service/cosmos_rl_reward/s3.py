"""The spool in an S3-compatible store, with objects in place of files.

Below the prefix of ``blob_store``:

- ``jobs/<id>``: the header. As long as in a file (``HEADER_BYTES``) while the job is open, without its padding when the
  job is finished, so that a listing shows which is which, and since when.
- ``open/<id>/body-<sha256>``: header and body, as in a file; removed when the job is finished.
- ``open/<id>/decoded``: the decoded latents. They go through the store, because hosts of rewards need not have the VAE.
- ``open/<id>/done-<reward>``: empty, written just before the result, so that one listing finds all new results.
- ``results/<id>/<reward>``: a result.

A job is accepted when its header exists, which is written after its body. Headers and results are written only if
there is none (``If-None-Match: *``), so the first writer wins. Workers read plain files: each process has a folder of
its own for uploads, for the bodies it works on and for latents it has decoded.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import uuid
from array import array
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from cosmos_rl_reward.bucket import PAGE, Bucket
from cosmos_rl_reward.errors import StoreUnavailable, UserError
from cosmos_rl_reward.locks import try_lock
from cosmos_rl_reward.spool import HEADER_BYTES, JOB_ID, Files, Job, Spool, Upload, pack_header, unpack_header

_FEW = 4  # up to so many objects are requested one by one rather than by a listing
_PARALLEL = 8  # requests at a time of one call
_ABANDONED_S = 3600.0  # objects without an open job are removed after this long


def make_process_folder(base: Path) -> tuple[Path, IO[str]]:
    """A new folder below ``base``, this process's own while the returned file is open. Removes those of processes that
    have ended.

    Raises:
        UserError: it cannot be written.
    """
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(base / "lock", "a", encoding="utf-8") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # one process at a time tidies up and makes a folder
            for folder in base.iterdir():
                if folder.is_dir() and (left := try_lock(folder / "lock")) is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    left.close()
            folder = Path(tempfile.mkdtemp(dir=base))
            lock = try_lock(folder / "lock")
    except OSError as error:
        raise UserError(f"state_dir: {base}: {error.strerror}; set state_dir to a folder of your own") from error
    assert lock is not None
    return folder, lock


class S3Spool(Spool):
    """A bucket of jobs and results, with a folder of this process before it.

    Every method that is not about local paths may raise ``StoreUnavailable``.
    """

    remote = True
    poll_s = 5.0  # results are also announced by events and found by ``find_results``
    sweep_s = 600.0  # a listing of all finished jobs

    def __init__(self, folder: Path, bucket: Bucket, limits: tuple[int, int], lock: IO[str]) -> None:
        """``limits``: bytes of bodies that may lie in ``folder`` at a time, and bytes to leave free on its disk."""
        super().__init__(folder)
        self._bucket, self._lock = bucket, lock
        self._max_bytes, self._min_free = limits
        self._threads = ThreadPoolExecutor(_PARALLEL)
        self._mutex = threading.Lock()
        self._users: dict[str, set[Files]] = {}
        self._sizes: dict[str, int] = {}  # bytes of the files of each job that are here or on their way
        self._headers: dict[str, Job] = {}  # of the open jobs of the last listing

    def check(self) -> None:
        self._bucket.check()

    # jobs

    def _header(self, job_id: str) -> tuple[Job, bool] | None:
        """Header of an accepted job, and whether the job is finished."""
        data = self._bucket.get(f"jobs/{job_id}")
        if data is None:
            return None
        try:
            return unpack_header(data), len(data) < HEADER_BYTES
        except ValueError:
            return None

    def accept(self, upload: Upload, job: Job) -> Job | None:
        """Put a sealed upload into the store. Returns None, or the job that already has this id."""
        if (older := self.job(job.id)) is not None:
            return older
        self._bucket.upload(_body(job), upload.path)
        if self._bucket.create(f"jobs/{job.id}", pack_header(job)):
            return None
        older = self.job(job.id)
        if older is None:
            raise StoreUnavailable(f"job {job.id} disappeared while it was sent again")
        if older.sha256 != job.sha256:
            self._bucket.remove([_body(job)])
        return None if older == job else older  # equal: our first write had succeeded, its response was lost

    def job(self, job_id: str) -> Job | None:
        if JOB_ID.fullmatch(job_id) and (found := self._header(job_id)) is not None:
            return found[0]
        return None

    def open_jobs(self) -> Iterator[Job]:
        """See ``Spool``. Headers that an earlier call has read are not read again."""
        heads: dict[str, Job] = {}
        for page in self._bucket.list_pages("open/"):
            bodies = [key.split("/")[1:] for key, *_ in page if "/body-" in key]
            known = {job_id: self._headers[job_id] for job_id, _ in bodies if job_id in self._headers}
            new = [job_id for job_id, _ in bodies if job_id not in known]
            known.update((job.id, job) for job in self._threads.map(self.job, new) if job is not None)
            heads.update(known)
            for job_id, name in bodies:
                if job_id in known and name == f"body-{known[job_id].sha256}":  # else a body that was not accepted
                    yield known[job_id]
        self._headers = heads

    def finish(self, job: Job) -> None:
        """See ``Spool``. The header stays, marked as finished."""
        found = self._header(job.id)
        if found is not None and not found[1]:
            self._bucket.put(f"jobs/{job.id}", pack_header(job).rstrip())
        keys = [_body(job), *(f"open/{job.id}/done-{reward}" for reward in job.rewards)]
        if job.media == "latent":
            keys.append(f"open/{job.id}/decoded")
        self._bucket.remove(keys)

    # results

    def result(self, job_id: str, reward: str) -> bytes | None:
        return self._bucket.get(f"results/{job_id}/{reward}")

    def has_result(self, job_id: str, reward: str) -> bool:
        return self._bucket.exists(f"results/{job_id}/{reward}")

    def without_result(self, job_ids: Iterable[str], reward: str) -> set[str]:
        ids = list(job_ids)
        there = self._threads.map(lambda job_id: self.has_result(job_id, reward), ids)
        return {job_id for job_id, found in zip(ids, there, strict=True) if not found}

    def write_results(self, results: list[tuple[str, str, bytes]]) -> int:
        return sum(self._threads.map(self._write, results))

    def _write(self, result: tuple[str, str, bytes]) -> bool:
        job_id, reward, data = result
        self._bucket.put(f"open/{job_id}/done-{reward}", b"")
        return self._bucket.create(f"results/{job_id}/{reward}", data)

    def missing_rewards(self, job: Job) -> list[str]:
        there = {key.rpartition("/")[2] for page in self._bucket.list_pages(f"results/{job.id}/") for key, *_ in page}
        return [reward for reward in job.rewards if reward not in there]

    def find_results(self, wanted: Collection[tuple[str, str]]) -> Iterator[tuple[str, str, bytes]]:
        """See ``Spool``. One listing, and a request for each result that is there."""
        places = {f"open/{job_id}/done-{reward}": (job_id, reward) for job_id, reward in wanted}
        for page in self._bucket.list_pages("open/") if places else ():
            done = [places[key] for key, *_ in page if key in places]
            for (job_id, reward), data in zip(done, self._threads.map(lambda p: self.result(*p), done), strict=True):
                if data is not None:
                    yield job_id, reward, data

    # latents

    def has_decoded(self, job_id: str) -> bool:
        return self._bucket.exists(f"open/{job_id}/decoded")

    def find_undecoded(self, jobs: Iterable[Job]) -> set[str]:
        ids = {job.id for job in jobs if job.media == "latent"}
        if len(ids) <= _FEW:
            return {job_id for job_id in ids if not self.has_decoded(job_id)}
        for page in self._bucket.list_pages("open/"):
            ids -= {key.split("/")[1] for key, *_ in page if key.endswith("/decoded")}
        return ids

    def publish_decoded(self, job: Job) -> None:
        self._bucket.upload(f"open/{job.id}/decoded", self.decoded_path(job.id))

    # files of this process

    def acquire(self, job: Job, decoded: bool) -> Files:
        """See ``Spool``.

        Raises:
            FileNotFoundError: the job has been finished meanwhile.
            StoreUnavailable: also when there is no room here.
        """
        files = super().acquire(job, decoded)
        with self._mutex:
            self._users.setdefault(job.id, set()).add(files)
        try:
            self._make_room(job.id, job.disk_bytes if decoded else job.size)
            self._fetch(_body(job), self.job_path(job.id))
            if decoded and job.media == "latent":
                self._fetch(f"open/{job.id}/decoded", self.decoded_path(job.id))
        except BaseException:
            self.release(files)
            raise
        return files

    def _make_room(self, job_id: str, size: int) -> None:
        with self._mutex:
            known = self._sizes.get(job_id, 0)
            others = sum(self._sizes.values()) - known
            if size <= known:
                return
            if others and others + size > self._max_bytes:
                raise StoreUnavailable(f"{others} bytes of jobs are being scored here (max_spool_bytes)")
            if self.free_bytes() - (size - known) < self._min_free:
                raise StoreUnavailable(f"the disk of {self.root} is full (min_free_bytes)")
            self._sizes[job_id] = size

    def _fetch(self, key: str, path: Path) -> None:
        if path.exists():
            return
        aside = self.incoming / uuid.uuid4().hex
        try:
            self._bucket.download(key, aside)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def release(self, files: Files) -> None:
        """See ``Spool``. The last one removes them."""
        with self._mutex:
            users = self._users.get(files.id, set())
            users.discard(files)
            if users or files.id not in self._users:
                return
            del self._users[files.id]
            self._sizes.pop(files.id, None)
            for path in (self.job_path(files.id), self.decoded_path(files.id)):
                path.unlink(missing_ok=True)

    # removal

    def sweep(self, ttl_s: float, keep: int) -> int:
        """See ``Spool``. Bodies, marks and latents without an open job are removed after an hour as well."""
        self._sweep_abandoned()
        times, names = array("d"), bytearray()  # 24 bytes each, there may be many
        for page in self._bucket.list_pages("jobs/"):
            for entry in page:
                if entry.size < HEADER_BYTES:
                    with contextlib.suppress(ValueError):
                        names += uuid.UUID(entry.key.rpartition("/")[2]).bytes
                        times.append(entry.modified)
        order = sorted(range(len(times)), key=times.__getitem__)
        count = max(len(order) - keep, bisect.bisect_left(order, self._bucket.now - ttl_s, key=times.__getitem__))
        expired = [str(uuid.UUID(bytes=bytes(names[16 * i : 16 * i + 16]))) for i in order[:count]]
        for i in range(0, len(expired), PAGE):
            self._forget(expired[i : i + PAGE])
        return len(expired)

    def _forget(self, job_ids: list[str]) -> None:
        def results(job_id: str) -> list[str]:
            return [key for page in self._bucket.list_pages(f"results/{job_id}/") for key, *_ in page]

        self._bucket.remove([key for keys in self._threads.map(results, job_ids) for key in keys])
        self._bucket.remove([f"jobs/{job_id}" for job_id in job_ids])  # last: an interrupted sweep finds them again

    def _sweep_abandoned(self) -> None:
        for page in self._bucket.list_pages("open/"):
            old = [entry.key for entry in page if entry.modified < self._bucket.now - _ABANDONED_S]
            ids = {key.split("/")[1] for key in old}
            found = dict(zip(ids, self._threads.map(self._header, ids), strict=True))
            over = {job_id for job_id, header in found.items() if header is None or header[1]}
            self._bucket.remove([key for key in old if key.split("/")[1] in over])


def _body(job: Job) -> str:
    return f"open/{job.id}/body-{job.sha256}"
