"""Every online algorithm, ended in the middle of its schedules and resumed, is the undisturbed run, bit for bit.

On the plane, by the shipped loop; pipelines, real samples and kills are in `test_nft_resume.py`, `test_kills.py` and
`test_flow_grpo_pipeline.py`."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl.checkpoint import layout
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.trainer.loop import TrainLoop
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.reward import batch_reward
from cosmos_rl.storage import run_folder
from tests.support.states import assert_same_state, drop_steps_after, saved_state
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import POINT, Never, bump, metrics_of, plane_data_loss, toy_config, toy_trainer

JOB = "train.train_policy."
LORA = {"r": 4, "lora_alpha": 8.0, "lora_names": ["default", "old"], "init_lora_weights": "gaussian"}
FLOW: dict[str, Any] = {
    "policy.diffusers.sample": {
        "num_steps": 8,
        "guidance_scale": 1.0,
        "solver": "flow",
        "deterministic_sampling": False,
        "noise_level": 0.7,
    },
    JOB + "epsilon_low": 0.05,
}
WINDOW = {JOB + "steps": {"choose": "window", "size": 2, "order": "progressive", "interval": 2}}
MOVING = {JOB + "kl_beta": 0.1, JOB + "reference_reset_interval": 4, JOB + "reset_optimizer_with_reference": True}
JOBS: dict[str, dict[str, Any]] = {
    "flow_grpo, moving reference": {**FLOW, **MOVING, JOB + "trainer_type": "flow_grpo"},
    "flow_grpo, reference by distance": {
        **FLOW,
        JOB + "kl_beta": 0.1,
        JOB + "reference_reset_kl": 2e-4,
        JOB + "reference_reset_interval": 4,
        JOB + "trainer_type": "flow_grpo",
    },
    "flow_grpo, moving window": {
        **FLOW,
        **WINDOW,
        JOB + "trainer_type": "flow_grpo",
        JOB + "batch_size_per_optimize": 8,
        "policy.diffusers.weight_copy_decay_type": 1,
    },
    "flow_grpo, decaying window": {
        **FLOW,
        JOB + "steps": {"choose": "window", "size": 2, "order": "decay", "interval": 3},
        JOB + "trainer_type": "flow_grpo",
        JOB + "on_policy": True,
    },
    "flow_grpo, exponentially decaying window that stays": {  # at steps 0, 1, 2 for 2, 2, 1 training steps
        **FLOW,
        JOB + "steps": {
            "choose": "window",
            "size": 2,
            "within": 0.5,
            "order": "exp_decay",
            "interval": 2,
            "decay_rate": 0.7,
            "decay_threshold": 1,
            "roll_back": False,
        },
        JOB + "trainer_type": "flow_grpo",
    },
    "flow_grpo, random steps in a list": {
        **FLOW,
        JOB + "steps": {"choose": "list", "indices": [0, -1, -1]},
        JOB + "trainer_type": "flow_grpo",
        "rollout.n_generation_mini_batch": 4,
    },
    "ddrl": {
        **FLOW,
        **WINDOW,
        JOB + "trainer_type": "ddrl",
        JOB + "advantage_transform": "centred_exp_reward",
        JOB + "data_term": {"beta": 0.5, "local_dir": "made by the test", "batch_size": 8},
    },
    "flow_grpo, gated": {
        **FLOW,
        JOB + "trainer_type": "flow_grpo",
        JOB + "kl_beta": 0.1,
        JOB + "kl_gate": {"rewards": ["auxiliary"], "share": 0.2},
        JOB + "diversity_features": "tests.rl.test_resume_of_every_algorithm:points",
    },
    "diffusion_nft": {JOB + "kl_beta": 0.1, "policy.diffusers.weight_copy_decay_type": 1},
    "diffusion_nft, schedule-free": {
        **MOVING,
        "policy.diffusers.weight_copy_decay_type": 1,
        "train.optm_name": "AdamWScheduleFree",
    },
    "epg": {**MOVING, JOB + "trainer_type": "epg", JOB + "advantage_temperature": 10.0},
    "pepg": {JOB + "trainer_type": "pepg", JOB + "kl_beta": 0.3, "policy.diffusers.weight_copy_decay_type": 2},
    "par": {JOB + "trainer_type": "par", "policy.diffusers.weight_copy_decay_type": 1},
    "awm": {JOB + "trainer_type": "awm", JOB + "kl_beta": 0.1, "policy.diffusers.weight_copy_decay_type": 1},
    "online_dpo": {
        **MOVING,
        JOB + "trainer_type": "online_dpo",
        JOB + "dpo_auto_beta": {"target_factor": 0.2, "least": 0.01},
        "policy.diffusers.weight_copy_decay_type": 0,
    },
}
TOTAL, ENDED = 6, 3


@batch_reward
def auxiliary(media: np.ndarray) -> np.ndarray:
    """Measured, for the gate."""
    return media[:, 0].astype(np.float64)


def points(media: np.ndarray) -> np.ndarray:
    """Features."""
    return media


def task_of(changes: dict[str, Any], lora: bool, start: int, images: Path) -> OnlineTask:
    """``start``: seed of the weights, which a resume must not keep. ``images``: read by the run's description alone."""
    tables = {
        "train.train_batch_per_replica": 16,
        "train.max_num_steps": TOTAL,
        "train.optm_lr": 1e-2,
        "train.ema_enable": True,
        "train.ckpt.save_freq": ENDED,
        "train.ckpt.save_mode": "sync",
        "train.ckpt.max_keep": -1,
        "rollout.n_generation": 8,
        JOB + "mini_batch": 8,
        "policy.diffusers.timesteps_fraction": 0.5,
        JOB + "trainer_type": "diffusion_nft",
        **({"policy.lora": LORA} if lora else {}),
        **changes,
    }
    if "local_dir" in tables.get(JOB + "data_term", {}):
        tables[JOB + "data_term"] = {**tables[JOB + "data_term"], "local_dir": str(images)}
    config = toy_config(tables)
    model = PlaneModel(lora=config.policy.lora, seed=start)
    if lora:
        torch.manual_seed(0)  # the frozen base is the same file in both runs
        for name, value in model.transformer.named_parameters():
            if "lora" not in name:
                torch.nn.init.normal_(value, std=0.1)
    data_loss = functools.partial(plane_data_loss, model, 0, online_table(config).data_term.batch_size)
    return toy_trainer(
        config, model, [POINT] * 3, reward_fns={"bump": bump, "auxiliary": (auxiliary, 0.0)}, data_loss=data_loss
    )


