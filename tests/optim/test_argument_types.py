"""Values of keyword arguments whose type a class cannot take are named from its signature, and no others."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Optional

import pytest
import torch

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.optimizer import optimizer_problems
from cosmos_rl.optim.argument_types import find_wrong_types, fit_values
from cosmos_rl.optim.classes import find_class
from cosmos_rl.optim.optimizer import Optimizer
from cosmos_rl.policy.config import Config
from tests.optim.test_optimizers import build, descend, weights

if TYPE_CHECKING:
    from nowhere import Unknown  # pyright: ignore[reportMissingImports]


class Annotated:
    def __init__(
        self,
        params: Any,
        rate: float = 0,
        steps: int = 5,
        decay: int = 0,
        named: "Optional[str]" = None,  # noqa: UP045 - as older packages have it
        implicit: float = None,  # pyright: ignore[reportArgumentType] # noqa: RUF013
        kind: Literal["a", "b"] = "a",
        pair: tuple[float | torch.Tensor, float | None] = (1.0, None),
        several: Sequence[int] = (1,),
        hook: Callable[[], None] | None = None,
        *,
        flag: bool | None = None,
    ) -> None: ...


class Plain:
    def __init__(self, params, number=0, flag=False, text="a", pair=(0.9, 0.99), unknown=None, needed=..., **more): ...  # pyright: ignore


class Unreadable:
    def __init__(self, params: "Unknown", rate: "float" = 1.0) -> None: ...


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (Annotated, {"rate": 1, "steps": 3, "named": None, "implicit": None, "flag": None}),
        (Annotated, {"rate": float("inf"), "named": "x", "implicit": 2, "kind": "b", "flag": 1, "several": [1, 2]}),
        (Annotated, {"pair": [1, None]}),
        (Annotated, {"decay": 0.01}),
        (Annotated, {"pair": (1.0, 2)}),
        (Plain, {"number": 0.5, "flag": True, "text": "b", "pair": [1, 2], "unknown": "x", "needed": [1], "other": {}}),
        (Plain, {"flag": 0}),
        (Unreadable, {"rate": 2}),
        (find_class("Adafactor"), {"eps": [1e-30, 1], "beta2_decay": -1, "d": 2}),
        (find_class("Prodigy"), {"beta3": 0.9, "d0": 1, "growth_rate": 2, "decouple": False, "slice_p": 11}),
        (find_class("Muon"), {"ns_coefficients": [1, 2.0, 3], "adjust_lr_fn": "original", "nesterov": False}),
    ],
)
def test_what_a_class_takes_is_not_refused(cls: Any, values: dict[str, object]) -> None:
    assert list(find_wrong_types(cls, values)) == []


@pytest.mark.parametrize(
    ("cls", "name", "value", "problem"),
    [
        (Annotated, "rate", "fast", 'found "fast"; allowed: a number, by default 0.0'),
        (Annotated, "rate", True, "found true; allowed: a number, by default 0.0"),
        (Annotated, "rate", [1.0], "found [1.0]; allowed: a number, by default 0.0"),
        (Annotated, "steps", 2.5, "found 2.5; allowed: a whole number, by default 5"),
        (Annotated, "named", 3, "found 3; allowed: a text"),
        (Annotated, "implicit", "x", 'found "x"; allowed: a number'),
        (Annotated, "kind", "c", 'found "c"; allowed: "a", "b", by default "a"'),
        (Annotated, "pair", [1.0], "found [1.0]; allowed: [a number, a number], by default [1.0, null]"),
        (Annotated, "pair", 1.0, "found 1.0; allowed: [a number, a number], by default [1.0, null]"),
        (Annotated, "flag", "yes", 'found "yes"; allowed: true or false'),
        (Annotated, "flag", 2, "found 2; allowed: true or false"),
        (Plain, "number", "1", 'found "1"; allowed: a number, by default 0'),
        (Plain, "flag", "no", 'found "no"; allowed: true or false, by default false'),
        (Plain, "text", 1, 'found 1; allowed: a text, by default "a"'),
        (Plain, "pair", 0.9, "found 0.9; allowed: a list, by default [0.9, 0.99]"),
        (Unreadable, "rate", "x", 'found "x"; allowed: a number, by default 1.0'),
    ],
)
def test_a_wrong_type_is_named_with_what_is_allowed(cls: Any, name: str, value: object, problem: str) -> None:
    assert list(find_wrong_types(cls, {name: value})) == [(name, problem)]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("Prodigy", {"d_coef": "large"}, 'd_coef: found "large"; allowed: a number, by default 1.0'),
    ("torch.optim.NAdam", {"momentum_decay": "x"}, 'momentum_decay: found "x"; allowed: a number, by default 0.004'),
    ("Muon", {"ns_steps": 5.5}, "ns_steps: found 5.5; allowed: a whole number, by default 5"),
    ("Muon", {"ns_steps": True}, "ns_steps: found true; allowed: a whole number, by default 5"),
    ("Muon", {"ns_steps": "5"}, 'ns_steps: found "5"; allowed: a whole number, by default 5'),
    ("Muon", {"momentum": [0.9, 0.95]}, "momentum: found [0.9, 0.95]; allowed: a number, by default 0.95"),
]


@pytest.mark.parametrize(("name", "kwargs", "problem"), WRONG)
def test_check_and_training_say_the_same(name: str, kwargs: dict[str, Any], problem: str) -> None:
    config = Config.from_dict({"train": {"optm_name": name, "optm_kwargs": kwargs}})
    assert optimizer_problems(config) == [f"train.optm_kwargs.{problem}"]
    with pytest.raises(UserError) as raised:
        build(weights(), name, **kwargs)
    assert str(raised.value) == f"train.optm_kwargs.{problem}"


def test_an_argument_is_named_once() -> None:
    config = Config.from_dict({"train": {"optm_name": "AdamW", "optm_kwargs": {"betas": 1, "lr": "x", "amsgrad": 3}}})
    keys = [problem.partition(":")[0] for problem in optimizer_problems(config)]
    assert sorted(keys) == [f"train.optm_kwargs.{name}" for name in ("amsgrad", "betas", "lr")]


@pytest.mark.parametrize(
    ("cls", "name", "value", "expected"),
    [
        (Annotated, "steps", 1e3, 1000),
        (Annotated, "several", [2.0, 3], (2, 3)),
        (Annotated, "decay", 0.01, 0.01),
        (Annotated, "rate", 1e30, 1e30),  # whatever its default
        (Annotated, "pair", [1.0, 2.0], (1.0, 2.0)),
        (Plain, "other", 3.0, 3.0),
        (find_class("Muon"), "ns_steps", 5.0, 5),
        (find_class("Prodigy"), "slice_p", 1.1e1, 11),  # by its default alone
        (find_class("Prodigy"), "d_coef", 2.0, 2.0),
    ],
)
def test_a_whole_number_as_a_float_reaches_the_class_as_it_takes_it(
    cls: Any, name: str, value: object, expected: object
) -> None:
    assert list(find_wrong_types(cls, {name: value})) == []
    found = fit_values(cls, {name: value})
    assert found == {name: expected}
    assert repr(found[name]) == repr(expected)


def test_an_optimiser_steps_with_a_whole_number_that_was_written_as_a_float() -> None:
    steps: list[torch.Tensor] = []
    for count in (3, 3.0):
        params = weights()
        descend(params, build(params, "Muon", ns_steps=count), range(3))
        steps.append(params["a"].detach())
    assert torch.equal(*steps)


def test_a_list_reaches_the_class_as_the_tuple_that_it_takes() -> None:
    optimizer: Optimizer = build(weights(), "Adafactor", eps=[1e-20, 1])
    assert optimizer.torch_optimizer.defaults["eps"] == (1e-20, 1)
