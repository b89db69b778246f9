"""Building blocks of the configuration tables: the strict base class and the constrained value types."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt


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


# Strict numbers: TOML has its own integers, floats and booleans, so `epoch = true` or `optm_lr = "1"` is a slip.
PositiveInt = Annotated[StrictInt, Field(gt=0)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0)]
PositiveFloat = Annotated[StrictFloat, Field(gt=0)]
NonNegativeFloat = Annotated[StrictFloat, Field(ge=0)]
Fraction = Annotated[StrictFloat, Field(ge=0, le=1)]
OpenFraction = Annotated[StrictFloat, Field(gt=0, lt=1)]
HalfOpenFraction = Annotated[StrictFloat, Field(ge=0, lt=1)]
FloatDtype = Literal["float32", "bfloat16", "float16"]
