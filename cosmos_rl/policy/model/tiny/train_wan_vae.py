"""Train the small AutoencoderKLWan that the tiny video pipelines can use, and write it next to this file.

    python -m cosmos_rl.policy.model.tiny.train_wan_vae [--out DIR] [--steps N]

It sees the clips of `shapes.draw_clip`. One thread, fixed seed; about 15 CPU minutes.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from cosmos_rl.policy.model.tiny.parts import WAN_VAE_FOLDER
from cosmos_rl.policy.model.tiny.shapes import ALL_SHAPES, draw_clip

BATCH, STEPS, RATE = 8, 1600, 2e-3
NOISE = 0.05  # added to latents while training, so that the decoder takes what a generator gives
MEASURED = 256  # clips for the statistics of the latents


def new_vae() -> AutoencoderKLWan:
    """The untrained autoencoder, 168,000 weights."""
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=8,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
    )


def draw_batch(count: int, random: np.random.Generator) -> Tensor:
    """Clips float32 ``[count, 3, T, H, W]`` in [-1, 1]."""
    shapes = [ALL_SHAPES[index] for index in random.integers(len(ALL_SHAPES), size=count)]
    clips = np.stack([draw_clip(shape, random) for shape in shapes])
    return torch.from_numpy(clips).movedim(-1, 1).float() / 127.5 - 1


def train(steps: int) -> AutoencoderKLWan:
    """Train from a fixed seed and measure the statistics of the latents."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    vae = new_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    began = time.process_time()
    for step in range(steps):
        clips = draw_batch(BATCH, random)
        latents = vae.encode(clips).latent_dist.mean  # pyright: ignore[reportAttributeAccessIssue]
        decoded = vae.decode(latents + NOISE * torch.randn_like(latents), return_dict=False)[0]
        error = decoded - clips
        loss = error.abs().mean() + error.square().mean() + 1e-3 * latents.square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            spent = time.process_time() - began
            print(f"step {step}: mse {float(error.detach().square().mean()):.5f}, {spent:.0f} s", flush=True)
    return normalise(vae.eval(), random)


@torch.no_grad()
def normalise(vae: AutoencoderKLWan, random: np.random.Generator) -> AutoencoderKLWan:
    """The same with the mean and the standard deviation of each latent channel in its configuration."""
    parts = [vae.encode(draw_batch(BATCH, random)).latent_dist.mean for _ in range(MEASURED // BATCH)]  # pyright: ignore
    latents = torch.cat(parts).movedim(1, 0).flatten(1).double()
    vae.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())
    return vae


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=WAN_VAE_FOLDER)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    train(given.steps).save_pretrained(given.out)
