"""One of several ranks that hold a pipeline with a frozen expert: for `train_on_ranks`.

Each rank writes its velocities and the square of its gradient, and says how many bytes of each denoiser it holds.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from cosmos_rl.distributed.context import process_group
from cosmos_rl.distributed.sharding import local_part
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.config.ranks import with_world_size
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model

SIGMAS = (0.97, 0.92, 0.5, 0.2)
"""Two for each expert of Wan 2.2."""


def main(config_file: str, folder: str, _: str, *overrides: str) -> int:
    """Build the model, then a velocity with a gradient and one without, of this rank's own noise levels."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    config = load_config(config_file, list(overrides), fit=lambda config: with_world_size(config, ranks))
    with process_group("cpu") as context:
        model = build_model(config, context, rest_on_cpu=False)
        size = len(SIGMAS) // ranks
        own = range(context.rank * size, (context.rank + 1) * size)  # of two ranks each has rows for one expert only
        noise = torch.stack(
            [torch.randn(model.latent_shape(32, 32), generator=torch.Generator().manual_seed(i)) for i in own]
        )
        cond = model.encode_prompts([f"prompt {i}" for i in own])
        level = model.training_level(torch.tensor([SIGMAS[i] for i in own]))
        state = model.start_state(noise)
        with torch.no_grad(), model.eval_mode():
            alone = model.velocity(state, level, cond)
        velocity = model.velocity(state, level, cond)
        velocity.square().sum().backward()
        norm = sum(
            float(local_part(p.grad).square().sum()) for p in model.transformer.parameters() if p.grad is not None
        )
        found = {str(i): row.detach().clone() for i, row in zip(own, velocity, strict=True)}
        found |= {f"alone {i}": row.clone() for i, row in zip(own, alone, strict=True)}
        save_file({**found, "norm": torch.tensor(norm)}, Path(folder) / f"rank_{context.rank}.safetensors")
        for name in ("transformer", "transformer_2"):
            part = getattr(model.pipeline, name)
            held = sum(local_part(weight).nbytes for weight in part.parameters())
            trained = any(weight.requires_grad for weight in part.parameters())
            print(f"{name} holds {held} bytes trained {trained}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
