"""Presets of reinforcement learning: each is a valid job, and a file's own values hold."""

from typing import Any, get_args

import pytest

from cosmos_rl.policy.config import Config, cross_check, unsupported_settings
from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.plan import plan_online
from cosmos_rl.policy.config.presets import PRESETS
from cosmos_rl.policy.config.problems import ConfigError
from cosmos_rl.policy.config.train_policy import Preset


def job_of(preset: str, **train_policy: Any) -> Config:
    reward = {"reward_fns": [{"function": "tests.support.nft_rewards:smooth"}]}
    job = {"preset": preset, "uncentralized_training": True, "local_reward": reward, **train_policy}
    if preset == "ddrl":
        job.setdefault("data_term", {"beta": 0.01, "local_dir": "pairs"})
    return Config.from_dict(
        {
            "mode": "colocated",
            "policy": {"model_name_or_path": "somewhere", "is_diffusers": True},
            "train": {"train_batch_per_replica": 48, "train_policy": job},
        }
    )


def test_every_preset_can_be_named() -> None:
    assert set(get_args(Preset)) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_valid_job(name: str) -> None:
    config = job_of(name)
    assert cross_check(config) == []
    assert unsupported_settings(config) == []
    assert job_kind(config).supported


def test_the_number_of_trained_steps() -> None:
    found = {name: plan_online(job_of(name)).sigmas for name in PRESETS}
    few = {"flow_grpo_fast": 3, "flow_grpo_fast_sde": 3, "flow_dppo": 3, "flow_dppo_cps": 3, "mix_grpo": 4}
    assert found == {"flow_grpo": 9, "flow_cps": 9, "grpo_guard": 9, "dance_grpo": 9, "ddrl": 10, **few}


def test_what_a_file_says_itself_holds() -> None:
    config = job_of("flow_grpo_fast", epsilon_low=1e-3, steps={"size": 2})
    job = online_table(config)
    assert (job.epsilon_low, job.steps.size, job.steps.choose, job.trainer_type) == (1e-3, 2, "window", "flow_grpo")
    assert config.policy.diffusers.sample.solver == "cps"
    assert config.policy.model_name_or_path == "somewhere"


def test_an_unknown_preset_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="preset"):
        Config.from_dict({"train": {"train_policy": {"type": "grpo", "preset": "flow_gpro"}}})
