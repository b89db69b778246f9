"""How samples are dealt to optimiser steps, and what is reduced over ranks."""

import itertools
import math
import threading
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from cosmos_rl.distributed.context import Context
from cosmos_rl.launcher.rl_plan import rl_plan
from cosmos_rl.policy.config import Config, DiffusersConfig
from cosmos_rl.policy.config.policy import SampleConfig
from cosmos_rl.policy.trainer.data_parallel import optimizer_batches


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(73, 72, [37, 36]), (144, 72, [72, 72]), (72, 72, [72]), (5, 72, [5]), (200, 72, [67, 67, 66]), (0, 72, [])],
)
def test_the_optimiser_batches_of_a_pass_are_as_equal_as_can_be(count: int, size: int, sizes: list[int]) -> None:
    kept = [3 * i for i in range(count)]
    batches = optimizer_batches(kept, size=size, passes=2, seed=0, purpose="nft", step=1)
    assert [len(batch) for batch in batches] == 2 * sizes
    passes = [list(itertools.chain(*part)) for part in (batches[: len(sizes)], batches[len(sizes) :])]
    assert all(sorted(each) == kept for each in passes)
    if len(sizes) > 1:
        assert passes[0] != passes[1] != kept  # shuffled, each in its own way
    assert optimizer_batches(kept, size=None, passes=1, seed=0, purpose="nft", step=1) == ([kept] if kept else [])


def test_the_share_of_levels_is_that_of_the_decimal_number() -> None:
    """A float just below the product, 28.999999999999996 for 0.58 x 50, must not cost a level."""
    diffusers = {"timesteps_fraction": 0.58, "sample": {"num_steps": 50}}
    job = {"type": "grpo", "trainer_type": "diffusion_nft"}
    config = Config.from_dict({"policy": {"diffusers": diffusers}, "train": {"train_policy": job}})
    assert rl_plan(config).levels == 29
    for steps in range(1, 101):
        for percent in range(1, 101):
            config = DiffusersConfig(timesteps_fraction=percent / 100, sample=SampleConfig(num_steps=steps))
            assert config.trained_levels == math.floor(Fraction(percent, 100) * steps), (steps, percent)


# ---- over ranks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Context], object]], list[object]]:
    """Runs a function as two ranks, threads here, that are joined by gloo itself."""
    place = threading.local()

    def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        place.group.allreduce([tensor], options).wait()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)

    def run(function: Callable[[Context], object]) -> list[object]:
        store, results = dist.HashStore(), [None, None]

        def rank(number: int) -> None:
            place.group = dist.ProcessGroupGloo(store, number, 2)
            results[number] = function(Context(torch.device("cpu"), number, 2))

        threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    return run


@pytest.mark.parametrize("lost", [0, 1])
def test_a_maximum_over_ranks_keeps_nan_whoever_has_it(
    two_ranks: Callable[[Callable[[Context], object]], list[object]], lost: int
) -> None:
    found = two_ranks(lambda context: context.max_over_ranks([math.nan if context.rank == lost else 1.0, context.rank]))
    for values in found:
        assert math.isnan(values[0])  # type: ignore[index]
        assert values[1] == 1.0  # type: ignore[index]
    assert two_ranks(lambda context: context.max_over_ranks([-math.inf])) == [[-math.inf]] * 2
    assert math.isnan(Context(torch.device("cpu")).max_over_ranks([math.nan])[0])
