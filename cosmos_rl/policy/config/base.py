"""Building blocks of the configuration tables: the strict base class, what a key does today, constrained values."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt


class Table(BaseModel):
    """A TOML table: unknown keys are errors, values cannot be changed after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
    )


class Support(enum.Enum):
    """What a key does in this version. A mark on a table holds for all keys in it that have no mark of their own.

    The marks decide what `unsupported_settings` refuses, what `notes` mentions and what the documentation says.
    """

    WORKS = "works"
    PLANNED = "not yet"  # any value but the default is refused
    DPO = "preference optimisation"  # read only by such jobs
    RL = "reinforcement learning"  # read only by such jobs
    VIDEO = "videos"  # read only by such jobs
    VLM = "vision-language models, not yet"  # read only by such jobs, which are refused as a whole
    NO_EFFECT = "no effect"  # upstream's; accepted and named once


T = TypeVar("T")
Planned = Annotated[T, Support.PLANNED]
ForDpo = Annotated[T, Support.DPO]
ForRl = Annotated[T, Support.RL]
ForVideo = Annotated[T, Support.VIDEO]
ForVlm = Annotated[T, Support.VLM]
NoEffect = Annotated[T, Support.NO_EFFECT]


@dataclass(frozen=True)
class Description:
    """How messages and the documentation describe a value whose type says too little or too much."""

    text: str


@dataclass(frozen=True)
class Choices:
    """Names of which one was probably meant by a text that is not accepted, besides those that the type lists."""

    names: tuple[str, ...] = ()
    other_spellings: Mapping[str, str] = field(default_factory=dict)
    """A name that other programs use -> the one here."""


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


# Strict numbers: TOML has its own integers, floats and booleans, so `epoch = true` or `optm_lr = "1"` is a slip.
PositiveInt = Annotated[StrictInt, Field(gt=0)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0)]
PositiveFloat = Annotated[StrictFloat, Field(gt=0)]
NonNegativeFloat = Annotated[StrictFloat, Field(ge=0)]
Fraction = Annotated[StrictFloat, Field(ge=0, le=1)]
PositiveFraction = Annotated[StrictFloat, Field(gt=0, le=1)]
OpenFraction = Annotated[StrictFloat, Field(gt=0, lt=1)]
HalfOpenFraction = Annotated[StrictFloat, Field(ge=0, lt=1)]
FilledText = Annotated[str, Field(min_length=1)]
"""Of keys that may be left out: an empty text would look like a value and mean none."""
RewardNames = Annotated[
    tuple[str, ...],
    Field(min_length=1),
    Description("a list of one or more names of rewards"),
]
FloatDtype = Literal["float32", "bfloat16", "float16"]
Pattern = Annotated[str, AfterValidator(_check_pattern), Description("a regular expression")]
AnyTable = dict[str, object]
RewardFunction = str | tuple[str, ...] | dict[str, StrictFloat]
