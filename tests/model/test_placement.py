"""Which parts of a pipeline are on the device at the same time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_rl.policy.model.placement import Placement

DEVICE, HOST = torch.device("cuda"), torch.device("cpu")


class Part(nn.Module):
    """A part that says where it is, on a machine that has no such place; it writes down what is on the device."""

    def __init__(self, everything: list["Part"], log: list[str], name: str) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.place, self.name, self._log = HOST, name, log
        self._everything = everything
        everything.append(self)

    def to(self, *args: Any, **kwargs: Any) -> "Part":
        self.place = args[0]
        return self

    def forward(self, value: Tensor | None = None) -> None:
        present = sorted(part.name for part in self._everything if part.place == DEVICE)
        self._log.append(f"{self.name}: {' '.join(present)}")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def parts(log: list[str]) -> Sequence[Part]:
    """Two encoders and a denoiser."""
    made: list[Part] = []
    return [Part(made, log, name) for name in ("clip", "t5", "denoiser")]


def test_encoders_come_one_after_the_other(parts: Sequence[Part], log: list[str]) -> None:
    clip, t5, denoiser = parts
    placement = Placement(DEVICE, at_rest=True)
    placement.bring(denoiser)
    with placement.in_turns([clip], [t5]):
        clip()
        clip()
        t5()
    assert log == ["clip: clip denoiser", "clip: clip denoiser", "t5: denoiser t5"]
    assert [part.place for part in parts] == [HOST, HOST, DEVICE]


def test_a_denoiser_leaves_while_texts_are_encoded_and_comes_back(parts: Sequence[Part], log: list[str]) -> None:
    clip, t5, denoiser = parts
    placement = Placement(DEVICE, at_rest=True)
    placement.bring(denoiser)
    with placement.in_turns([clip, t5], [denoiser]):
        with placement.in_turns([clip], [t5]):  # a call inside of what encodes many texts
            clip()
        t5()
        denoiser()
    assert log == ["clip: clip", "t5: clip t5", "denoiser: denoiser"]
    assert [part.place for part in parts] == [HOST, HOST, DEVICE]


def test_what_is_not_called_is_not_moved_and_a_call_of_a_module_inside_counts(
    parts: Sequence[Part], log: list[str]
) -> None:
    clip, t5, denoiser = parts
    placement = Placement(DEVICE, at_rest=True)
    with placement.in_turns([clip, t5], [denoiser]):
        clip.inner("anything")
        assert [part.place for part in parts] == [DEVICE, HOST, HOST]
    assert [part.place for part in parts] == [HOST, HOST, HOST]


def test_parts_are_where_they_were_after_an_error(parts: Sequence[Part], log: list[str]) -> None:
    clip, t5, denoiser = parts
    placement = Placement(DEVICE, at_rest=True)
    placement.bring(denoiser)
    with pytest.raises(RuntimeError), placement.in_turns([clip, t5], [denoiser]), placement.on_device(t5):
        clip()
        raise RuntimeError
    assert [part.place for part in parts] == [HOST, HOST, DEVICE]
    denoiser()
    assert log == ["clip: clip t5", "denoiser: denoiser"]
    assert not any(module._forward_pre_hooks for part in parts for module in part.modules())


def test_nothing_moves_where_parts_rest_on_the_device() -> None:
    placement, real = Placement(HOST, at_rest=True), nn.Linear(2, 2)
    with placement.in_turns([real], [nn.Linear(2, 2)]), placement.on_device(real):
        assert not real._forward_pre_hooks
