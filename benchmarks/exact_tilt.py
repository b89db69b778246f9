"""Do the losses on sampling steps reach the optimum that theory gives them? (`python -m benchmarks.exact_tilt`)

The optimum of a reward with a KL penalty is the base times ``exp(reward / temperature)``. On the plane of
`tests/support/toy_tasks.py` it is known. Two objectives have it exactly: the reverse KL divergence of whole paths, with
the divergence of all later steps in the return of each step; and DDRL's, with the exponential transform and the forward
divergence of paths from data. Both need every step with noise trained, and for the marginal's sake noise without
memory, ``sigma = sqrt(2 t / (1 - t))``. For an unbounded reward on few steps the optimum of what Gaussian steps can do
is computed beside it (`benchmarks/gaussian_optimum.py`).
"""

import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from benchmarks.gaussian_optimum import Optimum, find_optimum, mixture_velocity
from cosmos_rl.algorithms.flow_grpo import StepRows, TrustRegion, flow_grpo_loss, step_divergence
from cosmos_rl.diffusion.kernels import build_kernel
from cosmos_rl.diffusion.sampling import run_sampling
from cosmos_rl.diffusion.step_recorder import StepRecorder
from tests.support.toy_models import FOUR_MODES, PlaneModel
from tests.support.toy_tasks import POINT, base_and_tilt, bump, mmd2, plane_samples, rightwards

MEMORYLESS = math.sqrt(2.0)
SEEDS = (0, 1, 2)
Row = tuple[str, str, str]
RewardFn = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Exact:
    """A run."""

    reward: RewardFn
    temperature: float
    num_steps: int
    iterations: int
    noise_level: float = MEMORYLESS
    ddrl: bool = False
    batch: int = 512
    learning_rate: float = 1e-2
    passes: int = 1
    """Optimiser steps on each batch of paths."""
    region: TrustRegion = field(default_factory=TrustRegion)
    """Of the ratios after the first pass."""

    @functools.cached_property
    def sigmas(self) -> Tensor:
        """``[S + 1]``."""
        return torch.linspace(1.0, 0.0, self.num_steps + 1)


@dataclass(frozen=True)
class Paths:
    """Samples ``[N, 2]``, and the ``K`` steps with noise by which they were made, below each other: ``[K N]`` rows."""

    clean: Tensor
    state: Tensor
    noise: Tensor
    steps: StepRows


@torch.no_grad()
def sample(model: PlaneModel, task: Exact, count: int, generator: torch.Generator) -> Paths:
    """By the sampler with noise."""
    recorder = StepRecorder(range(task.num_steps - 1), keep_velocity=False)
    kernel = recorder.restrict(build_kernel("flow", noise_level=task.noise_level, deterministic=False))
    cond = model.encode_prompts([POINT.prompt] * count)
    made = run_sampling(
        lambda latents, sigma: model.velocity(latents, model.training_level(sigma), cond),
        torch.randn(count, 2, generator=generator),
        task.sigmas,
        kernel=kernel,
        step_fn=recorder.wrap(functools.partial(model.sde_step_with_logprob, kernel=kernel)),
        noise_fn=lambda _: torch.randn(count, 2, generator=generator),
    )
    kept = {name: value.transpose(0, 1).flatten(0, 1) for name, value in recorder.recorded().items()}
    sigma = task.sigmas[kept["step"]]
    return Paths(made.latents, kept["state"], kept["noise"], StepRows(kept["g"], kept["s"], sigma, kept["next"]))


def train(task: Exact, seed: int = 0) -> PlaneModel:
    """``passes`` optimiser steps for each batch of whole paths."""
    model, generator = PlaneModel(seed=seed), torch.Generator().manual_seed(seed)
    params = list(model.transformer.residual.parameters())
    optimizer = torch.optim.Adam(params, lr=task.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.iterations)
    pool = torch.from_numpy(task.reward(FOUR_MODES.draw(200_000, torch.Generator().manual_seed(1)).numpy()))
    normaliser = task.temperature * float(torch.logsumexp(pool / task.temperature, 0) - math.log(len(pool)))
    for _ in range(task.iterations):
        paths = sample(model, task, task.batch, generator)
        reward = torch.from_numpy(task.reward(paths.clean.numpy())).float()
        old: Tensor | None = None
        for _ in range(task.passes):
            velocity = ask(model, paths.state, paths.steps)
            old = velocity.detach() if old is None else old
            loss = path_loss(task, paths, velocity, old, (reward - normaliser) / task.temperature)
            if task.ddrl:
                loss = loss + data_divergence(model, task, paths.steps, generator)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, 5.0)
            optimizer.step()
        schedule.step()
    return model


