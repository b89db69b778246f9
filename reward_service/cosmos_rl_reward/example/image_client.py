"""Score two images. Change the constants, then run ``python image_client.py``."""

import json
import os

import httpx
import numpy as np

from cosmos_rl_reward.example.client import enqueue, headers, make_body, pull

HOST = os.environ.get("REWARD_HOST", "http://localhost:8080")
TOKEN = os.environ.get("REWARD_TOKEN", "")
REWARDS = os.environ.get("REWARD_NAMES", "ocr").split(",")  # of those that the service has: GET /api/reward/rewards
USE_FAKE = True  # random pixels; set it to False and put pictures of yours into load_images
PROMPTS = ['a sign that says "hello"', 'a poster with the words "reward service"']


def load_images() -> np.ndarray:
    """``[B, H, W, 3]`` uint8."""
    if USE_FAKE:
        return np.random.default_rng(0).integers(0, 256, (len(PROMPTS), 512, 512, 3), dtype=np.uint8)
    raise NotImplementedError("load your pictures here")


def main() -> None:
    """Ping, enqueue, print the result of each reward."""
    with httpx.Client(base_url=HOST, headers=headers(TOKEN), timeout=60) as client:
        print(client.post("/api/reward/ping", data={"info_data": "{}"}).json()["message"])
        body = make_body(load_images(), PROMPTS, dict.fromkeys(REWARDS, 1.0), "image")
        job, extra = enqueue(client, body)
        print("job", job)
        for reward in REWARDS:
            print(json.dumps(pull(client, job, reward, extra), indent=2))


if __name__ == "__main__":
    main()
