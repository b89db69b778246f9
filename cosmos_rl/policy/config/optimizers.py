"""The optimisers that have a name, and what is known of their classes. No torch."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerKind:
    """What is known of an optimiser before its class is loaded."""

    place: str
    """Dotted name of the class."""
    package: str = "torch"
    """What pip installs it by."""
    like_adam: bool = True
    """A rate of 0.1 or more moves each weight by about as much in each step."""
    sharded: bool = True
    """Whether it is right on weights that are split over ranks; on replicas of all weights every class is."""
    gathers: bool = False
    """It steps on each weight as a whole, so that its state is whole on every rank."""
    flat: bool = False
    """It steps on each number by itself but for sums over all of them, so that flat parts and sums over ranks do."""

    @property
    def averages(self) -> bool:
        """It trains other weights than the ones to use, which are an average of them (schedule-free)."""
        return self.place.startswith("schedulefree.")


OPTIMIZERS = {
    "AdamW": OptimizerKind("torch.optim.AdamW"),
    "Adam": OptimizerKind("torch.optim.Adam"),
    "AdamW8bit": OptimizerKind("torchao.optim.AdamW8bit", "torchao"),
    "Adam8bit": OptimizerKind("torchao.optim.Adam8bit", "torchao"),
    "Muon": OptimizerKind("torch.optim.Muon"),
    "Adafactor": OptimizerKind("torch.optim.Adafactor", like_adam=False, gathers=True),
    "AdamWScheduleFree": OptimizerKind("schedulefree.AdamWScheduleFree", "schedulefree"),
    "Prodigy": OptimizerKind("prodigyopt.Prodigy", "prodigyopt", like_adam=False, flat=True),
}
OTHER_SPELLINGS = {"schedule_free": "AdamWScheduleFree", "schedulefree": "AdamWScheduleFree"}


def short_name(name: str) -> str:
    """The name in `OPTIMIZERS` of a class that is given by its dotted name, where it has one."""
    return next((short for short, kind in OPTIMIZERS.items() if kind.place == name), name)


def find_kind(name: str) -> OptimizerKind:
    """What is known of `train.optm_name`; of a class without a name here only its place and, by guess, its package."""
    known = OPTIMIZERS.get(short_name(name))
    return known or OptimizerKind(name, name.partition(".")[0], like_adam=False, sharded=False)


def explain_missing(name: str, module: str) -> str:
    """What to say of `train.optm_name` where a ``module`` of its dotted name is not there.

    Only a package that is known is said to be installed: one that a misspelt name guesses may be anybody's.
    """
    if short_name(name) in OPTIMIZERS:
        return f'train.optm_name = "{name}" needs {module}: pip install {find_kind(name).package}'
    return (
        f'train.optm_name: found "{name}"; there is no module {module} here; correct the name, or install the package '
        "that has the class"
    )


def check_optimizer_name(name: str) -> str:
    """Raise `ValueError` unless `name` is in `OPTIMIZERS` or is a dotted name."""
    if name not in OPTIMIZERS and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
        raise ValueError("neither an optimiser nor a dotted name")
    return name
