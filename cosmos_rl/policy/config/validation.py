"""`[validation]`: on what a run is judged while it trains."""

from typing import Annotated

from pydantic import AfterValidator, StrictBool, StrictFloat, StrictInt

from cosmos_rl.policy.config.base import (
    Description,
    ForRl,
    NoEffect,
    NonNegativeFloat,
    PositiveInt,
    RewardFunction,
    RewardNames,
    Table,
)
from cosmos_rl.policy.config.reward import LocalRewardConfig, RemoteRewardConfig
from cosmos_rl.policy.config.train_policy import ValidationDatasetConfig


def _check_label(name: str) -> str:
    if name and (not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or not name.isascii()):
        raise ValueError("no label")
    return name


Label = Annotated[str, AfterValidator(_check_label), Description("letters, digits, - _ and .")]


class ValidationSetConfig(Table):
    """`[[validation.sets]]`: one of several validation sets. What is unset is as in `[validation]` and in sampling."""

    name: Label = ""
    """Label in metrics, galleries and the report; unset: the name of the prompt set, else of the file or folder."""
    dataset: ValidationDatasetConfig = ValidationDatasetConfig()
    """Where its data is; unset: what the script gives as val_dataset."""
    freq: PositiveInt | None = None
    """Steps between two validations on it, a multiple of validation.freq; the last step is always validated."""
    n_generation: PositiveInt | None = None
    """Images per prompt."""
    num_steps: PositiveInt | None = None
    """Sampling steps."""
    guidance_scale: NonNegativeFloat | None = None
    """Classifier-free guidance of its samples; 1 or less switches it off."""
    size: tuple[PositiveInt, PositiveInt] | None = None
    """[height, width] of its samples: policy.diffusers.inference_size or one of the sizes of its buckets."""
    rewards: ForRl[RewardNames | None] = None
    """Names of the rewards that score it; unset: all that validation has."""
    remote_reward: ForRl[RemoteRewardConfig | None] = None
    """Rewards of the service of its own."""
    local_reward: ForRl[LocalRewardConfig | None] = None
    """Reward functions of its own."""


class ValidationConfig(Table):
    """`[validation]`: held-out loss and images while training."""

    enable: StrictBool = False
    """Validate at all."""
    val_before_train: StrictBool = False
    """Validate once before the first step."""
    freq: PositiveInt = 20
    """Steps between two validations; the last step is always validated."""
    batch_size: PositiveInt | None = None
    """Samples per forward pass (reinforcement learning: prompts); unset: as in training."""
    n_generation: PositiveInt = 1
    """Images per validation prompt."""
    dataset: ValidationDatasetConfig = ValidationDatasetConfig()
    """Where the validation data is."""
    sets: tuple[ValidationSetConfig, ...] = ()
    """Several validation sets in place of dataset. The first decides which checkpoint is the best."""
    use_remote_reward: ForRl[StrictBool | None] = None
    """Unset: as in training, which it must equal."""
    remote_reward: ForRl[RemoteRewardConfig | None] = None
    """Unset: as in training."""
    local_reward: ForRl[LocalRewardConfig | None] = None
    """Unset: as in training."""
    temperature: NoEffect[StrictFloat] = 0.0
    """Of language models, like all keys that follow."""
    top_p: NoEffect[StrictFloat | None] = None
    """Token sampling."""
    top_k: NoEffect[StrictInt | None] = 1
    """Token sampling."""
    repetition_penalty: NoEffect[StrictFloat] = 1.0
    """Token sampling."""
    max_response_length: NoEffect[PositiveInt | None] = None
    """Longest answer."""
    reward_function: NoEffect[RewardFunction] = ()
    """Built-in rewards for answers."""
