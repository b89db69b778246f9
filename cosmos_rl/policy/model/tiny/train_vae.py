"""Train the small AutoencoderKL that the tiny pipelines ship with, and write it next to this file.

    python -m cosmos_rl.policy.model.tiny.train_vae [--out DIR] [--steps N]

A random autoencoder destroys images, so the tiny pipelines need a trained one. It sees synthetic coloured shapes
and gradients, and scikit-learn's handwritten digits in grey and in colour: only the digits of `generator_digits()`,
so whoever judges images can keep others unseen. One thread, fixed seed. Needs scikit-learn; nothing else in the
package does.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "vae"
SIZE = 32  # pixels; the convolutions take any multiple of 4


def generator_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns the digits that generators may learn from: images `[N, 8, 8]` in 0..1 and labels `[N]`.

    The k-th image of a digit belongs here when k is even and k % 20 != 10; a rule instead of a shuffle keeps the
    parts balanced over the digits and the same everywhere. `examples/quickstart/digits.py` names the other parts.
    """
    from sklearn.datasets import load_digits

    cells, labels = load_digits(return_X_y=True)
    occurrence = np.zeros(len(labels), dtype=int)
    for digit in range(10):
        where = labels == digit
        occurrence[where] = np.arange(where.sum())
    chosen = (occurrence % 2 == 0) & (occurrence % 20 != 10)
    return cells.reshape(-1, 8, 8)[chosen].astype(np.float32) / 16.0, labels[chosen]


def new_vae() -> AutoencoderKL:
    """Returns the untrained autoencoder: 3 x H x W pixels <-> 4 x H/4 x W/4 latents, 60,131 weights."""
    settings: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "block_out_channels": (8, 16, 16),
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "sample_size": SIZE,
        "mid_block_add_attention": False,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "force_upcast": False,
    }
    return AutoencoderKL(**settings)


class ImageMaker:
    """Draws batches of training images `[B, 3, 32, 32]` in -1..1 from one seeded generator."""

    def __init__(self, digits: np.ndarray, seed: int) -> None:
        small = torch.from_numpy(digits)[:, None]
        large = nn.functional.interpolate(small, size=(SIZE, SIZE), mode="bicubic", align_corners=False)
        self.digits = large.clamp(0, 1)
        self.random = torch.Generator().manual_seed(seed)
        axis = (torch.arange(SIZE) + 0.5) / SIZE * 2 - 1
        self.y, self.x = torch.meshgrid(axis, axis, indexing="ij")

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=self.random)

    def batch(self, count: int) -> Tensor:
        """Returns `count` images: half digits (half of them grey), a quarter shapes, a quarter gradients."""
        quarter = count // 4
        grey = self._digit_masks(quarter).expand(-1, 3, -1, -1)
        tinted = self._paint(self._digit_masks(quarter))
        shapes = self._paint(self._shape_masks(quarter))
        gradients = self._gradients(count - 3 * quarter)
        return torch.cat([grey, tinted, shapes, gradients]) * 2 - 1

    def _digit_masks(self, count: int) -> Tensor:
        index = torch.randint(len(self.digits), (count,), generator=self.random)
        return self.digits[index]

    def _shape_masks(self, count: int) -> Tensor:
        """Returns soft-edged circles, boxes, diamonds and rings `[count, 1, 32, 32]` in 0..1."""
        centre = self.uniform(count, 2, 1, 1, low=-0.5, high=0.5)
        radius = self.uniform(count, 1, 1, low=0.2, high=0.7)
        dx, dy = self.x - centre[:, 0], self.y - centre[:, 1]
        circle = (dx.square() + dy.square()).sqrt()
        box, diamond = torch.maximum(dx.abs(), dy.abs()), dx.abs() + dy.abs()
        ring = (circle - radius).abs() + 0.6 * radius
        kinds = torch.stack([circle, box, diamond, ring])
        kind = torch.randint(len(kinds), (count,), generator=self.random)
        distance = kinds[kind, torch.arange(count)] - radius
        return torch.sigmoid(-distance * self.uniform(count, 1, 1, low=10.0, high=40.0))[:, None]

    def _paint(self, mask: Tensor) -> Tensor:
        """Gives each mask `[B, 1, 32, 32]` a colour on a background, black half of the time."""
        count = len(mask)
        ink = self.uniform(count, 3, 1, 1)
        ground = self.uniform(count, 3, 1, 1) * (self.uniform(count, 1, 1, 1) < 0.5)
        return mask * ink + (1 - mask) * ground

    def _gradients(self, count: int) -> Tensor:
        """Returns smooth colour fields: a random 3 x 3 image enlarged, some nearly flat."""
        coarse = self.uniform(count, 3, 3, 3)
        flat = self.uniform(count, 3, 1, 1)
        mix = self.uniform(count, 1, 1, 1)
        fields = mix * coarse + (1 - mix) * flat
        return nn.functional.interpolate(fields, size=(SIZE, SIZE), mode="bicubic", align_corners=False).clamp(0, 1)


def train(steps: int, *, batch: int = 32, lr: float = 3e-3, kl_weight: float = 1e-4, seed: int = 0) -> AutoencoderKL:
    """Trains the autoencoder and returns it with `shift_factor` and `scaling_factor` measured on its own latents."""
    torch.manual_seed(seed)
    images = ImageMaker(generator_digits()[0], seed)
    vae = new_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.05)
    for step in range(steps):
        target = images.batch(batch)
        posterior = vae.encode(target, return_dict=False)[0]
        latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=images.random)
        error = vae.decode(latents, return_dict=False)[0] - target  # pyright: ignore[reportArgumentType]
        # The KL term keeps the latents near unit size and the decoder tolerant of a generator's small errors.
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = error.square().mean() + 0.1 * error.abs().mean() + kl_weight * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            spent = time.process_time()
            print(f"step {step} mse {error.square().mean():.5f} kl {kl:.3f} cpu {spent:.0f} s", flush=True)
    return _measure(vae.eval(), images.batch(1024))


@torch.no_grad()
def _measure(vae: AutoencoderKL, images: Tensor) -> AutoencoderKL:
    """Writes mean and standard deviation of the latents of `images` into the config, as SD3's pipelines read them."""
    latents = vae.encode(images, return_dict=False)[0].mean
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=round(shift, 4), scaling_factor=round(scale, 4))
    return vae


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the tiny AutoencoderKL.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder that receives config.json and the weights")
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    train(args.steps).save_pretrained(args.out)


if __name__ == "__main__":
    main()
