"""The configuration of a run: schema, loading, overrides and checks. Imports no torch."""

from cosmos_rl.policy.config.checks import cross_check, data_ranks, not_runnable_yet, world_size
from cosmos_rl.policy.config.load import dump_toml, load_config, read_toml
from cosmos_rl.policy.config.policy import (
    DiffusersConfig,
    LoraConfig,
    ParallelismConfig,
    PolicyConfig,
    SampleConfig,
)
from cosmos_rl.policy.config.problems import ConfigError, Problem
from cosmos_rl.policy.config.schema import Config, LoggingConfig, ValidationConfig
from cosmos_rl.policy.config.train import CheckpointConfig, DatasetConfig, TrainConfig, TrainPolicyConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DatasetConfig",
    "DiffusersConfig",
    "LoggingConfig",
    "LoraConfig",
    "ParallelismConfig",
    "PolicyConfig",
    "Problem",
    "SampleConfig",
    "TrainConfig",
    "TrainPolicyConfig",
    "ValidationConfig",
    "cross_check",
    "data_ranks",
    "dump_toml",
    "load_config",
    "not_runnable_yet",
    "read_toml",
    "world_size",
]
