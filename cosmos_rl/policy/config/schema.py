"""The whole configuration, and the tables that belong to no other file."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StrictBool

from cosmos_rl.policy.config.base import PositiveInt, Table
from cosmos_rl.policy.config.policy import PolicyConfig
from cosmos_rl.policy.config.problems import ConfigError, validated
from cosmos_rl.policy.config.train import DatasetConfig, TrainConfig


class ValidationConfig(Table):
    """`[validation]`: held-out loss and pictures while training."""

    enable: StrictBool = False
    """Validate at all."""
    val_before_train: StrictBool = False
    """Validate once before the first step."""
    freq: PositiveInt = 20
    """Steps between two validations; the last step is always validated."""
    batch_size: PositiveInt | None = None
    """Samples per forward pass; unset: as in training."""
    n_generation: PositiveInt = 1
    """Pictures per validation prompt."""
    dataset: DatasetConfig = DatasetConfig()
    """Where the validation data is."""


def _lowered(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _none_word_to_none(value: object) -> object:
    # The documented recipes write experiment_name = "None" for "no name".
    return None if value in ("", "None", "none") else value


LoggerName = Annotated[Literal["console", "wandb"], BeforeValidator(_lowered)]


class LoggingConfig(Table):
    """`[logging]`: where metrics are shown. `metrics.jsonl` in the run folder is written in any case."""

    logger: tuple[LoggerName, ...] = ("console",)
    """Places that show metrics: "console", "wandb"."""
    project_name: str = "cosmos_rl"
    """Project in wandb."""
    group_name: str | None = None
    """Group in wandb."""
    experiment_name: Annotated[str | None, BeforeValidator(_none_word_to_none)] = None
    """Name of the run in wandb; unset: the output folder."""


class Config(Table):
    """Everything a run needs to know; `Config()` holds the defaults."""

    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """Placement of rollouts; ignored by supervised fine-tuning."""
    policy: PolicyConfig = PolicyConfig()
    """The model that is trained."""
    train: TrainConfig = TrainConfig()
    """The run, its data, its optimiser and its checkpoints."""
    validation: ValidationConfig = ValidationConfig()
    """Held-out loss and pictures while training."""
    logging: LoggingConfig = LoggingConfig()
    """Where metrics are shown."""
    custom: dict[str, object] = Field(default_factory=dict)
    """Free table for your own scripts; the only place where any key is allowed."""

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Config":
        """The configuration of a dictionary as read from TOML; `ConfigError` names every problem."""
        config, problems = validated(cls, values)
        if config is None or problems:
            raise ConfigError(problems, source="configuration")
        return config
