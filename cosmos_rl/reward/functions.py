"""Reward functions of users: what they may look like, where they are found, and how they are called. No torch."""

import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import LocalRewardConfig

Function = TypeVar("Function", bound=Callable[..., Any])
RewardFn = Callable[..., Any] | tuple[Callable[..., Any], float]
RewardFns = Sequence[RewardFn] | Mapping[str, RewardFn]
"""What a script may give: functions, pairs of function and weight, or either of them by name."""

_BATCH = "__cosmos_batch_reward__"
_SAMPLE_KEYWORDS = ("reference", "prompt", "metadata", "fps")
_BATCH_ARGUMENTS = ("prompts", "metadata", "fps")
_CLIP = 5.0


def batch_reward(function: Function) -> Function:
    """Mark ``function`` as one that scores a whole batch.

    It is called as ``function(media, prompts, metadata, fps)``: uint8 ``[B, H, W, 3]`` (videos ``[B, T, H, W, 3]``),
    two sequences of length ``B``, and frames per second or None. It returns ``B`` numbers, None where one is missing.
    """
    setattr(function, _BATCH, True)
    return function


@dataclass(frozen=True)
class LocalReward:
    """One reward function and how its score counts."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    clip_min: float = -_CLIP
    clip_max: float = _CLIP

    def __post_init__(self) -> None:
        """Raises `UserError`: the function cannot be called as one that scores."""
        if not callable(self.function):
            raise UserError(f"reward {self.name}: {self.function!r} is not a function")
        if isinstance(self.weight, bool) or not isinstance(self.weight, (int, float)) or not math.isfinite(self.weight):
            raise UserError(f"reward {self.name}: found the weight {self.weight!r}; allowed: a finite number")
        build_keyword_picker(self.function, self.name)

    @property
    def of_batches(self) -> bool:
        """Whether the function scores a whole batch."""
        return _takes_batches(self.function)

    @property
    def origin(self) -> str:
        """Name of the function and a digest of its source, wherever the file lies."""
        inner = getattr(self.function, "func", self.function)  # functools.partial
        try:
            if not inspect.isroutine(inner):
                inner = type(inner)
            source = inspect.getsource(inner)
        except (OSError, TypeError):  # built in, or typed into a prompt
            return _function_name(self.function)
        return f"{_function_name(self.function)} {hashlib.sha256(source.encode()).hexdigest()[:12]}"


def build_given_rewards(functions: RewardFns) -> list[LocalReward]:
    """The rewards that a script gave."""
    named: list[tuple[str | None, Any]] = [(None, entry) for entry in functions]
    if isinstance(functions, Mapping):
        named = list(functions.items())
    rewards = []
    for name, entry in named:
        if isinstance(entry, tuple) and len(entry) != 2:
            raise UserError(f"reward_fns: found {entry!r}; allowed: a function or a pair (function, weight)")
        function, weight = entry if isinstance(entry, tuple) else (entry, 1.0)
        rewards.append(LocalReward(name or _function_name(function), function, weight))
    return rewards


def load_configured_rewards(table: LocalRewardConfig, key: str) -> list[LocalReward]:
    """The rewards of the table ``key``; their modules are imported here."""
    return [
        LocalReward(
            entry.shown_name,
            find_function(entry.function, f"{key}.reward_fns.{index}.function"),
            entry.weight,
            entry.clip_min,
            entry.clip_max,
        )
        for index, entry in enumerate(table.reward_fns)
    ]


def build_keyword_picker(function: Callable[..., Any], name: str) -> Callable[..., dict[str, Any]]:
    """A function that picks from the known keywords those which ``function`` takes in addition to its media.

    Raises:
        UserError: it takes no media, or needs arguments that nobody gives.
    """
    of_batches = _takes_batches(function)
    known = _SAMPLE_KEYWORDS
    if of_batches:
        known = _BATCH_ARGUMENTS
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C: nothing is known, so it gets the media alone
        return lambda **values: {}
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not by_place:
        raise UserError(f"reward {name}: the function takes no positional argument, but the media come as the first")
    others = [p for p in parameters if p is not by_place[0]]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in others)
    taken = {p.name for p in others if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [
        p.name
        for p in others
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in known
    ]
    if unknown:
        raise UserError(
            f'reward {name}: the function needs "{unknown[0]}", which is not known; after the media it may take '
            f"{', '.join(known)}{'' if of_batches else ' (or mark it with cosmos_rl.reward.batch_reward)'}"
        )
    if takes_any:
        return lambda **values: values
    return lambda **values: {key: value for key, value in values.items() if key in taken}


def _takes_batches(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, _BATCH, False) or getattr(getattr(function, "func", None), _BATCH, False))


def _function_name(function: object) -> str:
    inner = getattr(function, "func", function)  # functools.partial
    return getattr(inner, "__name__", None) or type(inner).__name__


def find_function(reference: str, key: str) -> Callable[..., Any]:
    """The function at ``package.module:function`` or ``path/file.py:function``."""
    source, _, name = reference.rpartition(":")
    try:
        if source.endswith(".py"):
            module = _file_module(Path(source).expanduser())
        else:
            module = importlib.import_module(source)
    except FileNotFoundError:
        raise UserError(f'{key} = "{reference}": {Path(source).expanduser().absolute()} does not exist') from None
    except ImportError as error:
        raise UserError(f'{key} = "{reference}": cannot be imported: {error}') from error
    if not hasattr(module, name):
        raise UserError(f'{key} = "{reference}": {source} has no function "{name}"')
    return getattr(module, name)


def _file_module(path: Path) -> Any:
    """The module in a file, loaded once."""
    path = path.absolute()
    if not path.is_file():
        raise FileNotFoundError(path)
    name = f"cosmos_reward_file_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours, as for a script
    sys.modules[name] = module  # before it runs, as dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
