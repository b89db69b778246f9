"""Talks to the reward service: sends requests, asks for results, tries again what can heal."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from cosmos_rl.errors import UserError
from cosmos_rl.reward.access import Access
from cosmos_rl.utils.logging import logger

_HEALING = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses after which the same request may succeed."""
_FORGOTTEN = frozenset({"unknown", "expired"})
_ENDED = frozenset({"failed", "cancelled"})
_STATE = "X-Job-State"
"""A service that sends this header knows the form field `wait`, too."""
_LONGEST_WAIT_S = 20.0
_PULL_S = 10.0
_PIECE = 2**18
"""Bytes of a body that are sent at a time."""
"""Seconds in which an answer to a pull has to come, in addition to what it waits."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
"""Between two pulls."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.25, 15.0
"""Between two tries of a failed request."""


class Lost(Exception):
    """There will be no result for this request; the message says why."""


class Forgotten(Lost):
    """The service does not know the request any more; it can be sent again."""


@dataclass(frozen=True)
class Ticket:
    """A request that the service has taken."""

    uuid: str
    replica: str | None
    """Which replica has taken it."""


class ServiceClient:
    """One connection pool. `until` is always the time of the event loop at which an attempt has to end."""

    def __init__(self, access: Access, http: httpx.AsyncClient) -> None:
        self._access = access
        self._http = http
        self._headers: dict[str, str] = {}
        if access.token:
            self._headers["Authorization"] = f"Bearer {access.token}"
        self._can_wait = False
        self._in_trouble = False

    async def enqueue(self, body: bytearray, key: str, until: float) -> Ticket:
        """Send a request. ``key`` is the same in every try, so that one that was taken unseen is not taken twice.

        Raises:
            Lost: it could not be sent in time.
            UserError: the service refuses it, as it would the next one.
        """
        about = {"Content-Type": "application/octet-stream", "Content-Length": str(len(body)), "Idempotency-Key": key}
        headers = {**self._headers, **about}
        timeout = httpx.Timeout(self._access.upload_s(len(body)), connect=self._access.connect_s)
        tries = _Tries(until)
        while True:
            answer = await self._post(
                self._access.enqueue_url, tries, content=_pieces(body), headers=headers, timeout=timeout
            )
            if answer is not None:
                found = _read_mapping(answer)
                if answer.status_code != 200 and answer.status_code != 202:
                    raise self._build_refusal(answer, "ENQUEUE_URL")
                if isinstance(found.get("uuid"), str):
                    replica = found.get("replica_id")
                    return Ticket(found["uuid"], str(replica) if replica and self._access.pins_replica else None)
                tries.why = "the service took the request without giving a uuid"
            await tries.pause()

    async def result(self, ticket: Ticket, reward: str, until: float) -> Mapping[str, Any]:
        """The result of one reward, asked for until it is there.

        Raises:
            Lost: it did not come in time, or never will.
            UserError: the service refuses to answer.
        """
        headers = dict(self._headers)
        if ticket.replica:
            headers["X-Lepton-Replica-Target"] = ticket.replica
        tries, loop, pause = _Tries(until), asyncio.get_running_loop(), _FIRST_PAUSE_S
        while True:
            wait, form = 0.0, {"uuid": ticket.uuid, "type": reward}
            if self._can_wait:
                wait = min(_LONGEST_WAIT_S, max(0.0, until - loop.time()))
            if wait:
                form["wait"] = f"{wait:.3f}"
            began = loop.time()
            answer = await self._post(
                self._access.fetch_url, tries, data=form, headers=headers, timeout=httpx.Timeout(_PULL_S + wait)
            )
            if answer is not None and answer.status_code == 200 and (found := _read_mapping(answer)):
                return found
            if answer is None or answer.status_code == 200:
                tries.why = tries.why or "the answer is not JSON"
                await tries.pause()
                continue
            self._check_pending(answer)
            tries.why = ""
            if loop.time() - began < wait / 2 or not wait:  # it did not wait for us
                await asyncio.sleep(max(0.0, min(pause, until - loop.time())))
                pause = min(1.5 * pause, _LONGEST_PAUSE_S)
            if loop.time() >= until:
                raise Lost("the score did not come in time")

    def _check_pending(self, answer: httpx.Response) -> None:
        """Let pass what means "not ready yet"; 400 does, as it always has."""
        state = answer.headers.get(_STATE, "").lower()
        text = _read_error(answer)
        if answer.status_code in (404, 410) or state in _FORGOTTEN:
            name = self._access.names["FETCH_URL"]
            raise Forgotten(f"the service ({name}) does not know the request any more: {answer.status_code} {text}")
        if state in _ENDED:
            raise Lost(f"the service has ended the request: {text}")
        if answer.status_code != 400:
            raise self._build_refusal(answer, "FETCH_URL")

    async def _post(self, url: str, tries: "_Tries", **request: Any) -> httpx.Response | None:
        """The answer; None when there is none or one that may be better next time: then ``tries.why`` says which."""
        try:
            async with asyncio.timeout_at(tries.until):
                answer = await self._http.post(url, **request)
        except (httpx.UnsupportedProtocol, httpx.LocalProtocolError):
            raise  # ours
        except TimeoutError:
            raise Lost(f"the service did not answer in time{tries.reason}") from None
        except httpx.RequestError as error:
            self._note(tries, f"{type(error).__name__} {error}".strip(), None)
            return None
        self._can_wait = self._can_wait or _STATE in answer.headers
        if answer.status_code in _HEALING:
            self._note(tries, f"{answer.status_code} {_read_error(answer)}".strip(), answer.headers.get("Retry-After"))
            return None
        self._in_trouble = False
        return answer

    def _note(self, tries: "_Tries", why: str, retry_after: str | None) -> None:
        tries.why = why
        tries.asked_s = 0.0
        if retry_after and retry_after.isdecimal():
            tries.asked_s = float(retry_after)
        if not self._in_trouble:
            self._in_trouble = True
            logger.warning("reward service: %s; trying again", why)

    def _build_refusal(self, answer: httpx.Response, url: str) -> UserError:
        """What no further try would change."""
        status, names = answer.status_code, self._access.names
        text = f"{status} {_read_error(answer)}".strip()
        if status in (401, 403):
            return UserError(f"{names['TOKEN']}: the reward service refuses the token: {text}")
        if status == 413:
            return UserError(f"remote_reward.batch_size: a request is too large for the reward service: {text}")
        if status in (404, 405) or 300 <= status < 400:
            return UserError(f"{names[url]}: there is no such address at the reward service: {text}")
        return UserError(f"the reward service ({names[url]}) refuses the request: {text}")


