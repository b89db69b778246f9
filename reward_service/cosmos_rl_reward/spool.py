"""Jobs and results as files: the state of the service. The broker only assigns work.

One job is one file: a header of 4096 bytes (JSON), then the request's body exactly as received. A job is accepted when
its file has its name and is on the disk; it is finished when each of its rewards has a result file; then the body is
cut off, and the header is kept until the results expire. A result is created with ``link``, so the first writer wins.

Only the standard library: workers in other environments read jobs through it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import uuid
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from cosmos_rl_reward.clock import SteadyClock, uptime
from cosmos_rl_reward.payload.arrays import ArrayRef
from cosmos_rl_reward.payload.media import Media

HEADER_BYTES = 4096
_ABANDONED_S = 3600.0  # an unfinished upload is removed after this long
JOB_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Job:
    """The header of a job file.

    Attributes:
        id: a UUID, the name of the file.
        accepted: unix time, seconds; to be shown. Ages come from ``boot`` and ``uptime``.
        rewards: those that will be scored; ``dropped``: those with weight <= 0.
        sha256: of the body; empty when nothing will be compared with it.
        line_end: offset of the newline after the metadata.
        media: ``image``, ``video`` or ``latent``.
        array: where the samples are in the file.
        size: bytes of the whole file.
        boot: the machine that accepted it, since its start; ``uptime``: seconds of it.
    """

    id: str
    accepted: float
    rewards: tuple[str, ...]
    dropped: tuple[str, ...]
    sha256: str
    line_end: int
    media: str
    array: ArrayRef
    size: int
    boot: str = ""
    uptime: float = 0.0

    @property
    def count(self) -> int:
        """Samples in the job."""
        return self.array.shape[0]

    @property
    def disk_bytes(self) -> int:
        """Bytes that the job takes on the disk, decoded latents included."""
        return self.size + (Media(self.media, self.array).decoded_bytes if self.media == "latent" else 0)


def pack_header(job: Job) -> bytes:
    data = json.dumps(asdict(job), separators=(",", ":")).encode()
    if len(data) >= HEADER_BYTES:
        raise ValueError(f"the header of job {job.id} has {len(data)} bytes")
    return data.ljust(HEADER_BYTES - 1) + b"\n"


def unpack_header(data: bytes) -> Job:
    """Read a header; raises ValueError when it is not one."""
    try:
        fields = json.loads(data)
        array = fields.pop("array")
        ref = ArrayRef(array["dtype"], tuple(array["shape"]), tuple(array["strides"]), array["offset"])
        fields["rewards"], fields["dropped"] = tuple(fields["rewards"]), tuple(fields["dropped"])
        return Job(**fields, array=ref)
    except (TypeError, KeyError) as error:
        raise ValueError("not the header of a job") from error


class Upload:
    """A body that is being received: a part in memory, the rest in a file that is made when needed.

    Used by one request; ``discard`` is safe at any time.

    Attributes:
        size: bytes of the whole file, header included; ``buffered``: bytes added since its user last set it to 0.
        sha256: digest of what was flushed; empty unless it was requested.
    """

    def __init__(self, folder: Path, hashed: bool = True) -> None:
        self.path = folder / uuid.uuid4().hex
        self.size, self.buffered = HEADER_BYTES, 0
        self._parts: list[bytes] = []
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256() if hashed else None

    def add(self, data: bytes) -> None:
        """The next bytes of the body."""
        self._parts.append(data)
        self.size += len(data)
        self.buffered += len(data)

    def flush(self) -> BinaryIO:
        """Write what is in memory to the file, and return that; raises ValueError after ``discard``."""
        if self._file is None:
            self._file = open(self.path, "w+b")  # noqa: SIM115 - lives as long as the request
            self._file.seek(HEADER_BYTES)
        for part in self._parts:
            self._file.write(part)
            if self._hash is not None:
                self._hash.update(part)
        self._parts = []
        return self._file

    @property
    def on_disk(self) -> bool:
        """Whether there is a file, not discarded yet."""
        return self._file is not None and not self._file.closed

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest() if self._hash is not None else ""

    def seal(self, job: Job) -> None:
        """Write the header and flush everything to the disk."""
        file = self.flush()
        file.seek(0)
        file.write(pack_header(job))
        file.flush()
        os.fsync(file.fileno())

    def discard(self) -> None:
        """Remove the temporary name; an accepted job keeps its own."""
        if self._file is not None:
            self._file.close()
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class Files:
    """Local files of a job that a worker reads; ``decoded`` is empty for media that need no decoding."""

    id: str
    path: str
    decoded: str


class Spool:
    """A folder of jobs and results, on a local disk or one that several machines share.

    Attributes:
        remote: calls go over a network, so an event loop makes them in threads.
        poll_s: seconds between two checks for a result that a request waits for, in addition to ``find_results``.
        sweep_s: seconds between two calls of ``sweep``.
    """

    remote = False
    poll_s = 60.0
    sweep_s = 60.0

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.incoming = self.root / "incoming"
        for name in ("incoming", "jobs", "results", "decoded"):
            (self.root / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._shards: dict[str, str] = {}
        self._abandoned: dict[str, float] = {}  # files in ``incoming`` and when they were first found

    def check(self) -> None:
        """Whether the storage can be used; raises ``UserError`` if not. A folder that exists can."""

    def _shard(self, kind: str, job_id: str) -> str:
        name = f"{kind}/{job_id[:2]}"
        folder = self._shards.get(name)
        if folder is None:
            (self.root / name).mkdir(exist_ok=True, mode=0o700)
            folder = self._shards[name] = str(self.root / name)
        return folder

    def _job(self, job_id: str) -> str:  # texts, because making a Path takes longer than asking for its file
        return f"{self._shard('jobs', job_id)}/{job_id}.job"

    def _result(self, job_id: str, reward: str) -> str:
        return f"{self._shard('results', job_id)}/{job_id}.{reward}.json"

    def job_path(self, job_id: str) -> Path:
        """File of a job."""
        return Path(self._job(job_id))

    def decoded_path(self, job_id: str) -> Path:
        """File of a job's decoded latents (header and uint8 video)."""
        return Path(self._shard("decoded", job_id), f"{job_id}.job")

    def upload(self, hashed: bool = True) -> Upload:
        """Begin to receive a body, with its digest if ``hashed``."""
        return Upload(self.incoming, hashed)

    def accept(self, upload: Upload, job: Job) -> Job | None:
        """Give a sealed upload its name. Returns None, or the job that already has this id."""
        path = self._job(job.id)
        try:
            os.link(upload.path, path)
        except FileExistsError:
            return self.job(job.id)
        _fsync_dir(self._shard("jobs", job.id))
        return None

    def job(self, job_id: str) -> Job | None:
        """Header of a job, finished or not; None when it does not exist (any more)."""
        return _read_header(self._job(job_id)) if JOB_ID.fullmatch(job_id) else None

    def has_decoded(self, job_id: str) -> bool:
        """Whether a job's decoded latents are there."""
        return _read_header(self.decoded_path(job_id)) is not None

    def find_undecoded(self, jobs: Iterable[Job]) -> set[str]:
        """Ids of those jobs whose latents are not decoded yet."""
        return {job.id for job in jobs if job.media == "latent" and not self.has_decoded(job.id)}

    def publish_decoded(self, job: Job) -> None:
        """Make the latents decoded into ``decoded_path`` visible to all machines. In a folder they are."""

    def acquire(self, job: Job, decoded: bool) -> Files:
        """Local files of a job, with its decoded latents if ``decoded``; call ``release`` afterwards."""
        video = str(self.decoded_path(job.id)) if job.media == "latent" else ""
        return Files(job.id, self._job(job.id), video)

    def release(self, files: Files) -> None:
        """The files are not read any more. May be called again."""

    def has_result(self, job_id: str, reward: str) -> bool:
        """Whether a reward has its result."""
        return os.path.exists(self._result(job_id, reward))

    def without_result(self, job_ids: Iterable[str], reward: str) -> set[str]:
        """Those of the jobs that have no result of the reward."""
        return {job_id for job_id in job_ids if not self.has_result(job_id, reward)}

    def find_results(self, wanted: Collection[tuple[str, str]]) -> Iterator[tuple[str, str, bytes]]:
        """Those of the wanted results, given as (job, reward), that are there."""
        for job_id, reward in wanted:
            data = self.result(job_id, reward)
            if data is not None:
                yield job_id, reward, data

    def result(self, job_id: str, reward: str) -> bytes | None:
        """A result as it was written, or None."""
        try:
            with open(self._result(job_id, reward), "rb") as file:
                return file.read()
        except (FileNotFoundError, ValueError):  # ValueError: a NUL in the name
            return None

    def write_result(self, job_id: str, reward: str, data: bytes) -> bool:
        """Publish a result. The first writer wins: False when there was one, which stays untouched."""
        return self.write_results([(job_id, reward, data)]) == 1

    def write_results(self, results: list[tuple[str, str, bytes]]) -> int:
        """``write_result`` for several; returns how many were the first."""
        written = [
            self._shard("results", job_id) for job_id, reward, data in results if self._link(job_id, reward, data)
        ]
        for folder in set(written):
            _fsync_dir(folder)
        return len(written)

    def _link(self, job_id: str, reward: str, data: bytes) -> bool:
        path = self._result(job_id, reward)
        aside = f"{self.incoming}/{uuid.uuid4().hex}"
        try:
            with open(aside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(aside, path)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside)
        return True

    def missing_rewards(self, job: Job) -> list[str]:
        """Rewards of the job without a result."""
        return [reward for reward in job.rewards if not self.has_result(job.id, reward)]

    def finish(self, job: Job) -> None:
        """Cut the body off and drop decoded latents: every reward has its result."""
        with contextlib.suppress(FileNotFoundError):
            path, now = self._job(job.id), self._clock.now()
            os.truncate(path, HEADER_BYTES)
            os.utime(path, (now, now))
        if job.media == "latent":
            self.decoded_path(job.id).unlink(missing_ok=True)

    def open_jobs(self) -> Iterator[Job]:
        """All jobs that still have their body, in no order."""
        for path, status in self._scan():
            if status.st_size > HEADER_BYTES and (job := _read_header(path)) is not None:
                yield job

    def sweep(self, ttl_s: float, keep: int) -> int:
        """Remove finished jobs (and their results) older than ``ttl_s``, or beyond the newest ``keep``; unfinished
        uploads are removed after an hour. Returns how many jobs were removed."""
        self._clock.save()
        self._sweep_incoming()
        # 8 bytes each, there may be many
        times = array("d", (status.st_mtime for _, status in self._scan() if status.st_size == HEADER_BYTES))
        limit = self._clock.now() - ttl_s
        if keep < len(times):
            limit = max(limit, sorted(times, reverse=True)[keep - 1] if keep else math.inf)
        removed = 0
        for path, status in self._scan():
            if status.st_size == HEADER_BYTES and status.st_mtime < limit:
                self._forget(Path(path))
                removed += 1
        return removed

    def _sweep_incoming(self) -> None:
        now, before = uptime(), self._abandoned
        self._abandoned = {}
        for entry in os.scandir(self.incoming):
            found = self._abandoned[entry.path] = before.get(entry.path, now)
            if now - found > _ABANDONED_S:
                Path(entry.path).unlink(missing_ok=True)

    @functools.cached_property
    def _clock(self) -> SteadyClock:
        return SteadyClock(self.root / "clock")

    def _scan(self) -> Iterator[tuple[str, os.stat_result]]:
        """Files of all jobs, and their status."""
        shards = [entry.path for entry in os.scandir(self.root / "jobs") if entry.is_dir()]
        for entry in itertools.chain.from_iterable(map(os.scandir, shards)):
            if entry.name.endswith(".job"):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.path, entry.stat()

    def _forget(self, path: Path) -> None:
        if (job := _read_header(path)) is not None:
            for reward in job.rewards:
                Path(self._result(job.id, reward)).unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Free space of the disk."""
        return shutil.disk_usage(self.root).free


def _read_header(path: str | Path) -> Job | None:
    try:
        with open(path, "rb") as file:
            return unpack_header(file.read(HEADER_BYTES))
    except (FileNotFoundError, ValueError):
        return None


def _fsync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