def path_loss(task: Exact, paths: Paths, velocity: Tensor, old: Tensor, tilt_B: Tensor) -> Tensor:
    """The negative policy gradient of whole paths, per sample; with the reverse KL divergence unless DDRL's data term
    takes its place."""
    steps, (count, size) = paths.steps, paths.clean.shape
    noisy = len(paths.state) // count
    if task.ddrl:
        value_B = -torch.exp(-tilt_B)
        advantage, divergence = (value_B - value_B.mean()).repeat(noisy), torch.zeros(())
    else:
        base = FOUR_MODES.velocity(paths.state, steps.sigma_B)
        kl = size * step_divergence(velocity, base, steps).reshape(noisy, count)
        later = kl.detach().flip(0).cumsum(0).flip(0) - kl.detach()
        returns = tilt_B - later
        advantage, divergence = (returns - returns.mean(1, keepdim=True)).flatten(), kl.sum() / count
    policy, _ = flow_grpo_loss(velocity, old, paths.noise, steps, advantage, region=task.region)
    return size * policy / count + divergence


def data_divergence(model: PlaneModel, task: Exact, steps: StepRows, generator: torch.Generator) -> Tensor:
    """``KL(paths from data, paths of the policy)`` but for a constant: flow matching at the trained steps, each with
    its own weight ``g^2 / (2 s^2)``."""
    times = len(steps.sigma_B) // task.batch
    clean = FOUR_MODES.draw(task.batch, generator).repeat(times, 1)
    noise, sigma = torch.randn(clean.shape, generator=generator), steps.sigma_B[:, None]
    velocity = ask(model, (1 - sigma) * clean + sigma * noise, steps)
    return 2 * step_divergence(velocity, noise - clean, steps).sum() / task.batch


def ask(model: PlaneModel, state: Tensor, steps: StepRows) -> Tensor:
    """Velocities of the policy."""
    level = model.training_level(steps.sigma_B)
    return model.velocity(state, level, model.encode_prompts([POINT.prompt] * len(state)))


def bounded(what: str, task: Exact, target: str) -> Row:
    """Distance to the optimum over three seeds, by the sampler of training and by the ODE."""
    began = time.process_time()
    _, tilt = base_and_tilt(2000)
    found: dict[str, list[tuple[float, float]]] = {"same SDE": [], "ODE": []}
    for seed in SEEDS:
        model = train(task, seed)
        own = sample(model, task, 2000, torch.Generator().manual_seed(5)).clean
        for name, samples in (("same SDE", own), ("ODE", plane_samples(model, 2000))):
            found[name].append((float(task.reward(samples.numpy()).mean()), mmd2(samples, tilt)))
    spent = (time.process_time() - began) / len(SEEDS)
    texts = [
        f"{name} E[r] {' '.join(f'{reward:.3f}' for reward, _ in values)},"
        f" MMD2 {' '.join(f'{distance:.3f}' for _, distance in values)}"
        for name, values in found.items()
    ]
    return what, f"{'; '.join(texts)}; {spent:.0f} CPU-s a seed", target


def unbounded(noise_level: float, num_steps: int, iterations: int) -> Row:
    """A linear reward: expected reward and share on the right side, beside the optimum of Gaussian steps."""
    task = Exact(rightwards, 2.0, num_steps, iterations, noise_level)
    began = time.process_time()
    found = [
        sample(train(task, seed), task, 8000, torch.Generator().manual_seed(5)).clean[:, 0].double() for seed in SEEDS
    ]
    spent = (time.process_time() - began) / len(SEEDS)
    text = (
        f"E[r] {' '.join(f'{float(x.mean()):.3f}' for x in found)},"
        f" right {' '.join(f'{float((x > 0).double().mean()):.3f}' for x in found)}"
    )
    what = f"linear reward, a = {noise_level:.2f}, {num_steps} steps"
    return what, f"{text}; {spent:.0f} CPU-s a seed", f"{optimum_of_steps(task).reward:.3f} within 5 % (tilt: .986)"


def optimum_of_steps(task: Exact) -> Optimum:
    """The best that steps of the task's sampler can do for the linear reward; the plane's mixture is the product of
    two equal ones, and the reward reads one coordinate."""
    kernel = build_kernel("flow", noise_level=task.noise_level, deterministic=False)
    velocity = mixture_velocity(float(FOUR_MODES.means[0, 0]), FOUR_MODES.std)
    return find_optimum(kernel, task.sigmas.double().tolist(), velocity, task.temperature)


def measure() -> list[Row]:
    """Rows (what, result, target)."""
    exact = Exact(bump, 0.25, 20, 500)
    return [
        bounded("bounded reward, reverse KL", exact, "E[r] .778 within 10 %, MMD2 <= 0.03 (same SDE)"),
        bounded("bounded reward, DDRL, exponential", Exact(bump, 0.25, 20, 500, ddrl=True), "within 5 %, MMD2 <= 0.06"),
        unbounded(0.7, 10, 800),
        unbounded(MEMORYLESS, 10, 800),
        unbounded(0.7, 40, 800),
        unbounded(MEMORYLESS, 40, 800),
    ]


def main() -> None:
    """Measure and print."""
    logging.getLogger("cosmos").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for what, result, target in measure():
        print(f"{what:42}  {result}  target {target}", flush=True)


if __name__ == "__main__":
    main()
