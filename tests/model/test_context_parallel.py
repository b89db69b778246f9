"""Tokens of a denoiser split over ranks: the numbers of one rank, and what is refused."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl.policy.model import tiny
from cosmos_rl.policy.model.context_parallel import find_modules
from cosmos_rl.policy.model.context_plans import PLANS, REASONS, find_problem
from cosmos_rl.policy.model.tiny.zoo import MAKERS
from tests.support.split_on_ranks import compare_on_ranks

SPLIT = ("wan", "wan2.2-5b")
"""Tiny models, at least one of each class that has a plan."""
WITH_FOUR_HEADS = ("wan:4", "wan2.2-5b:4")


def denoiser_of(family: str) -> Any:
    module, _, function = MAKERS[family].partition(":")
    torch.manual_seed(0)
    return getattr(importlib.import_module(f"cosmos_rl.policy.model.tiny.{module}"), function)().transformer


def require_a_place_for_every_name(family: str) -> None:
    denoiser = denoiser_of(family)
    plan = PLANS[type(denoiser).__name__]
    assert denoiser.config[plan.heads] > 0
    for name in (*plan.inputs, *plan.outputs, plan.gathered):
        assert find_modules(denoiser, name), name
    for name, cuts in plan.inputs.items():
        for module in find_modules(denoiser, name):
            assert set(cuts) <= inspect.signature(module.forward).parameters.keys(), (name, cuts)
    assert sum(len(find_modules(denoiser, name)) for name in plan.attention) >= 2


def test_a_plan_names_what_the_model_has() -> None:
    require_a_place_for_every_name("wan")


@pytest.mark.zoo
@pytest.mark.parametrize("family", SPLIT[1:])
def test_every_plan_names_what_its_model_has(family: str) -> None:
    require_a_place_for_every_name(family)


def test_heads_must_divide_and_the_message_says_what_does() -> None:
    assert find_problem("WanTransformer3DModel", {"num_attention_heads": 12}, 6) is None
    assert find_problem("WanTransformer3DModel", {"num_attention_heads": 12}, 1) is None
    problem = find_problem("WanTransformer3DModel", {"num_attention_heads": 12}, 8)
    assert problem == (
        "policy.parallelism.cp_size = 8: each rank computes as many attention heads, but those of "
        "WanTransformer3DModel, 12 (num_attention_heads), are not a multiple of 8; set it to one of 1, 2, 3, 4, 6, 12"
    )


@pytest.mark.parametrize("name", [*REASONS, "NobodysTransformer"])
def test_a_denoiser_without_a_plan_is_refused_by_name(name: str) -> None:
    assert find_problem(name, {}, 1) is None
    problem = find_problem(name, {}, 2)
    assert problem is not None
    assert problem.startswith(f"policy.parallelism.cp_size = 2: the tokens of {name} cannot be split over ranks: ")
    assert REASONS.get(name, "there is no plan for it") in problem


@pytest.mark.process
@pytest.mark.zoo
@pytest.mark.parametrize(("ranks", "families"), [(2, SPLIT), (4, WITH_FOUR_HEADS)], ids=["two", "four"])
def test_split_tokens_give_the_output_and_the_gradients_of_one_rank(
    tmp_path: Path, ranks: int, families: tuple[str, ...]
) -> None:
    """All weights and an adapter, with and without checkpointing, lengths that do not divide among them."""
    for family in {name.partition(":")[0] for name in families}:
        tiny.build(family, tmp_path / family, "unit", 0)
    compare_on_ranks(ranks, families, tmp_path)
