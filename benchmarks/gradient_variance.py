"""How noisy are the gradients of the online algorithms, for what they cost? (`python -m benchmarks.gradient_variance`)

On the plane of `tests/support/toy_tasks.py` the policy stands still: each algorithm's own object computes the gradients
of many training steps, each from samples of its own, and none is applied. Printed are, of the gradient of one sample:
the trace of its covariance over the squared norm of its mean, which no scale of loss or reward changes; network
evaluations, a backward pass counted as two; and their product, the evaluations after which a mean gradient has as much
noise as signal.
"""

import argparse
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import POINT, bump, plane_tables, toy_config, toy_trainer

SEEDS = (0, 1, 2)
SAMPLES = 128
"""Of a training step; a gradient is their mean."""
STEPS = 100
"""Training steps, a gradient each."""
LEVELS = 10
_JOB = "train.train_policy."
_COMMON: Mapping[str, Any] = {
    "train.train_batch_per_replica": SAMPLES,
    "rollout.n_generation": SAMPLES,
    _JOB + "mini_batch": SAMPLES,
    _JOB + "batch_size_per_optimize": SAMPLES,
    _JOB + "kl_beta": 0.0,
}
_SDE = {
    _JOB + "trainer_type": "flow_grpo",
    _JOB + "on_policy": True,
    "policy.diffusers.sample": {"num_steps": LEVELS, "guidance_scale": 1.0, "solver": "flow", "noise_level": 0.7},
}


def _forward(trainer: str, levels: int = 1, **more: Any) -> dict[str, Any]:
    return {_JOB + "trainer_type": trainer, "policy.diffusers.timesteps_fraction": levels / LEVELS, **more}


ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "SDE log-probability (FlowGRPO), 9 steps": {**_SDE, "policy.diffusers.timesteps_fraction": 0.9},
    "the same, 1 random step": {
        **_SDE,
        "policy.diffusers.timesteps_fraction": 0.1,
        _JOB + "steps": {"choose": "random"},
    },
    "the same, a window of 2 (Fast)": {
        **_SDE,
        _JOB + "steps": {"choose": "window", "size": 2, "within": 0.5, "elsewhere": "euler"},
    },
    "ELBO (EPG), 1 noise level": _forward("epg"),
    "NFT, 1 noise level": _forward("diffusion_nft"),
    "NFT, 4 noise levels": _forward("diffusion_nft", 4),
    "NFT, 4 even noise levels": _forward("diffusion_nft", 4, **{"policy.diffusers.even_levels": True}),
    "AWM, 1 noise level": _forward("awm"),
}


@dataclass(frozen=True)
class Noise:
    """Of the gradient of one sample: the noise of a step's mean, times the number of its samples."""

    variance: float
    """Trace of the covariance over the squared norm of the mean."""
    evaluations: float

    @property
    def product(self) -> float:
        """Evaluations after which a mean gradient has as much noise as signal."""
        return self.variance * self.evaluations


def estimate_moments(gradients: Tensor) -> tuple[float, float]:
    """Trace of the covariance, and squared norm of the mean, of independent gradients ``[R, D]``.

    Both are without bias: the squared norm of the mean of ``R`` is too large by ``1 / R`` of the trace.
    """
    gradients = gradients.double()
    trace = float(gradients.var(dim=0).sum())
    return trace, float((gradients.mean(dim=0) ** 2).sum()) - trace / len(gradients)


def relative_variance(gradients: Tensor) -> float:
    """Trace of the covariance over the squared norm of the mean; infinite where no mean is seen in the noise."""
    trace, squared = estimate_moments(gradients)
    if squared <= 0.0:
        return math.inf
    return trace / squared


def measure(tables: Mapping[str, Any], seed: int, steps: int = STEPS) -> Noise:
    """Of a policy that differs from the base by random weights of this seed."""
    config = toy_config({**plane_tables(seed, steps), **_COMMON, **tables})
    model = PlaneModel(seed=seed)
    last = model.transformer.residual[-1].weight
    torch.nn.init.normal_(last, std=0.1, generator=torch.Generator().manual_seed(seed))
    task = toy_trainer(config, model, [POINT], reward_fns={"bump": bump})
    rows = []
    for step in range(steps):
        ((gradient,), _) = task.compute_gradients(step)
        rows.append(torch.cat([gradient[name].flatten() for name in sorted(gradient)]))
    return Noise(SAMPLES * relative_variance(torch.stack(rows)), model.units / (SAMPLES * steps))


def table_row(name: str, found: Sequence[Noise]) -> str:
    """Means over the seeds, and their range."""

    def over(values: Sequence[float], digits: int) -> str:
        mean, least, most = (f"{one:,.{digits}f}" for one in (statistics.mean(values), min(values), max(values)))
        return f"{mean} ({least} ... {most})"

    variances, products = over([one.variance for one in found], 1), over([one.product for one in found], 0)
    return f"| {name} | {variances} | {found[0].evaluations:.0f} | {products} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Variance of the gradients of the online algorithms on the plane.")
    parser.add_argument("--steps", type=int, default=STEPS, help="gradients of each algorithm and seed")
    parser.add_argument("--only", default="", help="algorithms whose name holds this")
    given = parser.parse_args()
    if given.steps < 2:
        parser.error(f"--steps: found {given.steps}; allowed: 2 or more, as a variance compares gradients")
    logging.getLogger("cosmos").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(
        "| gradient | variance of a sample | evaluations of a sample | product |",
        "|---" * 4 + "|",
        sep="\n",
        flush=True,
    )
    for name, tables in ALGORITHMS.items():
        if given.only.lower() in name.lower():
            print(table_row(name, [measure(tables, seed, given.steps) for seed in SEEDS]), flush=True)


if __name__ == "__main__":
    main()
