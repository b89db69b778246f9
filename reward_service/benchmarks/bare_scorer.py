"""What the service is compared with: one endpoint that scores in the request, and loses everything when it crashes."""

import io
import json
import sys
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool

from cosmos_rl_reward.rewards.jpeg import JpegCompressibility

app = FastAPI()
handler = JpegCompressibility(device="cpu")
handler.set_up()


def score(body: bytes) -> Any:
    """Parse and score one request."""
    end = body.index(b"\n")
    images, metadata = np.load(io.BytesIO(body[end + 1 :])), json.loads(body[:end])
    result = handler.calculate_reward(images, metadata)
    return {key: [float(v) for v in values] for key, values in result["scores"].items()}


@app.post("/score")
async def endpoint(request: Request) -> Any:
    """The whole service."""
    return await run_in_threadpool(score, await request.body())


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
