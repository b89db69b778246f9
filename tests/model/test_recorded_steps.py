"""Flow-GRPO on every family: training at a recorded state computes what the rollout computed there, bit for bit.

In bfloat16 LTX converts states for the scheduler's step alone, so a recorded one has lost its last bits.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cosmos_rl.algorithms.flow_grpo import StepRows, TrustRegion, flow_grpo_loss
from cosmos_rl.diffusion.step_recorder import StepRecorder
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model
from tests.support.family_runs import PARAMS, TEXTS, DrivenSD3, TrainedFamily, family_toml

TRANSITIONS = {"flow": 0.7, "flow_linear": 0.7, "dance": 0.3, "ddim": 0.7, "cps": 0.8, "1euler": 1.0, "2ab": 1.0}
"""Solvers and their noise."""
STEPS = 5
MOST = {"float32": 0.0, "bfloat16": 1e-3}
"""Deviation of the ratio from 1."""


@pytest.fixture(autouse=True)
def drive_sd3(use_model: Callable[[type], type]) -> None:
    use_model(DrivenSD3)


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [
        pytest.param(True, "float32", id="lora-float32"),
        pytest.param(False, "bfloat16", id="full-bfloat16"),
        pytest.param(False, "float32", id="full-float32", marks=pytest.mark.zoo),
        pytest.param(True, "bfloat16", id="lora-bfloat16", marks=pytest.mark.zoo),
    ],
)
@pytest.mark.parametrize("family", PARAMS)
def test_the_ratio_is_1_for_every_transition(tmp_path: Path, family: TrainedFamily, lora: bool, dtype: str) -> None:
    config = load_config(family_toml(tmp_path, family, job="nft", lora=lora), [f"--train.param_dtype={dtype}"])
    model = build_model(config, Context(torch.device("cpu")), rest_on_cpu=False)
    cond = model.encode_prompts(TEXTS)
    for solver, noise_level in TRANSITIONS.items():
        settings = {"noise_level": noise_level, "deterministic": False}
        recorder = StepRecorder((0, 2), keep_velocity=True)
        generators = [torch.Generator().manual_seed(row) for row in range(len(TEXTS))]
        size = {"height": 32, "width": 32, "output_type": "latent", "keep_trajectory": False}
        with model.eval_mode():
            model.rollout(
                cond, generators, num_inference_steps=STEPS, solver=solver, recorder=recorder, **settings, **size
            )
            recorded = recorder.recorded()
            levels, _ = model.transitions(solver, model.sampling_levels(STEPS), **settings)
            for column, index in enumerate((0, 2)):
                kept = {name: value[:, column] for name, value in recorded.items()}
                level = levels.rows(index).expand(len(TEXTS))
                velocity = model.velocity(kept["state"], level, cond)
                assert velocity.requires_grad
                steps = StepRows(kept["g"], kept["s"], level.sigma, kept["next"])
                _, terms = flow_grpo_loss(
                    velocity, kept["velocity"], kept["noise"], steps, torch.ones(len(TEXTS)), region=TrustRegion()
                )
                assert float(kept["velocity"].abs().max()) > 1e-3
                assert float(terms["ratio_deviation"].max()) <= MOST[dtype], (solver, index)
