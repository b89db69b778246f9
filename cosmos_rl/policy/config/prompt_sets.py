"""`[[train.train_policy.dataset.sets]]`: several prompt sets of one run of reinforcement learning, and their rules."""

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from cosmos_rl.policy.config.base import NonNegativeInt, PositiveFloat, PositiveInt, RewardNames, Table

_KEY = "train.train_policy.dataset"


class PromptSetConfig(Table):
    """`[[train.train_policy.dataset.sets]]`: one of several prompt sets of reinforcement learning."""

    name: str = ""
    """Named prompt set, as `name` of the table above."""
    local_dir: str = ""
    """File or folder of prompts in its place, as `local_dir` of the table above."""
    split: str = ""
    """Split of the set; unset: "train"."""
    label: str = ""
    """Its name in metrics and messages; unset: name, or that of the file or folder without its ending."""
    rewards: RewardNames | None = None
    """Rewards that score and train its samples, by their names in metrics, one or more; unset: all."""
    weight: PositiveFloat = 1.0
    """Share of the prompts, relative to the weights of the other sets that are drawn in the same steps."""
    teacher: str = ""
    """On-policy distillation of its prompts: as `teacher` of train.train_policy, in the place of that or of the
    reference."""
    first_step: NonNegativeInt = 0
    """Step, counted from 0, from which on it is drawn."""
    last_step: PositiveInt | None = None
    """Step from which on it is no longer drawn; unset: to the end."""

    @property
    def shown_name(self) -> str:
        """`label` or what it means unset."""
        return self.label or self.name or Path(self.local_dir).stem

    @property
    def first_split(self) -> str:
        """As that of the table above, which may name several."""
        return self.split

    @property
    def exact_weight(self) -> Fraction:
        """`weight` as it is written: 0.1 is a tenth."""
        return Fraction(repr(self.weight))

    def is_drawn(self, step: int) -> bool:
        """Whether the set is drawn in a 0-based step."""
        return self.first_step <= step and (self.last_step is None or step < self.last_step)

    @property
    def shown_steps(self) -> str:
        """The steps in which it is drawn, in words."""
        if self.last_step is None:
            return f"from step {self.first_step} on" if self.first_step else "all steps"
        return f"steps {self.first_step} to {self.last_step - 1}"


def find_gap(sets: Sequence[PromptSetConfig], steps: int) -> int | None:
    """The first of ``steps`` steps in which none of the sets is drawn."""
    changes = sorted({0, *(one.last_step for one in sets if one.last_step is not None)})
    return next((step for step in changes if step < steps and not any(one.is_drawn(step) for one in sets)), None)


def set_rules(sets: Sequence[PromptSetConfig], steps: int | None) -> Iterator[str]:
    """Broken rules of the sets themselves; ``steps``: of the run, where that is set."""
    for number, one in enumerate(sets):
        key = f"{_KEY}.sets.{number}"
        if bool(one.name) == bool(one.local_dir):
            found = "both" if one.name else "neither"
            yield f"{key}: found {found} of name and local_dir; allowed: one of them"
        if one.last_step is not None and one.last_step <= one.first_step:
            yield f"{key}.last_step: found {one.last_step}; allowed: more than first_step = {one.first_step}"
    twice = [label for label, count in Counter(one.shown_name for one in sets).items() if count > 1 and label]
    if twice:
        first, second, *_ = [number for number, one in enumerate(sets) if one.shown_name == twice[0]]
        yield f'{_KEY}.sets.{second}.label: found "{twice[0]}", as sets.{first} has; allowed: a name of its own'
    wrong = next((one.shown_name for one in sets if "/" in one.shown_name), None)
    if wrong is not None:
        yield f'{_KEY}.sets: found the label "{wrong}"; allowed: one without "/", which separates names of metrics'
    if steps is None:
        yield f"train.max_num_steps: missing; with {_KEY}.sets it is the length of the run, whatever train.epoch says"
    elif (gap := find_gap(sets, steps)) is not None:
        yield (
            f"{_KEY}.sets: none is drawn in step {gap} of train.max_num_steps = {steps}; allowed: a set for every "
            "step, by first_step and last_step (steps count from 0)"
        )


def find_reward_problems(sets: Sequence[PromptSetConfig], known: Mapping[str, float]) -> Iterator[str]:
    """Rewards of sets that there are not, and sets with none that counts; ``known``: name -> scale times weight."""
    for number, one in enumerate(sets):
        key = f"{_KEY}.sets.{number}.rewards"
        named = one.rewards or ()
        unknown = next((name for name in named if name not in known), None)
        if unknown is not None:
            near = "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(unknown, known, n=1))
            yield f'{key}: found "{unknown}"; allowed: rewards of the run ({", ".join(known)}){near}'
        elif named and not any(known[name] for name in named):
            yield f"{key}: found {list(named)}, all of weight 0; allowed: one at least that is trained on"
