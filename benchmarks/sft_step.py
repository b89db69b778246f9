"""Time of our SFT step against a bare loop over the same transformer, blocks of steps taken in turn."""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.images import write_images
from benchmarks.timing import median_ratio, take_turns
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.distributed.context import process_group
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.model.tiny import build
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SFTTrainer

BATCH, STEPS, ROUNDS = 32, 4, 7


def config_for(folder: Path, *, cached: bool) -> Config:
    """A full fine-tune of the ``digits`` preset, batch 32 in one pass."""
    data = {"dataset": {"local_dir": str(folder / "data")}, "enable_dataset_cache": cached}
    job = {"type": "sft", "mini_batch": BATCH, **data}
    return Config.from_dict(
        {
            "policy": {
                "model_name_or_path": str(folder / "model"),
                "is_diffusers": True,
                "model_gradient_checkpointing": False,
                "diffusers": {"max_prompt_length": 16, "inference_size": [32, 32]},
            },
            "train": {
                "output_dir": str(folder / "out"),
                "epoch": 1000,
                "train_batch_per_replica": BATCH,
                "param_dtype": "float32",
                "optm_lr": 1e-4,
                "train_policy": job,
            },
        }
    )


def bare_loop(trainer: SFTTrainer, pairs: LocalPairs, *, encode: bool) -> Callable[[], None]:
    """Flow matching in the fewest lines: images and prompts in memory, one AdamW, no keys, no metrics.

    Without ``encode`` latents and text are computed beforehand, so that the loop is the transformer and the optimiser.
    """
    model = trainer.model
    images = torch.stack([pairs[i].visual for i in range(len(pairs))])
    prompts = [pairs[i].prompt for i in range(len(pairs))]
    distinct = sorted(set(prompts))
    rows = torch.tensor([distinct.index(prompt) for prompt in prompts])
    sigmas = model.sigma_map
    params = list(trainer.params.values())
    optimizer = torch.optim.AdamW(params, lr=0.0, fused=True)  # lr 0: both loops work on the same weights

    @torch.no_grad()
    def latents(images: torch.Tensor) -> torch.Tensor:
        vae = model.vae
        return (vae.encode(images).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor

    @torch.no_grad()
    def text() -> tuple[torch.Tensor, torch.Tensor]:
        embeds, _, pooled, _ = model.pipeline.encode_prompt(
            distinct, None, None, do_classifier_free_guidance=False, max_sequence_length=16
        )
        return embeds, pooled

    all_latents, (embeds, pooled) = latents(images), text()

    def step() -> None:
        nonlocal embeds, pooled
        index = torch.randint(0, len(images), (BATCH,))
        if encode:
            embeds, pooled = text()
        clean = latents(images[index]) if encode else all_latents[index]
        noise = torch.randn_like(clean)
        sigma = sigmas[torch.randint(0, 1000, (BATCH,))]
        s = sigma[:, None, None, None]
        out = model.transformer(
            hidden_states=(1 - s) * clean + s * noise,
            timestep=sigma * 1000,
            encoder_hidden_states=embeds[rows[index]],
            pooled_projections=pooled[rows[index]],
            return_dict=False,
        )[0]
        torch.nn.functional.mse_loss(out, noise - clean).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def steps_of(trainer: SFTTrainer) -> Callable[[], object]:
    """Our training steps, one a call."""
    trainer.start(0)
    numbers = itertools.count()
    return lambda: trainer.train_step(next(numbers))


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    with tempfile.TemporaryDirectory() as name, process_group("cpu") as context:
        folder = Path(name)
        build("sd3", folder / "model", "digits", seed=0)
        write_images(folder / "data", 64, 32)
        pairs = LocalPairs(folder / "data", 32, 32)
        trainer = build_sft(config_for(folder, cached=False), context, dataset=pairs)
        cached = build_sft(config_for(folder, cached=True), context, dataset=pairs)
        loops = {
            "ours": steps_of(trainer),
            "bare, encoding": bare_loop(trainer, pairs, encode=True),
            "ours, cached": steps_of(cached),
            "bare, nothing encoded": bare_loop(cached, pairs, encode=False),
        }
        times = take_turns(loops, ROUNDS, calls=STEPS)
    rows = []
    for ours, bare in (("ours", "bare, encoding"), ("ours, cached", "bare, nothing encoded")):
        ratio = f"{median_ratio(times[ours], times[bare]):.3f}"
        rows.append((f"SFT step, batch {BATCH}: {ours}, against a loop ({bare})", ratio, "<= 1.10"))
    return rows
