"""Score a video given as latents of the Wan VAE. Change the constants, then run ``python video_client.py``."""

import json
import os

import httpx
import numpy as np
from client import enqueue, headers, make_body, pull

HOST = os.environ.get("REWARD_HOST", "http://localhost:8080")
TOKEN = os.environ.get("REWARD_TOKEN", "")
REWARDS = os.environ.get("REWARD_NAMES", "cosmos_reason1,dance_grpo").split(",")
USE_FAKE = True  # random latents; set it to False and put latents of yours into load_latents
SHAPE = tuple(int(n) for n in os.environ.get("REWARD_SHAPE", "1,16,24,54,96").split(","))  # Wan 2.2: 1,48,8,44,80
PROMPTS = ["a red ball rolls down a hill"] * SHAPE[0]


def load_latents() -> np.ndarray:
    """``[B, 16 or 48, T, h, w]``, normalised with the VAE's own mean and deviation."""
    if USE_FAKE:
        return np.random.default_rng(0).standard_normal(SHAPE).astype(np.float16)
    raise NotImplementedError("load your latents here")


def main() -> None:
    """Ping, enqueue, print the result of each reward."""
    with httpx.Client(base_url=HOST, headers=headers(TOKEN), timeout=120) as client:
        print(client.post("/api/reward/ping", data={"info_data": "{}"}).json()["message"])
        infos = [{"video_fps": 16.0}] * SHAPE[0]
        body = make_body(load_latents(), PROMPTS, dict.fromkeys(REWARDS, 1.0), "latent", video_infos=infos)
        job, extra = enqueue(client, body)
        print("job", job)
        for reward in REWARDS:
            print(json.dumps(pull(client, job, reward, extra), indent=2))


if __name__ == "__main__":
    main()
