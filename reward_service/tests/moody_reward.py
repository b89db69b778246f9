"""A third-party reward that does what its first prompt says; lives outside the package."""

import os
import subprocess
import sys
import time

import numpy as np

from cosmos_rl_reward.handler import BadInput, BaseRewardHandler, NotReady, RewardRegistry


@RewardRegistry.register()
class Moody(BaseRewardHandler):
    """Scores the mean of each image, unless the prompt wants something else."""

    reward_name = "moody"
    array_type = "numpy"
    mergeable = True
    max_batch = 8
    score_keys = ("mean",)
    OPTIONS = {"start": "well", "flag": ""}

    def set_up(self):
        start = self.options["start"]
        if start == "not ready":
            raise NotReady("weights missing: put them into /nowhere")
        if start == "import error":
            raise ImportError("cannot import name 'helper'")
        if start == "slow":
            time.sleep(2)
        if start == "until flag" and not os.path.exists(self.options["flag"]):
            raise NotReady(f"waits for {self.options['flag']}")

    def calculate_reward(self, images, metadata):
        mean = images.reshape(len(images), -1).mean(1)
        for prompt in metadata["prompts"]:
            word, _, rest = prompt.partition(" ")
            if word == "die":
                print("exit as requested", flush=True)
                os.kill(os.getpid(), 9)
            if word == "exit":
                sys.exit(3)
            if word == "sleep":
                time.sleep(float(rest))
            if word == "raise":
                raise RuntimeError(rest)
            if word == "bad":
                raise BadInput("metadata.prompts: bad")
            if word == "nan":
                mean = np.where(np.arange(len(mean)) == 0, np.nan, mean)
            if word == "short":
                return {"scores": {"mean": mean[:-1]}}
            if word == "nothing":
                return None
            if word == "envelope":
                return {"scores": None, "error": "as requested"}
            if word == "surrogate":
                raise BadInput("bad prompt \ud800")
            if word == "leave":  # children in sessions of their own, one of them without our environment
                whole, bare = (subprocess.Popen(["sleep", "600"], start_new_session=True, env=e) for e in (None, {}))
                forked = os.fork()
                if forked == 0:
                    time.sleep(600)
                    os._exit(0)
                with open(rest, "w") as file:
                    file.write(f"{whole.pid} {bare.pid} {forked}")
            if word == "diefirst" and not os.path.exists(rest):
                open(rest, "w").close()
                os.kill(os.getpid(), 9)
        return {"scores": {"mean": mean, "pid": [os.getpid()] * len(mean)}}

    def probes(self):
        return [(np.full((1, 8, 8, 3), v, np.uint8), {"prompts": ["probe"]}) for v in (0, 200)]


class Constant(Moody):
    """Scores everything the same."""

    reward_name = "constant"

    def calculate_reward(self, images, metadata):
        return {"scores": {"mean": [0.0] * len(images)}}


def brightness(images, metadata):
    """A function reward."""
    return images.reshape(len(images), -1).mean(1)


def level(to_be_evaluated, reference=None, **kw):
    """The sample's own metadata."""
    known = kw["metadata"]
    if known["level"] is None:
        return None
    return 1000 * known["level"] + 10 * len(known["tags"]) + len(reference) + float(to_be_evaluated.mean()) / 1000


class Levels(Moody):
    """Metadata of each sample; several jobs share a call."""

    reward_name = "levels"
    media_types = ("image",)
    score_keys = ("levels", "together")

    def calculate_reward(self, images, metadata):
        time.sleep(0.05)  # meanwhile other jobs come, which then share a call
        known = metadata.get("level", [0] * len(images))
        assert len(known) == len(images)
        return {"scores": {"levels": known, "together": [len(images)] * len(images)}}