def train(task: OnlineTask, folder: Path, resume_from: Path | None) -> Path:
    run = run_folder.find_newest_run(folder) or run_folder.create_run(folder)
    TrainLoop(task._config, run, Context(torch.device("cpu")), task, (), {}, Never()).run(resume_from)
    return run.root


def without_times(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if "time" not in key} for line in metrics_of(folder)]


def progress(run: Path) -> Any:
    return json.loads((layout.policy_dir(run / "checkpoints", TOTAL) / layout.TRAINER_STATE).read_text())


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        *((name, False) for name in JOBS),
        *((name, True) for name in ("flow_grpo, moving reference", "flow_grpo, moving window", "diffusion_nft", "epg")),
        ("diffusion_nft, schedule-free", True),
    ],
)
def test_a_resume_in_the_middle_is_the_undisturbed_run(
    tmp_path: Path, image_folder: Path, name: str, lora: bool
) -> None:
    calm = train(task_of(JOBS[name], lora, start=0, images=image_folder), tmp_path / "calm", None)
    shutil.copytree(tmp_path / "calm", tmp_path / "again", symlinks=True)
    again = tmp_path / "again" / calm.name
    drop_steps_after(again, ENDED)
    train(
        task_of(JOBS[name], lora, start=1, images=image_folder),
        tmp_path / "again",
        layout.policy_dir(again / "checkpoints", ENDED),
    )
    end = saved_state(calm, TOTAL)
    assert_same_state(saved_state(again, TOTAL), end)
    assert progress(again) == progress(calm)
    assert without_times(tmp_path / "again") == without_times(tmp_path / "calm")
    middle = saved_state(calm, ENDED)
    kinds = {key.split(".")[0] for key in end}
    for kind in kinds & {"model", "ema", "old"}:
        keys = [key for key in end if key.startswith(f"{kind}.")]
        assert any(not torch.equal(end[key], middle[key]) for key in keys), kind
    if "reference_reset_interval" in str(JOBS[name]):
        assert "reference" in kinds
