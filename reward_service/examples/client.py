"""Protocol v1 in four functions; copy them into a client of your own."""

import io
import json
import time
from typing import Any

import httpx
import numpy as np


def headers(token: str) -> dict[str, str]:
    """The authorisation header, when there is a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def make_body(array: np.ndarray, prompts: list[str], rewards: dict[str, float], media_type: str, **extra: Any) -> bytes:
    """One line of metadata, then the array as ``.npy``.

    Args:
        array: images ``[B, H, W, 3]`` uint8, videos ``[B, 3, T, H, W]`` uint8, or latents ``[B, 16, T, h, w]``.
        rewards: name and weight; the service scores those with a weight above 0, weighting is the client's.
        media_type: ``image``, ``video`` or ``latent``.
        extra: more metadata, such as ``video_infos``.
    """
    metadata = {"media_type": media_type, "prompts": prompts, "reward_fn": rewards, **extra}
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return json.dumps(metadata).encode() + b"\n" + file.getvalue()


def enqueue(client: httpx.Client, body: bytes, key: str = "") -> tuple[str, dict[str, str]]:
    """Hand a job in; returns its id, and headers for pulling it. ``key``: repeat the call safely with the same one."""
    extra = {"Idempotency-Key": key} if key else {}
    answer = client.post(
        "/api/reward/enqueue", content=body, headers={"Content-Type": "application/octet-stream", **extra}
    )
    if answer.is_error:
        raise RuntimeError(f"enqueue: {answer.status_code} {answer.text}")
    data = answer.json()
    replica = data.get("replica_id")
    return data["uuid"], {"X-Lepton-Replica-Target": replica} if replica else {}


def pull(client: httpx.Client, job: str, reward: str, extra: dict[str, str], max_wait_s: float = 600) -> dict[str, Any]:
    """Wait for one reward of a job; a failed job has ``scores`` None and ``error``."""
    end = time.monotonic() + max_wait_s
    while time.monotonic() < end:
        fields = {"uuid": job, "type": reward, "wait": "30"}  # the service answers as soon as there is a result
        answer = client.post("/api/reward/pull", data=fields, headers=extra)
        if answer.status_code == 200:
            return answer.json()
        if answer.status_code != 400 or answer.json().get("state") == "unknown":
            raise RuntimeError(f"pull: {answer.status_code} {answer.text}")
    raise TimeoutError(f"no {reward} for job {job} within {max_wait_s:g} s")
