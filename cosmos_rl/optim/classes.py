"""From the name of an optimiser to its class and to the keyword arguments that it takes from the configuration."""

import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from cosmos_rl.errors import UserError
from cosmos_rl.optim.adafactor import AdafactorOverRanks
from cosmos_rl.optim.argument_types import find_wrong_types, fit_values
from cosmos_rl.optim.eight_bit import eight_bit_optimizer
from cosmos_rl.optim.muon import MuonWithAdamW
from cosmos_rl.policy.config import TrainConfig
from cosmos_rl.policy.config.optimizers import explain_missing, find_kind, short_name

_OWN_KEYS = {"betas": "train.optm_betas", "eps": "train.epsilon", "weight_decay": "train.optm_weight_decay"}
_NOT_HERE = {
    "lr": "train.optm_lr",
    "fused": "train.optm_impl",
    "foreach": "train.optm_impl",
    "params": "nothing: these are the trained weights",
}


@dataclass(frozen=True)
class Hyperparameters:
    """What the configuration says of an optimiser, its rate and schedule aside."""

    name: str
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    impl: str
    kwargs: Mapping[str, object]
    changed: frozenset[str] = frozenset()
    """Of ``betas``, ``eps``, ``weight_decay`` those that are not the defaults, so that somebody wants them."""

    @classmethod
    def from_config(cls, train: TrainConfig) -> Self:
        """The keys of ``[train]``."""
        fields = {name: key.removeprefix("train.") for name, key in _OWN_KEYS.items()}
        changed = frozenset(
            name for name, field in fields.items() if getattr(train, field) != type(train).model_fields[field].default
        )
        return cls(
            train.optm_name,
            train.optm_betas,
            train.epsilon,
            train.optm_weight_decay,
            train.optimizer_impl,
            train.optm_kwargs,
            changed,
        )


def find_class(name: str) -> Any:
    """The class that ``train.optm_name`` means.

    Raises:
        UserError: the package is not installed, or has no such optimiser.
    """
    kind, short = find_kind(name), short_name(name)
    if short.endswith("8bit"):
        return eight_bit_optimizer(short)
    if short == "Muon":
        return MuonWithAdamW
    if short == "Adafactor":
        return AdafactorOverRanks
    path, _, leaf = kind.place.rpartition(".")
    found = f'train.optm_name: found "{name}"'
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        raise UserError(explain_missing(name, error.name)) from error
    cls = getattr(module, leaf, None)
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
        return cls
    others = [other for other, value in vars(module).items() if _is_optimizer(value)]
    near = difflib.get_close_matches(leaf, others, n=1)
    hint = f'; did you mean "{path}.{near[0]}"?' if near else ""
    if cls is None:
        raise UserError(f"{found}; {path} has no {leaf}{hint}")
    raise UserError(f"{found}; it is no torch.optim.Optimizer{hint}")


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def build_arguments(cls: Any, settings: Hyperparameters) -> dict[str, Any]:
    """The keyword arguments of ``cls`` but ``params`` and ``lr``: the keys of ``[train]`` that its signature has in the
    same form, and ``train.optm_kwargs``.

    Raises:
        UserError: an argument that it does not take, or not with such a value; a key that would have no effect; a step
            that wants a closure.
    """
    parameters = inspect.signature(cls).parameters
    values = {"betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
    taken = {name: value for name, value in values.items() if _takes(parameters.get(name), value)}
    problems = [*_unknown_arguments(settings, parameters, taken), *_idle_keys(settings, taken)]
    free = {name: value for name, value in settings.kwargs.items() if name not in {*taken, *_NOT_HERE}}
    problems += [f"train.optm_kwargs.{name}: {problem}" for name, problem in find_wrong_types(cls, free)]
    found = f'train.optm_name: found "{settings.name}"'
    if "lr" not in parameters:
        problems.append(f"{found}; it takes no lr, which train.optm_lr is given as")
    if _wants_closure(cls):
        problems.append(f"{found}; its step computes the loss again (a closure), which is not done here; use another")
    if problems:
        raise UserError("\n".join(problems))
    return {**taken, **_implementation(settings.impl, parameters), **fit_values(cls, settings.kwargs)}


def _wants_closure(cls: Any) -> bool:
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _takes(parameter: inspect.Parameter | None, value: object) -> bool:
    """Whether an argument is there, in the form that a key has: a number, or a pair of numbers."""
    if parameter is None:
        return False
    if isinstance(value, tuple):
        return isinstance(parameter.default, tuple) and len(parameter.default) == len(value)
    return isinstance(parameter.default, int | float)


def _implementation(impl: str, parameters: Mapping[str, inspect.Parameter]) -> dict[str, bool]:
    """``train.optm_impl`` where a class has a choice; one without a fused step chooses by itself in place of it."""
    if "fused" in parameters:
        return {"fused": impl == "fused", "foreach": impl == "foreach"}
    if "foreach" in parameters and impl != "fused":
        return {"foreach": impl == "foreach"}
    return {}


def _unknown_arguments(
    settings: Hyperparameters, parameters: Mapping[str, inspect.Parameter], taken: Mapping[str, object]
) -> Iterator[str]:
    places = {**{name: _OWN_KEYS[name] for name in taken}, **_NOT_HERE}
    known = sorted(set(parameters) - set(places))
    open_end = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in settings.kwargs:
        if short_name(settings.name).endswith("8bit"):
            yield f"train.optm_kwargs.{name}: the 8-bit optimisers take no further arguments here"
        elif name in places:
            yield f"train.optm_kwargs.{name}: is given by {places[name]}"
        elif name not in known and not open_end:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            yield f"train.optm_kwargs.{name}: {find_kind(settings.name).place} has no such argument; {hint}"


def _idle_keys(settings: Hyperparameters, taken: Mapping[str, object]) -> Iterator[str]:
    for name in sorted(settings.changed - set(taken)):
        yield (
            f"{_OWN_KEYS[name]}: would have no effect, as {find_kind(settings.name).place} takes no such {name}; "
            f"leave it out (--{_OWN_KEYS[name]}=none), and give what it takes in train.optm_kwargs"
        )