class _Tries:
    """Pauses between tries: growing, random by a half, not shorter than the service asks for."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.why = ""
        self.asked_s = 0.0
        self._pause_s = _FIRST_RETRY_S

    @property
    def reason(self) -> str:
        if not self.why:
            return ""
        return f" (last error: {self.why})"

    async def pause(self) -> None:
        """Wait for the next try.

        Raises:
            Lost: there is no time for one.
        """
        pause = max(self._pause_s * random.uniform(0.5, 1.5), self.asked_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_RETRY_S)
        if asyncio.get_running_loop().time() + pause >= self.until:
            raise Lost(f"the service cannot be reached{self.reason}")
        await asyncio.sleep(pause)


async def _pieces(body: bytearray) -> AsyncIterator[bytes]:
    """Small copies, so that the trainer's thread never waits long for the interpreter's lock."""
    for first in range(0, len(body), _PIECE):
        yield bytes(memoryview(body)[first : first + _PIECE])


def _read_mapping(answer: httpx.Response) -> Mapping[str, Any]:
    """The JSON object of an answer; empty when it is something else."""
    try:
        found = json.loads(answer.content)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return found


def _read_error(answer: httpx.Response) -> str:
    """What an error answer says, on one line and short."""
    found = _read_mapping(answer)
    said = next((found[key] for key in ("error", "message", "detail") if found.get(key)), None)
    text = answer.text
    if said:
        text = said
        if not isinstance(said, str):
            text = json.dumps(said)
    return " ".join(text.split())[:300]
