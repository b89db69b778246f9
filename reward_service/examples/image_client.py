"""Score two images. Change the constants, then run ``python image_client.py``."""

import json
import os

import httpx
import numpy as np
from client import enqueue, headers, make_body, pull
from PIL import Image, ImageDraw, ImageFont

HOST = os.environ.get("REWARD_HOST", "http://localhost:8080")
TOKEN = os.environ.get("REWARD_TOKEN", "")
REWARDS = os.environ.get("REWARD_NAMES", "ocr").split(",")  # of those that the service has: GET /api/reward/rewards
USE_FAKE = True  # images made here; set it to False and put images of yours into load_images
PROMPTS = ['a sign that says "hello"', 'a poster with the words "reward service"']


def load_images() -> np.ndarray:
    """``[B, H, W, 3]`` uint8."""
    if USE_FAKE:  # the first is what its prompt asks for, the second is not
        return np.stack([image_of("hello"), image_of("reward hacking")])
    raise NotImplementedError("load your images here")


def image_of(text: str) -> np.ndarray:
    """A text, black on white."""
    image = Image.new("RGB", (512, 512), "white")
    ImageDraw.Draw(image).text((60, 220), text, fill="black", font=ImageFont.load_default(size=48))
    return np.asarray(image)


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
