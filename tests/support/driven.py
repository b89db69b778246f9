"""Tiny pipelines of many families, each built, loaded twice (driven and stock) and proved once per session."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl.policy.model.driver.contract import Size
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.loading import load_pipeline
from cosmos_rl.policy.model.driver.probe import prove
from cosmos_rl.policy.model.tiny import build

STEPS = 4
PROMPTS = ["", "two red circles & a très odd (prompt)!!", "a cat"]


@dataclass(frozen=True)
class Family:
    """What the driver must find out by itself, written down from the pipelines' documentation.

    ``t`` is the scheduler's rule: "float" 1000 sigma, "whole" rounded down, "other". ``one_call``: rows of several
    levels share a call. ``decoded``: how closely the stock call gives what the autoencoder alone gives.
    """

    name: str
    guidance: str = "guidance_scale"
    off: float = 1.0
    frames: tuple[str, int] | None = None
    negative: str | None = None
    call: dict[str, Any] = field(default_factory=lambda: {"max_sequence_length": 48})
    t: str = "float"
    path: str = "flow"
    one_call: bool = True
    decoded: float = 1e-5


SPELT = {"max_sequence_length": 48, "complex_human_instruction": None, "use_resolution_binning": False}
PLAIN = {"max_sequence_length": 48, "prompt_template": {"template": "{}", "crop_start": 0}}

ORDINARY = [
    Family("sd3"),
    Family("sana", call=SPELT, t="whole"),
    Family("sana-video", frames=("frames", 5), call=SPELT, t="whole"),
    Family("wan", frames=("num_frames", 5), t="whole"),
    Family("cosmos-predict2.5", frames=("num_frames", 9), t="whole"),  # one more latent frame than media may give
    Family("flux", "true_cfg_scale", negative=""),
]
ZOO = [
    Family("flux2-klein"),
    Family("qwen-image", "true_cfg_scale", negative=" "),
    Family("z-image", off=0.0),
    Family("cosmos-predict2", path="edm", one_call=False, decoded=1.01 / 255),  # it cuts pixels to bytes
    Family("wan2.2", frames=("num_frames", 5), t="whole"),
    Family("wan2.2-5b", frames=("num_frames", 5), t="whole"),
    Family("hunyuan-video", "true_cfg_scale", frames=("num_frames", 5), negative="", call=PLAIN),
    Family("ltx", frames=("num_frames", 5)),
    Family("cogview4", t="other"),
    Family("lumina2"),
    Family("chroma"),
    Family("aura-flow"),
    Family("mochi", frames=("num_frames", 7), t="other"),
]
PARAMS = [pytest.param(one, id=one.name) for one in ORDINARY[:1]]
PARAMS += [pytest.param(one, id=one.name, marks=pytest.mark.slow) for one in ORDINARY[1:]]
PARAMS += [pytest.param(one, id=one.name, marks=pytest.mark.zoo) for one in ZOO]


@dataclass
class Pair:
    """One family, driven, and the stock pipeline from the same files."""

    family: Family
    driver: Driver
    stock: Any

    @property
    def size(self) -> Size:
        return self.driver.size

    def guidance(self, mode: str) -> float:
        return self.family.off if mode == "off" else 3.0

    def stock_call(
        self, prompts: Sequence[str], guidance: float, generators: list[torch.Generator], steps: int = STEPS
    ) -> tuple[list[tuple[Tensor, Any, Tensor]], Tensor]:
        """The public call. Returns (state, t, model output) of each step, and media in [0, 1]."""
        seen = []
        scheduler = self.stock.scheduler
        stock_step = scheduler.step

        def step(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append((sample.clone(), timestep, model_output.clone()))
            return stock_step(model_output, timestep, sample, *args, **kwargs)

        scheduler.step = step
        try:
            arguments = {**self.family.call, self.family.guidance: guidance, "height": 32, "width": 32}
            if self.family.frames is not None:
                arguments[self.family.frames[0]] = self.family.frames[1]
            if self.family.negative is not None:
                arguments["negative_prompt"] = [self.family.negative] * len(prompts)
            given = {"num_inference_steps": steps, "generator": generators, "output_type": "pt", "return_dict": False}
            return seen, self.stock(prompt=list(prompts), **arguments, **given)[0]
        finally:
            del scheduler.step


def generators(n: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + row) for row in range(n)]


def make_pair(family: Family, folder: Path) -> Pair:
    torch.set_num_threads(1)
    path = build(family.name, folder / family.name, "unit", seed=0)
    driver = Driver(load_pipeline(str(path)), call=family.call)
    prove(driver)
    stock = load_pipeline(str(path))
    stock.set_progress_bar_config(disable=True)
    return Pair(family, driver, stock)


CONDITIONED = (
    "wan-i2v",
    "wan2.2-i2v",
    "wan2.2-5b-i2v",
    "sana-video-i2v",
    "ltx-i2v",
    "hunyuan-video-i2v",
    "flux-kontext",
)
"""Families that need a medium: tests/model/test_conditioned.py compares them with the stock call."""
