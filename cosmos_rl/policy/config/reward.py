"""The reward tables: what scores generated samples, and how several scores become one number."""

from collections import Counter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictBool, StrictFloat

from cosmos_rl.policy.config.base import Description, FilledText, PositiveFloat, PositiveInt, Table

_CLIP = 5.0
_WIDE_CLIPS = {"hpsv3": 15.0}
"""Rewards of the service whose usual scores (hpsv3: -5 ... 13) the ordinary clip would cut."""
_USUAL_KEYS = {
    "ocr": "ocr_reward",
    "gen_eval": "gen_eval_score",
    "cosmos_reason1": "no_score",
    "dance_grpo": "overall_reward",
}


class RewardFnConfig(Table):
    """`[[train.train_policy.remote_reward.reward_fns]]`: one reward of the service."""

    name: str
    """Reward type at the service."""
    weight: StrictFloat = 1.0
    """Weight in the sum over all rewards; negative: a penalty, 0: not requested, unless it is `measured`."""
    measured: StrictBool = False
    """Request it although its weight is 0."""
    score_key: FilledText | None = None
    """Field of the answer that holds the score, or "a+b" for a sum; unset: the usual one (ocr: ocr_reward, gen_eval:
    gen_eval_score, cosmos_reason1: no_score, dance_grpo: overall_reward), else as name."""
    clip_min: StrictFloat | None = None
    """Smaller scores count as this; unset: -5, for hpsv3 -15."""
    clip_max: StrictFloat | None = None
    """Larger scores count as this; unset: 5, for hpsv3 15."""

    @property
    def is_asked(self) -> bool:
        """Whether it is requested."""
        return self.weight != 0 or self.measured

    @property
    def read_key(self) -> str:
        """`score_key` or what it means unset."""
        return self.score_key or _USUAL_KEYS.get(self.name, self.name)

    @property
    def lower(self) -> float:
        """`clip_min` or what it means unset."""
        return -_WIDE_CLIPS.get(self.name, _CLIP) if self.clip_min is None else self.clip_min

    @property
    def upper(self) -> float:
        """`clip_max` or what it means unset."""
        return _WIDE_CLIPS.get(self.name, _CLIP) if self.clip_max is None else self.clip_max

    @property
    def has_wide_clip(self) -> bool:
        """Whether an unset bound is not the usual one."""
        return self.name in _WIDE_CLIPS and None in (self.clip_min, self.clip_max)


class RemoteRewardConfig(Table):
    """`[train.train_policy.remote_reward]`: scores from the reward service.

    A sample's reward is scale * clip(sum of weight_i * clip(score_i)); remote and local rewards are added.
    """

    scale: StrictFloat = 1.0
    """Factor of the clipped sum."""
    reward_clip_min: StrictFloat = -5.0
    """A smaller sum counts as this."""
    reward_clip_max: StrictFloat = 5.0
    """A larger sum counts as this."""
    batch_size: PositiveInt = 16
    """Most samples in one request; fewer travel where they would be over 256 MB, or over 4 GB as pixels."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that a request may take from sending to the last score; what is missing then is missing."""
    max_in_flight: PositiveInt = 6
    """Requests of a rank that may wait for scores at a time; older services lose requests when their queue is long."""
    payload: Literal["pixels", "latents"] = "pixels"
    """What is sent of a sample. "latents": of videos those of Wan's VAE, about a 24th of the bytes; the service decodes
    them with the VAE of its decode_args, which must be the model's."""
    reward_fns: Annotated[tuple[RewardFnConfig, ...], Field(min_length=1)] = (
        RewardFnConfig(name="dance_grpo", score_key="overall_reward"),
    )
    """The rewards that are added up."""

    @property
    def shown_names(self) -> list[str | None]:
        """Entry by entry its name in metrics: `name`, where several of one name are requested `name.score_key`; None:
        it is not requested."""
        asked = Counter(entry.name for entry in self.reward_fns if entry.is_asked)
        named = ((e, f"{e.name}.{e.read_key}" if asked[e.name] > 1 else e.name) for e in self.reward_fns)
        return [name if entry.is_asked else None for entry, name in named]


def _with_place(name: str) -> str:
    module, colon, function = name.rpartition(":")
    if not (colon and module and function.isidentifier()):
        raise ValueError("no place of a function")
    return name


FunctionName = Annotated[
    str, AfterValidator(_with_place), Description('"package.module:function" or "path/file.py:function"')
]


class LocalRewardFnConfig(Table):
    """`[[train.train_policy.local_reward.reward_fns]]`: one Python function."""

    function: FunctionName
    """Where it is: "package.module:function" or "path/file.py:function"."""
    name: FilledText | None = None
    """Name in metrics and messages; unset: that of the function."""
    weight: StrictFloat = 1.0
    """Weight in the sum over all rewards; negative: a penalty, 0: measured, not trained on."""
    clip_min: StrictFloat = -_CLIP
    """Smaller scores count as this."""
    clip_max: StrictFloat = _CLIP
    """Larger scores count as this."""

    @property
    def shown_name(self) -> str:
        """`name` or what it means unset."""
        return self.name or self.function.rpartition(":")[2]


class LocalRewardConfig(Table):
    """`[train.train_policy.local_reward]`: scores from Python functions, computed in the training process.

    They are added up as those of the service. Functions that a script gives take the place of those listed here.
    """

    scale: StrictFloat = 1.0
    """Factor of the clipped sum."""
    reward_clip_min: StrictFloat = -5.0
    """A smaller sum counts as this."""
    reward_clip_max: StrictFloat = 5.0
    """A larger sum counts as this."""
    batch_size: PositiveInt = 16
    """Most samples in one call of a function for batches."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that one call may take; a longer one ends the run, as a function cannot be interrupted."""
    reward_fns: Annotated[
        tuple[LocalRewardFnConfig, ...], Description('a list of tables like [{function = "my_reward.py:red"}]')
    ] = ()
    """The functions whose scores are added up."""
