"""Coloured squares: 16 x 16 images, a prompt that says how many of which colour, and rewards that count them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.trainer.rl.guard_probe import HeldOut
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.reward import batch_reward
from tests.support.toy_models import ToyModel
from tests.support.toy_tasks import toy_trainer

COLOURS = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "magenta": (1, 0, 1),
    "cyan": (0, 1, 1),
}
COUNTS = (1, 2, 3, 4)
PROMPTS = [f"{count} {colour}" for count in COUNTS for colour in COLOURS]
RECORDS = [PromptRecord(prompt) for prompt in PROMPTS]
WEIGHTS = Path(__file__).parent / "assets" / "shapes.safetensors"
_CELLS, _CELL, _SIZE = 4, 4, 16
_PALETTE = np.array(list(COLOURS.values()), dtype=np.float64)


def draw_shapes(prompts: list[str], generator: torch.Generator) -> Tensor:
    """Images ``[N, 3, 16, 16]`` in [-1, 1]: black, with that many 3 x 3 squares in cells of a 4 x 4 grid."""
    images = -torch.ones(len(prompts), 3, _SIZE, _SIZE)
    for image, prompt in zip(images, prompts, strict=True):
        count, colour = prompt.split()
        for cell in torch.randperm(_CELLS**2, generator=generator)[: int(count)].tolist():
            y, x = cell // _CELLS * _CELL, cell % _CELLS * _CELL
            image[:, y : y + 3, x : x + 3] = 2.0 * torch.tensor(COLOURS[colour])[:, None, None] - 1.0
    return images


def held_out_shapes(count: int, seed: int = 0) -> HeldOut:
    """Real images for the guard."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    return HeldOut(draw_shapes(prompts, torch.Generator().manual_seed(seed)), tuple(prompts))


# ---- rewards -------------------------------------------------------------------------------------------------------


def _seen(media: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 ``[B, 16, 16, 3]`` -> number of squares ``[B]`` and the place of their mean colour in the palette ``[B]``,
    -1 without any square."""
    cells = media.reshape(-1, _CELLS, _CELL, _CELLS, _CELL, 3)[:, :, :3, :, :3] / 255.0
    colour = cells.mean((2, 4)).reshape(len(media), _CELLS**2, 3)
    there = colour.max(-1) > 0.5
    count = there.sum(1)
    mean = (colour * there[..., None]).sum(1) / np.maximum(count, 1)[:, None]
    nearest = ((mean[:, None] - _PALETTE) ** 2).sum(-1).argmin(1)
    return count, np.where(count > 0, nearest, -1)


def _wanted(prompts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    words = [prompt.split() for prompt in prompts]
    return np.array([int(count) for count, _ in words]), np.array([list(COLOURS).index(colour) for _, colour in words])


@batch_reward
def shapes(media: np.ndarray, prompts: list[str]) -> np.ndarray:
    """Half for the colour, half for ``1 - |error of the count| / 4``; 1 for every real image."""
    (count, colour), (wanted, right) = _seen(media), _wanted(prompts)
    return 0.5 * (colour == right) + 0.5 * np.clip(1.0 - np.abs(count - wanted) / 4.0, 0.0, 1.0)


@batch_reward
def count_right(media: np.ndarray, prompts: list[str]) -> np.ndarray:
    """Whether the number of squares is the prompt's."""
    return (_seen(media)[0] == _wanted(prompts)[0]).astype(float)


@batch_reward
def colour_right(media: np.ndarray, prompts: list[str]) -> np.ndarray:
    """Whether the colour is the prompt's."""
    return (_seen(media)[1] == _wanted(prompts)[1]).astype(float)


REWARDS = {"shapes": shapes, "count": (count_right, 0.0), "colour": (colour_right, 0.0)}
"""Trained on the first; the others are only measured."""


def shapes_tables(seed: int, steps: int, kl_beta: float) -> dict[str, Any]:
    """16 prompts x 12 samples a step, one optimiser step on them at 2 of 10 levels; 20 validation samples a prompt."""
    return {
        "train.seed": seed,
        "train.max_num_steps": steps,
        "train.train_batch_per_replica": 192,
        "train.optm_lr": 5e-4,
        "train.optm_decay_type": "linear",
        "train.optm_decay_ratio": 0.3,
        "train.optm_grad_norm_clip": 1.0,
        "train.ckpt.save_freq": 10,
        "train.train_policy.mini_batch": 192,
        "train.train_policy.kl_beta": kl_beta,
        "train.train_policy.reward_hacking_guard.enable": True,
        "train.train_policy.reward_hacking_guard.action": "stop",
        "rollout.n_generation": 12,
        "rollout.batch_size": 16,
        "policy.diffusers.timesteps_fraction": 0.2,
        "policy.diffusers.sample.eval_num_steps": 20,
        "validation.enable": True,
        "validation.val_before_train": True,
        "validation.freq": 5,
        "validation.n_generation": 20,
    }


# ---- the model -----------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    """Attention and MLP; shifts, scales and gates are the shared modulation plus the block's own table."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.table = nn.Parameter(torch.zeros(6, width))

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """``x`` ``[B, L, D]``, ``modulation`` ``[B, 6, D]``."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (modulation + self.table).unsqueeze(2).unbind(1)
        b, length, width = x.shape
        qkv = self.qkv(self.norm(x) * (1 + scale) + shift).reshape(b, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, length, width)
        x = x + gate * self.out(attended)
        return x + gate_mlp * self.mlp(self.norm(x) * (1 + scale_mlp) + shift_mlp)


class ShapesNetwork(nn.Module):
    """A small diffusion transformer: one token per cell."""

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        patch = 3 * _CELL**2
        self.embed = nn.Linear(patch, width)
        self.place = nn.Parameter(0.02 * torch.randn(_CELLS**2, width))
        self.label = nn.Embedding(len(PROMPTS) + 1, width)
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.modulation = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.last = nn.Linear(width, patch)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, latents: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """Velocity ``[B, 3, 16, 16]``."""
        b = len(latents)
        cells = latents.reshape(b, 3, _CELLS, _CELL, _CELLS, _CELL).permute(0, 2, 4, 1, 3, 5).reshape(b, _CELLS**2, -1)
        rates = torch.exp(torch.linspace(0.0, math.log(1000.0), 32))
        angles = sigma[:, None] * rates
        about = self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.label(labels)
        modulation = self.modulation(nn.functional.silu(about)).reshape(b, 6, -1)
        x = self.embed(cells) + self.place
        for block in self.blocks:
            x = block(x, modulation)
        out = self.last(self.norm(x)).reshape(b, _CELLS, _CELLS, 3, _CELL, _CELL)
        return out.permute(0, 3, 1, 4, 2, 5).reshape(b, 3, _SIZE, _SIZE)


class ShapesModel(ToyModel):
    """Pixels in [-1, 1] are the latents."""

    def __init__(self, weights: Path | None = WEIGHTS) -> None:
        """``weights``: of `tests/support/assets/make_shapes.py`; None: untrained."""
        network = ShapesNetwork()
        if weights is not None:
            network.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
        super().__init__(network, PROMPTS, (3, _SIZE, _SIZE))

    def decode(self, latents: Tensor) -> Tensor:
        return (latents.float() / 2 + 0.5).clamp(0.0, 1.0)


def shapes_trainer(config: Config) -> OnlineTask:
    """The shipped trainer on the network that miscounts, with real images for the guard."""
    return toy_trainer(config, ShapesModel(), RECORDS, reward_fns=REWARDS, held_out=held_out_shapes(32))
