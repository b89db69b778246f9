"""Small SFT and NFT jobs on the tiny pipeline of any family."""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl.policy.model import tiny
from cosmos_rl.policy.model.driver.loading import load_pipeline
from cosmos_rl.policy.model.driver.model import DrivenModel
from tests.support.driven import SPELT
from tests.support.nft_runs import nft_job

TEXTS = ("a red square", "two birds & a boat", "the sea")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


@dataclass(frozen=True)
class TrainedFamily:
    """What the public call of a family needs beyond a prompt, written down from its documentation."""

    name: str
    guidance: str = "guidance_scale"
    off: float = 1.0
    negative: str | None = None
    length: bool = True
    """Whether the call takes ``max_sequence_length``."""
    frames: tuple[str, int] | None = None
    """The argument with the number of frames, and a small one."""
    experts: tuple[str, ...] = ("transformer",)
    edm: float = 0.0
    """The first sigma of the path x0 + s e, by which the call scales ``latents``; 0: the usual path."""
    ranks: bool = True
    """Whether several ranks can train it."""
    side: int = 0
    """Of the square that the call unpacks ``latents`` from; 0: it takes states."""

    def call(self, prompts: Sequence[str], guidance: float) -> dict[str, Any]:
        """Keyword arguments of the stock pipeline at that guidance; 1: off."""
        given: dict[str, Any] = {"prompt": list(prompts), "height": 32, "width": 32, "num_inference_steps": 4}
        given[self.guidance] = self.off if guidance == 1.0 else guidance
        if self.length:
            given["max_sequence_length"] = 48
        if self.negative is not None:
            given["negative_prompt"] = [self.negative] * len(prompts)
        if self.frames is not None:
            given[self.frames[0]] = self.frames[1]
        if self.name in ("sana", "sana-video"):
            given |= {"use_resolution_binning": SPELT["use_resolution_binning"]}
        return given

    def latents(self, state: Tensor) -> Tensor:
        """A state ``[B, ...]`` as the stock call takes it."""
        if self.edm:
            return state * (1 + self.edm) / self.edm
        if self.side == 0:
            return state
        return state.movedim(-1, 1).reshape(len(state), -1, self.side, self.side)


class DrivenSD3(DrivenModel):
    """The one family with a class of its own, without it."""

    @staticmethod
    def supported_model_types() -> list[str]:
        return ["StableDiffusion3Pipeline"]


SD3 = TrainedFamily("sd3")
"""Only where ``DrivenSD3`` is registered."""
ORDINARY = [
    TrainedFamily("sana"),
    TrainedFamily("sana-video", frames=("frames", 5)),
    TrainedFamily("wan", frames=("num_frames", 5)),
    TrainedFamily("cosmos-predict2.5", frames=("num_frames", 5)),
]
ZOO = [
    TrainedFamily("flux", "true_cfg_scale", negative=""),
    TrainedFamily("flux2-klein", side=8),
    TrainedFamily("qwen-image", "true_cfg_scale", negative=" "),
    TrainedFamily("z-image", off=0.0),
    TrainedFamily("cogview4"),
    TrainedFamily("lumina2"),
    TrainedFamily("chroma"),
    TrainedFamily("aura-flow"),
    TrainedFamily("cosmos-predict2", edm=80.0, ranks=False),
    TrainedFamily("wan2.2", frames=("num_frames", 5), experts=("transformer", "transformer_2")),
    TrainedFamily("wan2.2-5b", frames=("num_frames", 5)),
    TrainedFamily("hunyuan-video", "true_cfg_scale", negative="", frames=("num_frames", 5)),
    TrainedFamily("ltx", frames=("num_frames", 9)),
    TrainedFamily("mochi", frames=("num_frames", 7)),
]
PARAMS = [pytest.param(one, id=one.name) for one in ORDINARY[:1]]
PARAMS += [pytest.param(one, id=one.name, marks=pytest.mark.slow) for one in (SD3, *ORDINARY[1:])]
PARAMS += [pytest.param(one, id=one.name, marks=pytest.mark.zoo) for one in ZOO]


