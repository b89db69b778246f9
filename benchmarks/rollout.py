"""CPU time of our rollouts, in the calls that training makes by default, against the stock pipeline with as many
images, evaluations and the same result."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline

from benchmarks.timing import median_ratio, take_turns
from cosmos_rl.data.given import text_of
from cosmos_rl.distributed import randomness
from cosmos_rl.policy.config import Config, DiffusersConfig, rollout_chunk
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.quiet import quiet_libraries
from cosmos_rl.policy.model.tiny import build
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import StepConditions
from cosmos_rl.rollout.sampler import RolloutSampler, RolloutSpec, Sample

PROMPTS = [f"a photo of the digit {i}" for i in range(4)]
GROUP, STEPS, SIZE, ROUNDS = 24, 10, 32, 15
SAMPLES = [Sample(i * GROUP + k, i, prompt, {}) for i, prompt in enumerate(PROMPTS) for k in range(GROUP)]


def ours(model: SD3Model) -> Callable[[], torch.Tensor]:
    """All samples: uint8 ``[96, H, W, 3]``. The conditions are encoded again in each run, as in a step."""
    chunk = rollout_chunk(default_config())
    spec = RolloutSpec(STEPS, 1.0, "euler", 0.0, True, SIZE, SIZE)
    sampler = RolloutSampler(model, spec, seed=0)

    def run() -> torch.Tensor:
        conditions = StepConditions(lambda prompts, _: model.encode_prompts([text_of(prompt) for prompt in prompts]))
        conditions.encode_all(PROMPTS)
        with model.eval_mode():
            chunks = [SAMPLES[i : i + chunk] for i in range(0, len(SAMPLES), chunk)]
            parts = [sampler.sample(samples, conditions, "rollout", 0).media for samples in chunks]
        return torch.cat(parts)

    return run


def default_config() -> Config:
    """A job that leaves open how many samples a call makes."""
    diffusers = {"inference_size": [SIZE, SIZE], "sample": {"guidance_scale": 1.0}}
    train = {"train_batch_per_replica": len(SAMPLES), "train_policy": {"type": "grpo", "trainer_type": "diffusion_nft"}}
    return Config.from_dict({"policy": {"diffusers": diffusers}, "rollout": {"n_generation": GROUP}, "train": train})


def stock(pipeline: StableDiffusion3Pipeline) -> Callable[[], torch.Tensor]:
    """The same from the same start noise by ``StableDiffusion3Pipeline``."""

    def run() -> torch.Tensor:
        generators = [randomness.generator(0, "rollout", 0, sample.sample_id) for sample in SAMPLES]
        images: Any = pipeline(
            PROMPTS,
            num_images_per_prompt=GROUP,
            height=SIZE,
            width=SIZE,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            max_sequence_length=16,
            generator=generators,
            output_type="pt",
            return_dict=False,
        )[0]
        return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1)

    return run


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    with tempfile.TemporaryDirectory() as name:
        folder = build("sd3", Path(name) / "model", "unit", seed=0)
        model = SD3Model(DiffusersConfig(max_prompt_length=16, inference_size=(SIZE, SIZE)), model_str=str(folder))
        with quiet_libraries():
            pipeline = StableDiffusion3Pipeline.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        rows_seen = [0]

        def count(_module: torch.nn.Module, _args: object, keywords: dict[str, torch.Tensor]) -> None:
            rows_seen[0] += len(keywords["hidden_states"])

        pipeline.transformer.register_forward_pre_hook(count, with_kwargs=True)
        loops = {"ours": ours(model), "stock": stock(pipeline)}
        apart = int((loops["ours"]().int() - loops["stock"]().int()).abs().max())
        evaluations = model.num_evaluations, rows_seen[0]
        times = take_turns(loops, ROUNDS, warm_up=0)  # both have run
    ratio = median_ratio(times["ours"], times["stock"])
    what = f"rollout of {len(PROMPTS)} x {GROUP} samples, {STEPS} steps, against the stock pipeline"
    same = f"{evaluations[0]} and {evaluations[1]} evaluations, {apart} levels apart"
    return [(what, f"{ratio:.3f} ({same})", "<= 1.03, equal, <= 1")]
