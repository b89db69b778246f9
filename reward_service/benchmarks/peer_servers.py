"""Servers that the service is compared with, one scoring function in several designs, rewritten in our own words.

``bare``: one FastAPI route, scored in a thread. ``sync``: the design of yifan123/reward-server, one synchronous worker
with pickles both ways (there Flask under gunicorn ``-w 1 -k sync``; here an ASGI application that scores in the event
loop, one request at a time, which saves it Flask's share). ``json``: the design of UniRL's direct server, JSON with
PNGs in base64, a schema, a fingerprint of the request, one lock, and the scorer in a thread.

None of them keeps anything: a request is lost with its process. ``python -m benchmarks.peer_servers NAME PORT``.
"""

import asyncio
import base64
import hashlib
import io
import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from PIL import Image
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from cosmos_rl_reward.rewards.jpeg import JpegCompressibility
from tests.service import body

handler = JpegCompressibility(device="cpu")


def score(images: np.ndarray, metadata: dict[str, Any]) -> dict[str, list[float]]:
    """What all of them do."""
    result = handler.calculate_reward(images, metadata)
    return {key: [float(v) for v in values] for key, values in result["scores"].items()}


def bare() -> FastAPI:
    """The body of protocol v1, one route."""
    app = FastAPI()

    def parse(data: bytes) -> Any:
        end = data.index(b"\n")
        return score(np.load(io.BytesIO(data[end + 1 :])), json.loads(data[:end]))

    @app.post("/score")
    async def endpoint(request: Request) -> Any:
        return await run_in_threadpool(parse, await request.body())

    return app


def sync() -> FastAPI:
    """Pickle in, pickle out, one at a time. Only for a benchmark that talks to itself."""
    app = FastAPI()

    @app.post("/score")
    async def endpoint(request: Request) -> Response:
        data = pickle.loads(await request.body())
        answer = score(data["images"], {"prompts": data["prompts"]})
        return Response(pickle.dumps({"scores": answer}))

    return app


class Job(BaseModel):
    """What ``json`` takes."""

    images: list[str]
    prompts: list[str]


def as_json() -> FastAPI:
    """PNGs in base64, checked against a schema."""
    app, lock = FastAPI(), asyncio.Lock()

    def parse(job: Job) -> Any:
        images = [Image.open(io.BytesIO(base64.b64decode(text)), formats=("PNG",)) for text in job.images]
        return score(np.stack([np.asarray(image) for image in images]), {"prompts": job.prompts})

    @app.post("/score")
    async def endpoint(job: Job, request: Request) -> Any:
        fingerprint = hashlib.sha256(await request.body()).hexdigest()
        async with lock:
            return {"scores": await run_in_threadpool(parse, job), "fingerprint": fingerprint}

    return app


def requests(images: np.ndarray) -> dict[str, bytes]:
    """The same job as each of them takes it."""

    def png(image: np.ndarray) -> str:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    prompts = ["a"] * len(images)
    return {
        "bare": body(images, "jpeg_compressibility"),
        "sync": pickle.dumps({"images": images, "prompts": prompts}),
        "json": json.dumps({"images": [png(image) for image in images], "prompts": prompts}).encode(),
    }


DESIGNS: dict[str, Callable[[], FastAPI]] = {"bare": bare, "sync": sync, "json": as_json}


if __name__ == "__main__":
    handler.set_up()
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False}
    uvicorn.run(DESIGNS[sys.argv[1]](), port=int(sys.argv[2]), **quiet)
