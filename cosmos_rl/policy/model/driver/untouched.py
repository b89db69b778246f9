"""Weights and random states as they are while a pipeline is checked, and as they were afterwards."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmos_rl.distributed.sharding import local_part
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.probing import Probing
from cosmos_rl.policy.model.policies import free_gathered
from cosmos_rl.policy.model.quantised import is_packed


@contextlib.contextmanager
def not_degenerate(probing: Probing) -> Iterator[None]:
    """Inside the block the denoisers' outputs follow state and prompts, so that checks can see an error.

    A model whose output layer or gates are zero says the same whatever it is asked. Noise is added to the weights that
    are all zero, to all of them if that is not enough; afterwards every bit is as before.
    """
    weights = _local_weights(probing.driver)
    zero = [name for name, weight in weights.items() if not weight.any()]
    kept: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    try:
        for group in (zero, list(weights)):
            if not _degenerate(probing):
                break
            probing.facts.perturbed = True
            with torch.no_grad():
                now = _local_weights(probing.driver)
                for name in group:
                    kept.setdefault(name, now[name].detach().clone())
                    now[name].add_(0.02 * torch.randn(now[name].shape, generator=generator).to(now[name]))
        yield
    finally:
        with torch.no_grad():
            now = _local_weights(probing.driver)
            for name, before in kept.items():
                now[name].copy_(before)


def _local_weights(driver: Driver) -> dict[str, Tensor]:
    """All weights by name but packed ones, of shards what is here; what is written to gathered ones would be lost."""
    found = {}
    for denoiser, module in driver.denoisers.items():
        free_gathered(module)
        named = ((name, weight) for name, weight in module.named_parameters() if not is_packed(weight))
        found |= {f"{denoiser}.{name}": local_part(weight) for name, weight in named}
    return found


def _degenerate(probing: Probing) -> bool:
    driver = probing.driver
    guidance = None if driver.guidance_name is None else 1.0
    cond = driver.encode(probing.prompts, guidance=guidance)
    x = probing.noise()
    level = Level(torch.tensor(500), torch.tensor(0.5))
    with torch.no_grad():
        plain = driver.velocity(x, level, cond, guidance)
        other_text = driver.velocity(x, level, cond.rows(torch.arange(cond.size).flip(0)), guidance)
        other_state = driver.velocity(probing.noise(8), level, cond, guidance)
    return torch.equal(plain, other_text) or torch.equal(plain, other_state)


@contextlib.contextmanager
def eval_mode(module: torch.nn.Module) -> Iterator[None]:
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def collect_random_states() -> list[Any]:
    numpy_state = np.random.get_state()
    numbers = [item.tolist() if isinstance(item, np.ndarray) else item for item in numpy_state]
    return [torch.get_rng_state().tolist(), numbers, random.getstate()]