_made = tempfile.TemporaryDirectory(prefix="families.")
"""Removed when the tests end."""


@functools.cache
def folder_of(family: str) -> Path:
    """The tiny pipeline of a family, built once for the session."""
    torch.set_num_threads(1)
    return tiny.build(family, Path(_made.name) / family, "unit", seed=0)


def family_toml(
    folder: Path, family: TrainedFamily, *, job: str, lora: bool = True, images: Path | None = None
) -> Path:
    """A job of three steps: ``sft`` on the folder of pairs, or ``nft`` on prompts with a smooth reward."""
    path = folder / f"{family.name}_{job}_{'lora' if lora else 'full'}.toml"
    adapter = f"""
[policy.lora]
r = 4
lora_alpha = 8
lora_names = {'["default", "old"]' if job == "nft" else '["default"]'}
init_lora_weights = "gaussian"
target_modules = {TARGETS}
"""
    trained = {
        "sft": f'type = "sft"\nmini_batch = 2\ndataset.local_dir = "{images}"',
        "nft": nft_job(folder),
    }
    video = ""
    if family.frames is not None:
        video = f"is_video = true\ntrain_frames = {family.frames[1]}\ninference_frames = {family.frames[1]}"
    path.write_text(f"""
mode = "colocated"
[policy]
model_name_or_path = "{folder_of(family.name)}"
is_diffusers = true
model_gradient_checkpointing = false
[policy.diffusers]
inference_size = [32, 32]
{video}
max_prompt_length = 48
timesteps_fraction = 0.5
weight_copy_decay_type = 1
sample = {{ num_steps = 4, guidance_scale = 1.0, solver = "euler", deterministic_sampling = true }}
{adapter if lora else ""}
[rollout]
n_generation = 4
[train]
output_dir = "{folder / "out"}"
epoch = 100
max_num_steps = 3
train_batch_per_replica = {8 if job == "nft" else 4}
param_dtype = "float32"
optm_lr = 1e-2
optm_warmup_steps = 0
[train.ckpt]
save_freq = 1
max_keep = -1
[train.train_policy]
{trained[job]}
""")
    return path


class Clips:
    """A data set of twelve short captioned videos."""

    def __init__(self, frames: int) -> None:
        self._pixels = torch.rand(12, 3, frames, 32, 32, generator=torch.Generator().manual_seed(4)) * 2 - 1

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"visual": self._pixels[index], "prompt": TEXTS[index % len(TEXTS)]}


def stock_pipeline(folder: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """The pipeline as diffusers loads it, but for a safety checker whose package is not there."""
    pipeline = load_pipeline(str(folder), dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def first_step_of(pipeline: Any, arguments: dict[str, Any]) -> tuple[Tensor, float]:
    """What the stock call hands to the first step of its scheduler as the change per sigma, and sigma there."""
    seen: list[tuple[Tensor, float, Tensor]] = []
    scheduler, stock_step = pipeline.scheduler, pipeline.scheduler.step

    def step(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((model_output.clone(), float(scheduler.sigmas[0]), sample.clone()))
        return stock_step(model_output, timestep, sample, *args, **kwargs)

    scheduler.step = step
    try:
        with torch.no_grad():
            pipeline(**arguments, output_type="latent")
    finally:
        del scheduler.step
    velocity, sigma, state = seen[0]
    if float(scheduler.sigmas[-1]) == 1.0:  # Mochi's counts from noise at 0 to data at 1
        return -velocity, 1 - sigma
    if sigma > 1.0:  # x0 + s e is (1 - sigma) x0 + sigma e with sigma = s / (1 + s), times 1 + s
        return (1 + sigma) * velocity - state, sigma / (1 + sigma)
    return velocity, sigma
