"""The configuration of a run: schema, loading, overrides and checks. Imports no torch."""

from cosmos_rl.policy.config.checks import cross_check, data_ranks, notes, unsupported_settings, world_size
from cosmos_rl.policy.config.chunks import CACHED_AT_ONCE, images_at_once, rollout_chunk, validation_chunk
from cosmos_rl.policy.config.load import config_from_tables, dump_toml, is_older, load_config, read_toml, translate_file
from cosmos_rl.policy.config.policy import (
    DiffusersConfig,
    LoraConfig,
    ParallelismConfig,
    PolicyConfig,
    SampleConfig,
)
from cosmos_rl.policy.config.problems import ConfigError, Problem
from cosmos_rl.policy.config.prompt_sets import PromptSetConfig
from cosmos_rl.policy.config.reward import LocalRewardConfig, LocalRewardFnConfig, RemoteRewardConfig, RewardFnConfig
from cosmos_rl.policy.config.schema import Config, LoggingConfig, ProfilerConfig, RolloutConfig
from cosmos_rl.policy.config.train import CheckpointConfig, TrainConfig
from cosmos_rl.policy.config.train_policy import (
    CacheConfig,
    DatasetConfig,
    DataTermConfig,
    DpoPolicyConfig,
    FolderConfig,
    GrpoPolicyConfig,
    RewardHackingGuardConfig,
    SftPolicyConfig,
    TrainPolicyConfig,
    ValidationDatasetConfig,
)
from cosmos_rl.policy.config.validation import ValidationConfig, ValidationSetConfig

__all__ = [
    "CACHED_AT_ONCE",
    "CacheConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataTermConfig",
    "DatasetConfig",
    "DiffusersConfig",
    "DpoPolicyConfig",
    "FolderConfig",
    "GrpoPolicyConfig",
    "LocalRewardConfig",
    "LocalRewardFnConfig",
    "LoggingConfig",
    "LoraConfig",
    "ParallelismConfig",
    "PolicyConfig",
    "Problem",
    "ProfilerConfig",
    "PromptSetConfig",
    "RemoteRewardConfig",
    "RewardFnConfig",
    "RewardHackingGuardConfig",
    "RolloutConfig",
    "SampleConfig",
    "SftPolicyConfig",
    "TrainConfig",
    "TrainPolicyConfig",
    "ValidationConfig",
    "ValidationDatasetConfig",
    "ValidationSetConfig",
    "config_from_tables",
    "cross_check",
    "data_ranks",
    "dump_toml",
    "images_at_once",
    "is_older",
    "load_config",
    "notes",
    "read_toml",
    "rollout_chunk",
    "translate_file",
    "unsupported_settings",
    "validation_chunk",
    "world_size",
]
