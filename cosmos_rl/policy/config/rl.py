"""Tables of `[train.train_policy]` that only reinforcement learning has: data term and guard against reward hacking."""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat

from cosmos_rl.policy.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Table


class DataTermConfig(Table):
    """`[train.train_policy.data_term]`: real samples that are fine-tuned on in addition to the reward."""

    beta: NonNegativeFloat = 0.0
    """Weight of their flow-matching loss; 0: none are read."""
    local_dir: str = ""
    """Folder of pairs, as for supervised fine-tuning."""
    batch_size: PositiveInt = 16
    """Samples per optimiser step over all ranks; a multiple of the number of data parallel ranks."""


class RewardHackingGuardConfig(Table):
    """`[train.train_policy.reward_hacking_guard]`: detects that the reward rises because the policy exploits it."""

    enable: StrictBool = True
    """Whether the policy is checked at all."""
    freq: PositiveInt = 5
    """Steps between two checks."""
    local_dir: str = ""
    """Folder of held-out pairs for the flow-matching loss; unset: samples of the model as it is at the start."""
    samples: PositiveInt = 32
    """Held-out samples whose loss is measured."""
    max_loss_ratio: Annotated[StrictFloat, Field(gt=1)] = 3.0
    """Alarm when their loss, as a multiple of the loss at the start, is larger."""
    min_diversity_ratio: Fraction = 0.5
    """Alarm when the diversity of the samples of one prompt, as a share of that at the start, is smaller. It is
    measured on half as many samples as `samples`, at least 4, made from the same noise at each check."""
    max_untrained_drop: NonNegativeFloat = 0.3
    """Alarm when a validation reward that is not trained on drops by more than so many standard deviations of its first
    scores, and also by more than untrained_sigmas."""
    untrained_sigmas: NonNegativeFloat = 4.0
    """That drop must also be so many standard errors of the change from sample to sample: chance gives no alarm."""
    action: Literal["warn", "stop", "rewind"] = "stop"
    """What an alarm does: warn, save and stop, or rewind to the last checkpoint that was found good."""
    max_rewinds: NonNegativeInt = 3
    """How often the run is rewound; the next alarm stops it."""
    rewind_lr_factor: Annotated[StrictFloat, Field(gt=0, le=1)] = 0.5
    """Factor on the learning rate at each rewind; the random draws change in any case."""
    rewind_kl_factor: Annotated[StrictFloat, Field(ge=1)] = 2.0
    """Factor on kl_beta at each rewind."""
