"""From a request's body to an accepted job: streamed to the disk, checked by its headers, never buffered in memory."""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from cosmos_rl_reward.clock import boot, uptime
from cosmos_rl_reward.errors import StoreUnavailable
from cosmos_rl_reward.front.job_tracker import JobTracker, Reservation
from cosmos_rl_reward.payload.errors import Refused
from cosmos_rl_reward.payload.media import Media, read_payload
from cosmos_rl_reward.payload.metadata import MAX_LINE, check_counts, parse_line
from cosmos_rl_reward.spool import HEADER_BYTES, Job, Upload

_CHUNK = 4 << 20  # bytes of one body gathered before they go to the disk
_MAX_BUFFERED = 16 << 20  # the same of all bodies
_UPLOAD_SHARE = 8  # one in so many connections may send a job
_PAUSES = 10  # the whole body may take this many times receive_timeout_s
_DISCARD_BYTES = 8 << 20  # a rejected body up to this size is read to its end, so that every client gets the answer
_DISCARD_S = 5.0  # for that
_BODY_READ = "cosmos_rl_reward.whole"  # set in a request's scope when its body was read to its end
_KEY_SPACE = uuid.UUID("6f1f64d5-5f2b-4d3c-9b59-1b8d4d6f6f35")


@dataclass(frozen=True)
class Ticket:
    """An accepted job. ``created`` is false when its idempotency key was used before."""

    job: Job
    created: bool


