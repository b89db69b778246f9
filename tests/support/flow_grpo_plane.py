"""FlowGRPO by the shipped trainer on the plane: settings, and a run with what it recorded."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.reward import batch_reward
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import (
    POINT,
    bump,
    toy_config,
    toy_trainer,
)

JOB = "train.train_policy."
LORA = {"r": 4, "lora_alpha": 8.0, "lora_names": ["default"], "init_lora_weights": "gaussian"}
LAGGED_LORA = {**LORA, "lora_names": ["default", "old"]}
FLOW: dict[str, Any] = {
    "num_steps": 10,
    "guidance_scale": 1.0,
    "solver": "flow",
    "deterministic_sampling": False,
    "noise_level": 0.7,
}


def tables_of(**changes: Any) -> dict[str, Any]:
    return {
        "policy.diffusers.sample": FLOW,
        "train.train_batch_per_replica": 16,
        "train.optm_lr": 1e-2,
        "train.max_num_steps": 20,
        "rollout.n_generation": 8,
        JOB + "trainer_type": "flow_grpo",
        JOB + "mini_batch": 8,
        JOB + "epsilon_low": 0.05,
        **changes,
    }


class Run:
    """A trainer on the plane, with what it sampled and the media that were scored."""

    def __init__(self, tables: dict[str, Any]) -> None:
        self.config = toy_config(tables)
        self.model = PlaneModel(lora=self.config.policy.lora)
        torch.nn.init.normal_(self.model.transformer.residual[-1].weight, std=0.1)
        self.media: list[np.ndarray] = []
        self.recorded: list[dict[str, Tensor]] = []
        self.trainer: OnlineTask = toy_trainer(self.config, self.model, [POINT] * 2, reward_fns={"bump": self._score()})
        sample = self.trainer._sampler.sample

        def recording(*args: Any) -> Any:
            made = sample(*args)
            self.recorded.append(dict(made.recorded))
            return made

        self.trainer._sampler.sample = recording  # type: ignore[method-assign]

    def _score(self) -> Any:
        @batch_reward
        def recording(media: np.ndarray) -> np.ndarray:
            self.media.append(media)
            return bump(media)

        return recording
