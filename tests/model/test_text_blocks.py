"""Text encoders that come to the device block by block."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.placement import Placement
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model
from tests.support.family_runs import PARAMS, TrainedFamily, family_toml

BLOCKS = "--policy.diffusers.offload_text_blocks=true"
TEXTS = ["a red square", "two birds & a boat", "a cat " * 9]


def leaves(cond: Any) -> list[Tensor]:
    """The tensors of conditions of either kind."""
    held = cond.to_tensors() if hasattr(cond, "to_tensors") else {**cond.text, **cond.negative}
    return [value for value in tree.tree_leaves(held) if isinstance(value, Tensor)]


def encode(path: Path, *options: str) -> tuple[Any, list[Tensor]]:
    model = build_model(load_config(path, options), Context(torch.device("cpu")), rest_on_cpu=False)
    return model, leaves(model.encode_prompts(TEXTS, ["blurred"] * 3))


def measure_most(encoders: list[nn.Module], run: Callable[[], object]) -> float:
    """The largest share of the encoders' bytes that has values at any call of a module in them."""
    weights = [weight for encoder in encoders for weight in encoder.parameters()]
    shares = [0.0]

    def note(*_: Any) -> None:
        held = sum(weight.nbytes for encoder in encoders for weight in encoder.parameters() if not weight.is_meta)
        shares.append(held / sum(weight.nbytes for weight in weights))

    hooks = [module.register_forward_hook(note) for encoder in encoders for module in encoder.modules()]
    run()
    for hook in hooks:
        hook.remove()
    return max(shares)


CHOSEN = ("sana", "sd3", "wan", "cosmos-predict2.5", "flux", "qwen-image", "flux2-klein", "hunyuan-video")
"""Of each kind of encoder."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(*one.values, id=one.id, marks=() if one.id == "sana" else pytest.mark.zoo)
        for one in PARAMS
        if one.id in CHOSEN
    ],
)
def test_the_conditions_have_the_same_bits_and_no_encoder_is_whole(family: TrainedFamily, tmp_path: Path) -> None:
    path = family_toml(tmp_path, family, job="nft")
    _, whole = encode(path)
    model, by_block = encode(path, BLOCKS)
    assert len(whole) == len(by_block) > 0
    assert all(torch.equal(a, b) for a, b in zip(whole, by_block, strict=True))
    encoders = model._encoders()
    assert all(weight.is_meta for encoder in encoders for weight in encoder.parameters())
    assert 0 < measure_most(encoders, lambda: model.encode_prompts(TEXTS)) < 0.7


class Encoder(nn.Module):
    """Says where its weights are, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    @property
    def device(self) -> torch.device:
        return self.layer.weight.device

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_an_encoder_that_is_named_twice_is_wrapped_once_and_both_of_a_class_have_one_class() -> None:
    first, second, place = Encoder(), Encoder(), Placement(torch.device("cpu"), at_rest=True)
    given = torch.randn(4, 3)
    expected = first(given), second(given)
    for part in (first, second, first):
        place.bring_by_block(part)
    assert type(first) is type(second)
    assert type(first).__mro__[1] is Encoder
    assert first.layer.weight.is_meta
    assert first.device == second.device == torch.device("cpu")
    assert all(map(torch.equal, (first(given), second(given)), expected))
    assert Encoder().device == torch.device("cpu")
