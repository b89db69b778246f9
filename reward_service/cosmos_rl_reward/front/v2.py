"""Protocol v2: whole jobs instead of one reward at a time, with HTTP's own status codes."""

import asyncio
import json
import re

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from cosmos_rl_reward.front.answers import MAX_WAIT_S, collect_results, describe_job
from cosmos_rl_reward.front.state import Front
from cosmos_rl_reward.front.v1 import read_fields, wait_seconds
from cosmos_rl_reward.payload.errors import Refused
from cosmos_rl_reward.results import CANCELLED

router = APIRouter(prefix="/v2")
_MAX_BATCH = 256


def _preferred_wait(request: Request) -> float:
    """Seconds of ``Prefer: wait=N``."""
    found = re.search(r"\bwait=(\d{1,6})\b", request.headers.get("prefer", ""))
    if found is None:
        return 0.0
    return min(MAX_WAIT_S, float(found[1]))


def _not_found(job_id: str) -> JSONResponse:
    return JSONResponse({"error": f"no job {job_id}: never accepted here, or its results have expired"}, 404)


@router.post("/jobs")
async def submit(request: Request) -> Response:
    """Take a job (the body of v1's enqueue): 202, or 200 when it ended within ``Prefer: wait=N``."""
    front = Front.from_request(request)
    ticket = await front.receiver.receive(request, front.allow(request, "submit"))
    with front.poll(_preferred_wait(request)) as wait_s:
        state = await collect_results(front.tracker, ticket.job, wait_s)
    status = {"queued": 202}.get(state["state"], 200)
    return JSONResponse(state, status, headers={"Location": f"/v2/jobs/{ticket.job.id}"})


@router.post("/score")
async def score(request: Request) -> Response:
    """Take a job and answer with its end: 200, or 504 with the job's id when it takes longer than a minute."""
    front = Front.from_request(request)
    ticket = await front.receiver.receive(request, front.allow(request, "submit"))
    with front.poll(MAX_WAIT_S) as wait_s:
        state = await collect_results(front.tracker, ticket.job, wait_s)
    return JSONResponse(state, {"queued": 504}.get(state["state"], 200))


@router.get("/jobs/{job_id}")
async def get(job_id: str, request: Request) -> Response:
    """All rewards of a job; ``Prefer: wait=N`` waits for the end."""
    front = Front.from_request(request)
    front.allow(request, "read")
    with front.poll(_preferred_wait(request)) as wait_s:
        state = await describe_job(front.tracker, job_id, wait_s)
    if state is None:
        return _not_found(job_id)
    return JSONResponse(state)


@router.delete("/jobs/{job_id}")
async def cancel(job_id: str, request: Request) -> Response:
    """Cancel what has no result yet; results that are there stay."""
    front = Front.from_request(request)
    front.allow(request, "submit")
    job = await asyncio.to_thread(front.tracker.spool.job, job_id)
    if job is None:
        return _not_found(job_id)
    for reward in job.rewards:
        await front.tracker.end(job_id, reward, CANCELLED, "cancelled by a client")
    return JSONResponse(await describe_job(front.tracker, job_id))


@router.post("/jobs:batchGet")
async def batch_get(request: Request) -> Response:
    """States of many jobs: ``{"ids": [...], "wait": seconds}``. Jobs that are not known are null."""
    front = Front.from_request(request)
    front.allow(request, "read")
    fields = await read_fields(request)
    try:
        ids = json.loads(fields.get("ids", "null"))
    except ValueError:
        ids = None
    if not isinstance(ids, list) or len(ids) > _MAX_BATCH or not all(isinstance(i, str) for i in ids):
        raise Refused(f"ids: needed, a list of at most {_MAX_BATCH} job ids", 422)
    with front.poll(wait_seconds(fields.get("wait", "0"))) as wait_s:
        states = await asyncio.gather(*(describe_job(front.tracker, job_id, wait_s) for job_id in ids))
    return JSONResponse({"jobs": dict(zip(ids, states, strict=True))})
