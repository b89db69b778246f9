"""The table of job kinds: every row is whole, and kinds that it lacks are refused by name."""

import importlib.util

import pytest

from cosmos_rl.policy.config import Config, cross_check, unsupported_settings
from cosmos_rl.policy.config.jobs import JOBS, SCRIPTS, JobKind, job_kind, load_part, online_table

ROWS = pytest.mark.parametrize(("name", "kind"), JOBS.items(), ids=[trainer for _, trainer in JOBS])


def config_of(type_: str, trainer: str) -> Config:
    return Config.from_dict({"train": {"train_policy": {"type": type_, "trainer_type": trainer}}})


@ROWS
def test_every_part_that_a_row_names_is_there(name: tuple[str, str], kind: JobKind) -> None:
    assert importlib.util.find_spec(kind.script) is not None
    assert all(callable(load_part(part)) for part in (kind.task, kind.algorithm) if part)
    assert bool(kind.algorithm) == kind.online


@ROWS
def test_a_configuration_of_a_row_leads_to_it(name: tuple[str, str], kind: JobKind) -> None:
    config = config_of(*name)
    assert job_kind(config) is kind
    assert isinstance(config.train.train_policy, kind.table)
    assert kind.plan(config).total > 0
    assert SCRIPTS[kind.script] == kind.data


def test_an_unknown_trainer_is_described_like_its_type_and_refused() -> None:
    config = config_of("grpo", "ppo")
    kind = job_kind(config)
    assert (kind.online, kind.data, kind.supported, kind.adapters) == (True, "prompts", False, ())
    [first, *_] = unsupported_settings(config)
    assert first.startswith('train.train_policy.trainer_type = "ppo"; use "diffusion_nft" or "flow_grpo" or "ddrl"')
    assert not any("lora_names" in line for line in cross_check(config))


def test_only_online_jobs_have_a_table_of_rewards() -> None:
    assert online_table(config_of("grpo", "diffusion_nft")).kl_beta == 0.0
    with pytest.raises(TypeError, match="sft"):
        online_table(config_of("sft", "sft"))
