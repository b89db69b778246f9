"""A rollout with EDM's sampler: the model is called at the raised sigmas, and the states are those of the kernel."""

import torch
from torch import Tensor, nn

from cosmos_rl.diffusion.churn import build_transitions
from cosmos_rl.diffusion.kernels import transition_log_prob
from tests.support.toy_models import ToyModel


class Recording(nn.Module):
    """A velocity that bends, and where it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.sigmas: list[float] = []
        self.velocities: list[Tensor] = []

    def forward(self, latents: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        self.sigmas.append(float(sigma[0]))
        self.velocities.append(torch.sin(3 * latents) + sigma[:, None] * latents)
        return self.velocities[-1]


class Plane(ToyModel):
    """Latents are the media."""

    def decode(self, latents: Tensor) -> Tensor:
        return latents


def rollout(network: Recording, solver: str, *, deterministic: bool) -> tuple[list[Tensor], list[Tensor] | None]:
    model = Plane(network, ["a"], (4,))
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    _, states, log_probs = model.rollout(
        model.encode_prompts(["a"] * 3),
        generators,
        height=1,
        width=1,
        num_inference_steps=6,
        solver=solver,
        noise_level=0.5,
        deterministic=deterministic,
        output_type="latent",
    )
    return states, log_probs


def test_a_rollout_is_taken_at_the_raised_sigmas_and_its_log_probabilities_are_those_of_its_steps() -> None:
    network = Recording()
    states, log_probs = rollout(network, "2ab", deterministic=False)
    own = torch.linspace(1, 0, 7)
    grid, kernel = build_transitions("2ab", own, noise_level=0.5, deterministic=False)
    assert network.sigmas == grid[:-1].float().tolist()
    assert [i for i in range(6) if network.sigmas[i] > float(own[i])] == [1, 2, 3, 4]  # 1 is an infinite sigma of EDM's
    assert log_probs is not None
    assert len(log_probs) == 4
    levels = grid.float().double().tolist()
    history = None
    for index, recorded in enumerate(log_probs):
        step = kernel(index, levels)
        again = transition_log_prob(states[index + 1], states[index], network.velocities[index], step, history)
        torch.testing.assert_close(again, recorded, rtol=1e-6, atol=1e-6)
        history = states[index] - levels[index] * network.velocities[index]


def test_without_noise_it_is_taken_at_the_models_own_sigmas() -> None:
    network = Recording()
    _, log_probs = rollout(network, "2ab", deterministic=True)
    assert network.sigmas == torch.linspace(1, 0, 7)[:-1].tolist()
    assert log_probs is None
