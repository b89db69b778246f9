"""Protocol v1: ping, enqueue and pull, as old clients know them, plus fields that they do not read."""

import json
import math
import os
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from cosmos_rl_reward.front.answers import MAX_WAIT_S, get_answer
from cosmos_rl_reward.front.state import Front
from cosmos_rl_reward.front.uploads import iter_body
from cosmos_rl_reward.payload.errors import Refused

router = APIRouter()
_MAX_FORM = 1 << 20  # bytes; info_data of a ping may be a whole metadata line
DEFAULT_TYPE = "dance_grpo"


def missing_field(name: str) -> JSONResponse:
    """What the framework answers when a form lacks a field."""
    return JSONResponse(
        {"detail": [{"type": "missing", "loc": ["body", name], "msg": "Field required", "input": None}]}, 422
    )


async def read_fields(request: Request) -> dict[str, str]:
    """Fields of a form or of a JSON object, as texts.

    Raises:
        Refused: the body is too long or does not match its type.
    """
    body = bytearray()
    async for chunk in iter_body(request, Front.from_request(request).config.receive_timeout_s):
        body += chunk
        if len(body) > _MAX_FORM:
            raise Refused(f"the form has more than {_MAX_FORM} bytes", 413)
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        if kind == "application/json":
            data = json.loads(body or b"{}")
            if not isinstance(data, dict):
                raise ValueError("not an object")
            return {k: v if isinstance(v, str) else json.dumps(v) for k, v in data.items() if v is not None}
        if kind == "multipart/form-data":
            return await _multipart(request.headers, bytes(body))
        pairs = parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=100)
    except (ValueError, RecursionError, MultiPartException, KeyError) as error:
        raise Refused(f"the body cannot be read as {kind or 'a form'}", 422) from error
    return dict(pairs)


async def _multipart(headers: Headers, body: bytes) -> dict[str, str]:
    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    form = await MultiPartParser(headers, whole(), max_files=0, max_fields=100, max_part_size=_MAX_FORM).parse()
    return {name: value for name, value in form.items() if isinstance(value, str)}


@router.post("/api/reward/ping")
@router.post("/api/reward/pin")
async def ping(request: Request) -> Response:
    """Confirm that the service runs."""
    Front.from_request(request).allow(request, "read")
    fields = await read_fields(request)
    if fields and "info_data" not in fields:
        return missing_field("info_data")
    return JSONResponse({"message": "Ping request received"})


@router.post("/api/reward/enqueue")
async def enqueue(request: Request) -> Response:
    """Take a job: one line of JSON metadata, then the bytes of an array."""
    front = Front.from_request(request)
    ticket = await front.receiver.receive(request, front.allow(request, "submit"))
    answer = {"uuid": ticket.job.id}
    if replica := os.environ.get("LEPTON_REPLICA_ID"):
        answer["replica_id"] = replica
    return JSONResponse(answer, headers={} if ticket.created else {"X-Job-State": "known"})


@router.post("/api/reward/pull")
async def pull(request: Request) -> Response:
    """The result of one reward of a job; 400 while there is none. ``wait`` (seconds) delays that answer."""
    front = Front.from_request(request)
    front.allow(request, "read")
    fields = await read_fields(request)
    if "uuid" not in fields:
        return missing_field("uuid")
    job_id, reward = fields["uuid"], fields.get("type") or DEFAULT_TYPE
    with front.poll(wait_seconds(fields.get("wait", "0"))) as wait_s:
        answer = await get_answer(front.tracker, job_id, reward, wait_s)
    headers = {"X-Job-State": answer.state}
    if answer.result is not None:
        return Response(answer.result, media_type="application/json", headers=headers)
    content: dict[str, Any] = {"message": f"Not found scores for {job_id}", "state": answer.state}
    if answer.state == "queued":
        content["position"] = answer.position
        headers["Retry-After"] = "1"
        state, reason = front.tracker.state(reward)
        if state != "ready":
            content["reward_state"] = f"{state}: {reason}" if reason else state
    else:
        content["error"] = "no such job: never accepted here, or its results have expired"
    return JSONResponse(content, 400, headers=headers)


def wait_seconds(text: str) -> float:
    """Seconds of a long poll, 0..60.

    Raises:
        Refused: not a number.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise Refused("wait: must be a number of seconds", 422)
    return min(MAX_WAIT_S, max(0.0, seconds))
