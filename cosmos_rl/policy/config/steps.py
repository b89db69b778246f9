"""`[train.train_policy.steps]`: which sampling steps are trained."""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt

from cosmos_rl.policy.config.base import (
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Table,
)


class StepsConfig(Table):
    """`[train.train_policy.steps]`: which sampling steps FlowGRPO and DDRL train; never those without noise."""

    choose: Literal["first", "random", "list", "window"] = "first"
    """"first" or "random": the share policy.diffusers.timesteps_fraction of all. "list": `indices`. "window": `size`
    neighbours."""
    indices: tuple[Annotated[StrictInt, Field(ge=-1)], ...] = ()
    """Steps of "list", from 0 (noise) on; -1 is another, random one."""
    size: PositiveInt = 3
    """Steps of a window."""
    within: PositiveFraction = 1.0
    """Windows and random steps lie in this share of all steps, counted from the noise."""
    order: Literal["random", "progressive", "decay", "exp_decay"] = "random"
    """Where a window is: at a random place in each training step; or moving from the noise to the data, with a move
    every `interval` training steps ("progressive") or ever sooner, linearly ("decay") or exponentially ("exp_decay").
    """
    stride: PositiveInt = 1
    """Sampling steps by which a window moves; to its last place fewer, where these do not come out even."""
    interval: PositiveInt = 25
    """Training steps between two moves; of "decay" and "exp_decay" at the first place."""
    least_interval: PositiveInt = 1
    """Training steps that a "decay" window stays at its last place."""
    decay_rate: PositiveFloat = 0.1
    """An "exp_decay" window stays exp(-decay_rate) times as long with each sampling step beyond `decay_threshold`."""
    decay_threshold: NonNegativeInt = 13
    """Sampling step up to which an "exp_decay" window stays for `interval` training steps; from 0 (noise) on."""
    roll_back: StrictBool = True
    """A moving window begins at the noise again after its last place; false: it stays at the last place."""
    elsewhere: Literal["noise", "euler", "dpm2"] = "noise"
    """How the steps that are not trained are sampled: with noise as well, or by one of the solvers without noise."""
    max_gb: PositiveFloat = 64.0
    """Host memory of a rank, in 10^9 bytes, for what it records of the trained steps, with the copies that learning
    makes; a run that would need more is refused before it begins."""
