"""Tokens of a denoiser split over ranks: the numbers of one rank, and what is refused."""

import inspect
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import attention_backend

from cosmos_rl.distributed.context import process_group
from cosmos_rl.errors import UserError
from cosmos_rl.policy.model import tiny
from cosmos_rl.policy.model.context_parallel import find_modules, split_over_peers
from cosmos_rl.policy.model.context_plans import PLANS, REASONS, find_problem
from cosmos_rl.policy.model.driver.loading import load_pipeline
from tests.support.paths import ROOT
from tests.support.split_on_ranks import compare_on_ranks

SPLIT = (
    *("wan", "wan2.2-5b", "cosmos-predict2.5", "ltx", "hunyuan-video", "flux", "chroma", "flux2-klein", "qwen-image"),
    *("sd3", "aura-flow", "cogview4", "lumina2", "z-image", "wan-i2v", "hunyuan-video-i2v", "ltx-i2v", "flux-kontext"),
)
"""Tiny models, at least one of each class that has a plan."""
WITH_FOUR_HEADS = ("wan:4", "cosmos-predict2.5:4", "flux:4", "qwen-image:4")


def require_a_place_for_every_name(family: str, folder: Path) -> None:
    denoiser = load_pipeline(str(tiny.build(family, folder / family, "unit", 0))).transformer
    plan = PLANS[type(denoiser).__name__]
    assert denoiser.config[plan.heads] > 0
    for name in (*plan.inputs, *plan.outputs, plan.gathered):
        assert find_modules(denoiser, name), name
    for name, cuts in plan.inputs.items():
        for module in find_modules(denoiser, name):
            known = inspect.signature(module.forward).parameters
            takes_any = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in known.values())
            assert takes_any or set(cuts) <= known.keys(), (name, cuts)
    assert sum(len(find_modules(denoiser, name)) for name in plan.attention) >= 2


def test_a_plan_names_what_the_model_has(tmp_path: Path) -> None:
    require_a_place_for_every_name("wan", tmp_path)


@pytest.mark.zoo
@pytest.mark.parametrize("family", SPLIT[1:])
def test_every_plan_names_what_its_model_has(family: str, tmp_path: Path) -> None:
    require_a_place_for_every_name(family, tmp_path)


def test_every_plan_has_a_family_that_is_compared() -> None:
    compared = [name.partition(":")[0] for name in SPLIT]
    assert len(compared) == len(set(compared)) > len(PLANS)
    assert not PLANS.keys() & REASONS.keys()


def test_the_page_names_every_class_that_is_split_or_refused() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8").partition("## Context parallelism")[2]
    assert [name for name in (*PLANS, *REASONS) if f"`{name}`" not in page] == []


def test_a_group_of_one_changes_nothing_and_a_block_alone_is_refused() -> None:
    denoiser = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        ffn_dim=16,
        num_layers=1,
    )
    inputs = torch.randn(1, 4, 3, 4, 4), torch.tensor([500.0]), torch.randn(1, 5, 8)
    with process_group("cpu"), torch.no_grad():
        expected = denoiser(*inputs).sample
        group = torch.distributed.group.WORLD
        assert group is not None
        split_over_peers(denoiser, group)
        assert torch.equal(denoiser(*inputs).sample, expected)
        with pytest.raises(RuntimeError, match="outside of a call of the whole"):
            denoiser.proj_out(torch.randn(1, 3, 24))
        times = torch.full((1, 5), 500.0)  # one for each token, of which there are 12
        with pytest.raises(RuntimeError, match="12 tokens of the stream image, which has 5"):
            denoiser(inputs[0], times, inputs[2])
        unsplit = "called it 0 times instead of once; unset DIFFUSERS_ATTN_BACKEND"
        with attention_backend("flex"), pytest.raises(UserError, match=unsplit):  # as by the variable
            denoiser(*inputs)


def test_heads_must_divide_and_the_message_says_what_does() -> None:
    assert find_problem("WanTransformer3DModel", {"num_attention_heads": 12}, 6) is None
    assert find_problem("WanTransformer3DModel", {"num_attention_heads": 12}, 1) is None
    problem = find_problem("WanTransformer3DModel", {"num_attention_heads": 12}, 8)
    assert problem == (
        "policy.parallelism.cp_size = 8: each rank computes as many attention heads, but WanTransformer3DModel has 12, "
        "which is not a multiple of 8; set it to one of 1, 2, 3, 4, 6, 12"
    )


@pytest.mark.parametrize("name", sorted(PLANS))
def test_a_configuration_that_leaves_the_heads_to_the_default_is_not_refused(name: str) -> None:
    assert find_problem(name, {}, 2) is None  # the loaded denoiser has the number, and is asked for it


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
