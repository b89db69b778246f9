"""Small velocity models with known answers: a mixture of Gaussians in the plane, and images of coloured squares.

Both are ``FlowModel``s, so the shipped sampler, trainer and loop drive them as they drive a pipeline.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn

from cosmos_rl.policy.config import LoraConfig
from cosmos_rl.policy.model.diffusers.cond import Cond, Negative
from cosmos_rl.policy.model.diffusers.flow_model import FlowModel
from cosmos_rl.policy.model.lora import add_adapters, initialise

TEXT = "encoder_hidden_states"


class ToyModel(FlowModel):
    """A network ``(latents, sigma, labels) -> velocity`` whose prompts are names of labels.

    ``units`` counts the network's work by itself, through hooks on the module: a row is one unit forwards, and two more
    when a gradient comes back through it.
    """

    def __init__(
        self, network: nn.Module, labels: Sequence[str], shape: tuple[int, ...], lora: LoraConfig | None = None
    ) -> None:
        self.device = torch.device("cpu")
        self.scheduler = SimpleNamespace()
        self.lora_config = lora
        self.transformer: Any = network
        self._labels = {name: i for i, name in enumerate(labels)}
        self._shape = shape
        self.units = 0
        if lora is not None:
            add_adapters(network, lora)
            initialise(network, lora, seed=0)
        network.register_forward_hook(self._count)

    def _count(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        rows = len(output)
        self.units += rows
        if output.requires_grad:
            output.register_hook(lambda _gradient: self._count_backward(rows))

    def _count_backward(self, rows: int) -> None:
        self.units += 2 * rows

    def encode_prompts(self, prompts: Sequence[str], negative: Negative = None, *, each: bool = False) -> Cond:
        """Labels int64 ``[N]``; one above the last stands for the empty prompt."""
        labels = torch.tensor([self._labels.get(prompt, len(self._labels)) for prompt in prompts])
        unconditional = None if negative is None else {TEXT: torch.full_like(labels, len(self._labels))}
        return Cond(text={TEXT: labels}, negative=unconditional)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return self._shape

    def predict(self, latents: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
        return self.transformer(latents, timestep, cond.text[TEXT])

    def timestep_from_sigma(self, sigma: Tensor) -> Tensor:
        return sigma

    def sampling_scheduler(self) -> None:
        return None

    def sampling_sigmas(self, num_steps: int, scheduler: Any = None) -> Tensor:
        return torch.linspace(1.0, 0.0, num_steps + 1)


# ---- the plane -----------------------------------------------------------------------------------------------------


class Mixture:
    """``K`` Gaussians of one deviation; everything about them is a closed form."""

    def __init__(self, means: Tensor, std: float, log_weights: Tensor | None = None) -> None:
        """``means``: ``[K, 2]``; ``log_weights``: ``[K]``, but for a constant; None: all of weight ``1 / K``."""
        self.means, self.std = means, std
        self.log_weights = torch.zeros(len(means)) if log_weights is None else log_weights

    def tilted(self, slope: Tensor) -> "Mixture":
        """The mixture times ``exp(slope . x)``."""
        means = self.means.to(slope)
        return Mixture(means + self.std**2 * slope, self.std, self.log_weights.to(slope) + means @ slope)

    def posterior(self, noised: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the clean sample given ``noised`` ``[B, 2]`` at ``sigma`` ``[B]``: weights ``[B, K]``, means ``[B, K, 2]``
        and variance ``[B]``, a mixture again."""
        t = sigma.to(noised)[:, None]
        variance = (1 - t) ** 2 * self.std**2 + t**2
        gap = noised[:, None] - (1 - t)[..., None] * self.means.to(noised)
        weights = torch.softmax(self.log_weights.to(noised) - (gap**2).sum(-1) / (2 * variance), dim=1)
        means = self.means.to(noised) + ((1 - t) * self.std**2 / variance)[..., None] * gap
        return weights, means, (self.std**2 * t**2 / variance)[:, 0]

    def velocity(self, noised: Tensor, sigma: Tensor) -> Tensor:
        """``E[noise - clean | noised]``, ``[B, 2]``."""
        t = sigma.to(noised)[:, None]
        variance = (1 - t) ** 2 * self.std**2 + t**2
        gap = noised[:, None] - (1 - t)[..., None] * self.means.to(noised)
        weights, means, _ = self.posterior(noised, sigma)
        noise = (weights[..., None] * gap).sum(1) * t / variance
        return noise - (weights[..., None] * means).sum(1)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """``[count, 2]``."""
        if self.log_weights.any():
            which = torch.multinomial(self.log_weights.softmax(0), count, replacement=True, generator=generator)
        else:
            which = torch.randint(len(self.means), (count,), generator=generator)
        return self.means[which] + self.std * torch.randn(count, 2, generator=generator)


FOUR_MODES = Mixture(math.sqrt(2.0) * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]), 0.5)
"""Radius 2, deviation 0.5."""


class PlaneNetwork(nn.Module, PeftAdapterMixin):
    """The mixture's exact velocity plus a residual that is 0 at the start."""

    def __init__(self, mixture: Mixture, hidden: int = 64) -> None:
        super().__init__()
        self._mixture = mixture
        last = nn.Linear(hidden, 2)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        layers = [nn.Linear(2 + 5, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), last]
        self.residual = nn.Sequential(*layers)

    def forward(self, latents: Tensor, sigma: Tensor, _labels: Tensor) -> Tensor:
        latents = latents.to(next(self.residual.parameters()).dtype)  # a float64 network works in float64
        t = sigma.to(latents)[:, None]
        turns = [f(k * math.pi * t) for k in (1, 2) for f in (torch.sin, torch.cos)]
        return self._mixture.velocity(latents, sigma) + self.residual(torch.cat([latents, t, *turns], dim=1))


class PlaneModel(ToyModel):
    """Points of the plane; the media are the latents themselves, float32 ``[N, 2]``."""

    def __init__(self, mixture: Mixture = FOUR_MODES, lora: LoraConfig | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(PlaneNetwork(mixture), ["a point"], (2,), lora)

    def decode(self, latents: Tensor) -> Tensor:
        return latents.float()

    def to_media(self, visuals: Tensor) -> Tensor:
        return visuals.to("cpu", torch.float32)


class TiltedNetwork(nn.Module, PeftAdapterMixin):
    """The exact velocity of the mixture times ``exp(tilt . x)``, plus a residual that knows the prompt and is 0 at the
    start. The tilt has no gradient: a teacher has one, and a student must learn what it does."""

    def __init__(self, mixture: Mixture, labels: int, hidden: int = 64) -> None:
        super().__init__()
        self._mixture, self._labels = mixture, labels
        self.tilt = nn.Parameter(torch.zeros(2))
        last = nn.Linear(hidden, 2)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        layers = [nn.Linear(2 + 5 + labels, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), last]
        self.residual = nn.Sequential(*layers)

    def forward(self, latents: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        t = sigma.to(latents)[:, None]
        turns = [f(k * math.pi * t) for k in (1, 2) for f in (torch.sin, torch.cos)]
        label = nn.functional.one_hot(labels.clamp(max=self._labels - 1), self._labels).to(latents)
        exact = self._mixture.tilted(self.tilt.detach()).velocity(latents, sigma)
        return exact + self.residual(torch.cat([latents, t, *turns, label], dim=1))


class TiltedModel(PlaneModel):
    """Points of the plane, for several prompts."""

    def __init__(self, labels: Sequence[str], seed: int = 0) -> None:
        torch.manual_seed(seed)
        ToyModel.__init__(self, TiltedNetwork(FOUR_MODES, len(labels)), labels, (2,))
