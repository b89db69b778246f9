"""Pretrains the network of `tests/support/toy_shapes.py` by flow matching and writes `shapes.safetensors`, in float16.

    python -m tests.support.assets.make_shapes

About two minutes on one core. It stops early on purpose: the count is still wrong in a third of the images, which is
what reinforcement learning has to correct.
"""

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from cosmos_rl.algorithms.flow_matching import flow_matching_loss
from cosmos_rl.data.images import to_uint8
from cosmos_rl.diffusion.schedule import density, mix
from cosmos_rl.optim.classes import Hyperparameters
from cosmos_rl.optim.optimizer import Optimizer
from cosmos_rl.optim.schedule import LrSchedule
from tests.support.toy_shapes import PROMPTS, WEIGHTS, ShapesModel, colour_right, count_right, draw_shapes

STEPS, BATCH, RATE = 1200, 128, 2e-3


def accuracy(model: ShapesModel, each: int = 20, num_steps: int = 20) -> tuple[float, float]:
    """Shares of samples with the right count and the right colour."""
    prompts = [prompt for prompt in PROMPTS for _ in range(each)]
    noise = torch.randn(len(prompts), 3, 16, 16, generator=torch.Generator().manual_seed(1))
    media = to_uint8(model.sample(prompts, noise, num_steps=num_steps, guidance=1.0)).numpy()
    return float(count_right(media, prompts).mean()), float(colour_right(media, prompts).mean())


def pretrain(steps: int = STEPS) -> ShapesModel:
    """Flow matching on fresh images, constant rate and then a linear fall."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = ShapesModel(weights=None)
    schedule = LrSchedule.build(steps, 20, 0.3, "linear", 0.0, 0.0)
    optimizer = Optimizer(
        model.trainable_parameters(),
        settings=Hyperparameters("AdamW", (0.9, 0.99), 1e-8, 0.0, "fused", {}),
        lr=RATE,
        schedule=schedule,
        max_grad_norm=1.0,
    )
    began = time.process_time()
    for step in range(steps):
        prompts = [PROMPTS[i] for i in torch.randint(len(PROMPTS), (BATCH,), generator=generator).tolist()]
        clean = draw_shapes(prompts, generator)
        noise = torch.randn(clean.shape, generator=generator)
        sigma = density(torch.randn(BATCH, generator=generator), "logit_normal").float()
        velocity = model.velocity(mix(clean, noise, sigma), model.training_level(sigma), model.encode_prompts(prompts))
        loss, count = flow_matching_loss(velocity, clean, noise)
        loss.backward()
        optimizer.step(step, scale=1.0 / float(count), loss=float(loss.detach()))
        if (step + 1) % 200 == 0:
            progress = f"loss {float(loss.detach() / count):.4f}, count and colour right {accuracy(model)}"
            print(f"step {step + 1}: {progress}, {time.process_time() - began:.0f} CPU-s", flush=True)
    return model


def main(target: Path = WEIGHTS) -> None:
    """Pretrain and write."""
    torch.set_num_threads(1)
    weights = pretrain().transformer.state_dict()
    save_file({name: value.half().contiguous() for name, value in weights.items()}, target)
    print(f"{target}: {target.stat().st_size / 1e6:.2f} MB, count and colour right {accuracy(ShapesModel(target))}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