class UploadReceiver:
    """Receives bodies for one front."""

    def __init__(self, tracker: JobTracker) -> None:
        self.tracker, self.spool, self.config = tracker, tracker.spool, tracker.config
        self._senders = self._buffered = 0

    async def receive(self, request: Request, owner: str) -> Ticket:
        """Receive a body; returns when it is safe on the disk.

        Args:
            owner: name of the token, so that keys of different clients differ.

        Raises:
            Refused: with the status for the client.
            ClientDisconnect: the body is incomplete; nothing is kept of it.
        """
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= 200:
            raise Refused("Idempotency-Key: between 1 and 200 characters")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused("Content-Encoding: send the body as it is", 415)
        length = request.headers.get("content-length")
        if length is not None and (not length.isdigit() or int(length) > self.config.max_body_bytes):
            raise Refused(f"the body has more than {self.config.max_body_bytes} bytes (max_body_bytes)", 413)
        if self._senders * _UPLOAD_SHARE >= self.config.max_connections:
            raise Refused(f"{self._senders} jobs are being received (max_connections); try again later", 429)
        self._senders += 1
        try:
            with self.tracker.reserve() as reservation:
                reservation.extend(int(length or 0))
                return await self._receive(request, owner, key, reservation)
        finally:
            self._senders -= 1

    async def _receive(self, request: Request, owner: str, key: str | None, reservation: Reservation) -> Ticket:
        upload = self.spool.upload(hashed=key is not None or self.spool.remote)
        try:
            data, line_end = await self._receive_body(request, upload, reservation)
            room = upload.size
            if data.get("media_type") not in ("image", "video"):
                room += (await self._call_spool(self._check_payload, upload, data, line_end)).decoded_bytes
            reservation.extend(room)
            job_id = str(uuid.uuid4())
            if key is not None:
                job_id = str(uuid.uuid5(_KEY_SPACE, f"{owner}\0{key}"))
            job, older = await self._call_spool(self._store, upload, data, line_end, job_id)
        finally:
            self._release(upload)
            if upload.on_disk:
                await asyncio.to_thread(upload.discard)
        if older is None:
            await self.tracker.add(job)
            return Ticket(job, True)
        if older.sha256 != job.sha256:
            raise Refused("Idempotency-Key: was used before, with another body", 409)
        return Ticket(older, False)

    async def _call_spool(self, function: Any, *arguments: Any) -> Any:
        try:
            return await asyncio.to_thread(function, *arguments)
        except StoreUnavailable as error:
            raise Refused(f"the service cannot store the job: {error}", 503) from error
        except OSError as error:
            raise Refused(f"the service cannot store the job: {os.strerror(error.errno or 0)}", 507) from error

    async def _receive_body(
        self, request: Request, upload: Upload, reservation: Reservation
    ) -> tuple[dict[str, Any], int]:
        """Receive the body; the metadata line is checked as soon as it is complete. Returns it and where it ends."""
        line, checked = bytearray(), None
        async for chunk in iter_body(request, self.config.receive_timeout_s):
            upload.add(chunk)
            self._buffered += len(chunk)
            if upload.size - HEADER_BYTES > self.config.max_body_bytes:
                raise Refused(f"the body has more than {self.config.max_body_bytes} bytes (max_body_bytes)", 413)
            if checked is None:
                line += chunk[: MAX_LINE + 1 - len(line)]
                if (newline := line.find(b"\n")) >= 0:
                    del line[newline:]
                    checked = self._check(bytes(line))
                    reservation.extend(upload.size, _rewards_to_score(checked))
                elif len(line) > MAX_LINE:
                    raise Refused(f"metadata: no newline within {MAX_LINE} bytes", 413)
            if upload.buffered >= _CHUNK or self._buffered > _MAX_BUFFERED:
                del chunk
                reservation.extend(upload.size, written=upload.size - upload.buffered)
                await self._call_spool(upload.flush)
                self._release(upload)
        if checked is None:
            raise Refused("metadata: no newline after the JSON line")
        return checked, HEADER_BYTES + len(line)

    def _release(self, upload: Upload) -> None:
        self._buffered -= upload.buffered
        upload.buffered = 0

    def _check(self, line: bytes) -> dict[str, Any]:
        """Check everything that needs only the first line."""
        data = parse_line(line)
        known = {args.reward_type for args in self.config.enabled}
        if unknown := [name for name in data["reward_fn"] if name not in known]:
            names = ", ".join(sorted(known)) or "none"
            raise Refused(f"metadata.reward_fn: {unknown[0]!r} is not a reward of this service; enabled are {names}")
        wanted = _rewards_to_score(data)
        if not wanted:
            raise Refused("metadata.reward_fn: no reward has a weight above 0, so there is nothing to score")
        for name in wanted:
            self._check_reward(name, data)
        return data

    def _check_reward(self, name: str, data: dict[str, Any]) -> None:
        """Check what the reward itself requires, once a worker has published it."""
        for status in self.tracker.find_statuses(name):
            about = status["about"]
            media = "image" if data.get("media_type") == "image" else "video"
            if about and media not in about["media_types"]:
                kinds = " and ".join(about["media_types"])
                raise Refused(f"reward {name} scores {kinds}, not {data.get('media_type') or 'latent'}")
            if missing := [field for field in about.get("required_metadata", ()) if field not in data]:
                raise Refused(f"metadata.{missing[0]}: needed by reward {name}")

    def _check_payload(self, upload: Upload, data: dict[str, Any], line_end: int) -> Media:
        """What the payload is, within the limits."""
        media = read_payload(upload.flush(), line_end + 1, upload.size, data.get("media_type"))
        config = self.config
        if media.count > config.max_items:
            raise Refused(f"payload: {media.count} samples are more than max_items = {config.max_items}", 413)
        if media.pixels > config.max_pixels:
            raise Refused(f"payload: {media.pixels} pixels per sample are more than {config.max_pixels}", 413)
        if media.decoded_bytes > config.max_decoded_bytes:
            limit = f"max_decoded_bytes = {config.max_decoded_bytes}"
            raise Refused(f"payload: {media.decoded_bytes} bytes of pixels in the job are more than {limit}", 413)
        if media.kind == "latent":
            self._check_latent(media.array.shape[1])
        check_counts(data, media.count)
        return media

    def _store(self, upload: Upload, data: dict[str, Any], line_end: int, job_id: str) -> tuple[Job, Job | None]:
        """Check the payload and store the job. Returns it, and the job that has its id already, if any."""
        try:
            media = self._check_payload(upload, data, line_end)
            weights = data["reward_fn"]
            job = Job(
                id=job_id,
                accepted=time.time(),
                rewards=tuple(sorted(_rewards_to_score(data))),
                dropped=tuple(sorted(name for name in weights if weights[name] <= 0)),
                sha256=upload.sha256,
                line_end=line_end,
                media=media.kind,
                array=media.array,
                size=upload.size,
                boot=boot(),
                uptime=uptime(),
            )
            upload.seal(job)
            return job, self.spool.accept(upload, job)
        finally:
            upload.discard()

    def _check_latent(self, channels: int) -> None:
        if self.config.no_latent_decoder:
            raise Refused("this service does not decode latents (no_latent_decoder)")
        if channels == 48 and not self.config.decode_args.wan2pt2_model_path:
            raise Refused("latents with 48 channels need decode_args.wan2pt2_model_path on the service")


def _rewards_to_score(data: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, weight in data["reward_fn"].items() if weight > 0)


async def iter_body(request: Request, pause_s: float, pauses: int = _PAUSES) -> AsyncGenerator[bytes, None]:
    """The body as it arrives; nothing is kept, as the framework's own stream would while it waits for more.

    Raises:
        Refused: there was a pause of ``pause_s``, or the whole takes ``pauses`` times that.
        ClientDisconnect: the client has disconnected.
    """
    end, more = time.monotonic() + pauses * pause_s, not request.scope.get(_BODY_READ, False)
    while more:
        try:
            async with asyncio.timeout(min(pause_s, end - time.monotonic())):
                message = await request.receive()
        except TimeoutError:
            raise Refused(f"no data for {pause_s:g} s (receive_timeout_s)", 408) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        request.scope[_BODY_READ] = not more
        if message.get("body"):
            yield message.pop("body")


async def discard_body(request: Request) -> None:
    """Read the rest of a small rejected body, so that clients that send before they read get the answer."""
    left = _DISCARD_BYTES
    with contextlib.suppress(Refused, ClientDisconnect):
        async with contextlib.aclosing(iter_body(request, _DISCARD_S, 1)) as parts:
            async for part in parts:
                left -= len(part)
                if left < 0:
                    return
