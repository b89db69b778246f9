"""All online algorithms on one task with a known optimum, at equal budgets (`python -m benchmarks.algorithms`).

The plane of `tests/support/toy_tasks.py`: four Gaussians, a bounded reward, the KL-regularised optimum in closed form.
A budget is network evaluations per sample slot over the whole run, a backward pass counted as two. Samples are
measured by 40 steps of the ODE, the sampler of deployment, and by the sampler of training. Below the table: the exact
forms of the objectives on sampling steps (`benchmarks/exact_tilt.py`).
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import exact_tilt
from tests.support.toy_models import FOUR_MODES, PlaneModel
from tests.support.toy_tasks import (
    POINT,
    PlaneResult,
    base_and_tilt,
    bump,
    measure_plane,
    mmd2,
    plane_task,
)

SEEDS = (0, 1, 2)
BUDGET = 4500
LOOKS = 6
"""Measurements in a run, for the curves."""
_JOB = "train.train_policy."
_SDE = {"num_steps": 10, "guidance_scale": 1.0, "solver": "flow", "noise_level": 0.7}
_CPS = {**_SDE, "solver": "cps", "noise_level": 0.8}
_STEPS: Mapping[str, Any] = {
    "policy.diffusers.sample": _SDE,
    "policy.diffusers.timesteps_fraction": 0.9,
    _JOB + "mini_batch": 512,
    _JOB + "batch_size_per_optimize": 512,
    _JOB + "kl_beta": 0.0,
}
_WINDOW = {_JOB + "steps": {"choose": "window", "size": 2, "within": 0.5, "elsewhere": "euler"}}
_FOUR_PASSES = {
    _JOB + "mini_batch": 512,
    _JOB + "batch_size_per_optimize": 512,
    _JOB + "mu_iterations": 4,
    "policy.diffusers.timesteps_fraction": 0.1,
}
_CENTRED = {**_FOUR_PASSES, _JOB + "advantage_temperature": 0.2, "policy.diffusers.weight_copy_decay_type": 0}

ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "NFT": {**_FOUR_PASSES, _JOB + "trainer_type": "diffusion_nft", _JOB + "kl_beta": 0.0},
    "NFT, KL .3": {**_FOUR_PASSES, _JOB + "trainer_type": "diffusion_nft"},
    "EPG, KL .3": {**_CENTRED, _JOB + "trainer_type": "epg"},
    "PEPG, KL .3": {**_CENTRED, _JOB + "trainer_type": "pepg"},
    "AWM, KL .3": {**_FOUR_PASSES, _JOB + "trainer_type": "awm"},
    "FlowGRPO": {**_STEPS, _JOB + "trainer_type": "flow_grpo", _JOB + "epsilon_low": 0.05},
    "FlowGRPO, KL .04": {
        **_STEPS,
        _JOB + "trainer_type": "flow_grpo",
        _JOB + "epsilon_low": 0.05,
        _JOB + "kl_beta": 0.04,
    },
    "Fast (window of 2)": {**_STEPS, **_WINDOW, _JOB + "trainer_type": "flow_grpo", _JOB + "epsilon_low": 0.05},
    "CPS": {
        **_STEPS,
        "policy.diffusers.sample": _CPS,
        _JOB + "trainer_type": "flow_grpo",
        _JOB + "epsilon_low": 0.05,
    },
    "Guard": {
        **_STEPS,
        _JOB + "trainer_type": "flow_grpo",
        _JOB + "logprob_weight": "guard",
        _JOB + "epsilon_low": 0.02,
    },
    "DPPO, 2 passes": {
        **_STEPS,
        **_WINDOW,
        _JOB + "trainer_type": "flow_grpo",
        _JOB + "kl_mask_threshold": 1e-3,
        _JOB + "mu_iterations": 2,
    },
    "DDRL, data .1": {
        **_STEPS,
        **_WINDOW,
        _JOB + "trainer_type": "ddrl",
        _JOB + "epsilon_low": 0.05,
        _JOB + "advantage_transform": "centred_exp_reward",
        _JOB + "data_term": {"beta": 0.1, "local_dir": "the mixture", "batch_size": 512},
    },
}


@dataclass(frozen=True)
class Look:
    """A run after so many evaluations."""

    nfe: float
    reward: float
    to_tilt: float
    to_base: float
    loss_ratio: float
    """Flow-matching loss on points of the mixture, as a multiple of that at the start."""
    norm_ratio: float
    """Root mean square of the velocities there, as a multiple of that at the start."""


@dataclass(frozen=True)
class Outcome:
    """A whole run; distances are squared maximum mean discrepancies."""

    looks: tuple[Look, ...]
    own_sampler: PlaneResult
    """By the sampler of training in place of the ODE."""
    seconds: float
    """CPU seconds of training alone."""


def run(tables: Mapping[str, Any], seed: int, budget: int = BUDGET) -> Outcome:
    """Train until the budget is spent."""
    task, model = plane_task(seed, 100_000, tables)
    looks, spent, nfe, step = [look(model, 0.0)], 0.0, 0.0, 0
    task.start(0)
    while nfe < budget:
        began = time.process_time()
        nfe = task.train_step(step).metrics["train/nfe"] / 512
        spent += time.process_time() - began
        step += 1
        if nfe >= budget * len(looks) / LOOKS:
            looks.append(look(model, nfe))
    sample = task._config.policy.diffusers.sample
    return Outcome(tuple(looks), measure_own(model, sample), spent)


@torch.no_grad()
def look(model: PlaneModel, nfe: float) -> Look:
    """Measure now."""
    end = measure_plane(model)
    generator = torch.Generator().manual_seed(7)
    clean, noise = FOUR_MODES.draw(4000, generator), torch.randn(4000, 2, generator=generator)
    sigma = torch.rand(4000, generator=generator) * 0.98 + 0.01
    noised = (1 - sigma)[:, None] * clean + sigma[:, None] * noise
    velocity = model.velocity(noised, model.training_level(sigma), model.encode_prompts([POINT.prompt] * 4000))
    exact = FOUR_MODES.velocity(noised, sigma)
    losses = [float(((v - (noise - clean)) ** 2).mean()) for v in (velocity, exact)]
    norms = [float((v**2).mean().sqrt()) for v in (velocity, exact)]
    return Look(nfe, end.reward, end.to_tilt, end.to_base, losses[0] / losses[1], norms[0] / norms[1])


@torch.no_grad()
def measure_own(model: PlaneModel, sample: Any, count: int = 2000) -> PlaneResult:
    """Like `measure_plane`, by the sampler of training."""
    generators = [torch.Generator().manual_seed(k) for k in range(count)]
    samples: Tensor = model.rollout(
        model.encode_prompts([POINT.prompt] * count),
        generators,
        height=16,
        width=16,
        num_inference_steps=sample.num_steps,
        solver=sample.solver,
        noise_level=sample.noise_level,
        deterministic=sample.deterministic_sampling,
        output_type="latent",
    )[1][-1]
    base, tilt = base_and_tilt(count)
    return PlaneResult(float(bump(samples.numpy()).mean()), mmd2(samples, tilt), mmd2(samples, base))


HEADER = (
    "| algorithm | E[r] (optimum .778) | MMD² to the optimum | MMD² to the base | E[r], MMD² by the training sampler "
    "| loss ratio | velocity norm | evaluations | CPU s |"
)


def table_row(name: str, outcomes: Sequence[Outcome]) -> str:
    """Means over the seeds, and the range of the first two."""

    def over(values: Sequence[float]) -> str:
        return f"{statistics.mean(values):.3f} ({min(values):.3f} ... {max(values):.3f})"

    last = [outcome.looks[-1] for outcome in outcomes]
    own = [outcome.own_sampler for outcome in outcomes]
    cells = [
        name,
        over([one.reward for one in last]),
        over([one.to_tilt for one in last]),
        f"{statistics.mean(one.to_base for one in last):.2f}",
        f"{statistics.mean(one.reward for one in own):.3f}, {statistics.mean(one.to_tilt for one in own):.3f}",
        f"{statistics.mean(one.loss_ratio for one in last):.2f}",
        f"{statistics.mean(one.norm_ratio for one in last):.2f}",
        f"{statistics.mean(one.nfe for one in last):.0f}",
        f"{statistics.mean(outcome.seconds for outcome in outcomes):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, and write the curves where ``--out`` says."""
    parser = argparse.ArgumentParser(description="All online algorithms on the plane.")
    parser.add_argument("--budget", type=int, default=BUDGET, help="network evaluations per sample slot")
    parser.add_argument("--only", default="", help="algorithms whose name holds this")
    parser.add_argument("--out", type=Path, help="a JSON file for the curves")
    given = parser.parse_args()
    logging.getLogger("cosmos").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(HEADER, "|---" * 9 + "|", sep="\n", flush=True)
    curves = {}
    for name, tables in ALGORITHMS.items():
        if given.only.lower() not in name.lower():
            continue
        outcomes = [run(tables, seed, given.budget) for seed in SEEDS]
        print(table_row(name, outcomes), flush=True)
        curves[name] = [[asdict(one) for one in outcome.looks] for outcome in outcomes]
    if not given.only:
        exact_tilt.main()
    if given.out is not None:
        given.out.write_text(json.dumps(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
