"""Sums whose bits do not depend on how the addends lie on ranks."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch

from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.exact_sum import expand_sum, round_sum
from cosmos_rl.distributed.pairwise import BlockwiseSum, PairwiseSum, add_rows


def tree_sum(values: Sequence[np.ndarray]) -> np.ndarray:
    """The definition: the left branch holds the largest power of two below the number of addends."""
    if len(values) == 1:
        return values[0]
    left = 1
    while 2 * left < len(values):
        left *= 2
    return tree_sum(values[:left]) + tree_sum(values[left:])


def addends(count: int) -> np.ndarray:
    """float32 ``[count, 50]`` of very different sizes."""
    random = np.random.default_rng(count)
    return (random.normal(size=(count, 50)) * 10.0 ** random.integers(-6, 6, (count, 50))).astype(np.float32)


def sum_on_ranks(values: np.ndarray, ranks: int) -> np.ndarray:
    """Rank r has the addends r, r + ranks, …"""
    total = PairwiseSum()
    for first in range(0, len(values), ranks):
        total.add({"weight": add_rows(torch.tensor(values[first : first + ranks]))})
    return total.take()["weight"].numpy()


@pytest.mark.parametrize("count", [*range(1, 18), 24, 40, 96])
def test_every_number_of_ranks_that_divides_makes_the_same_tree(count: int) -> None:
    values = addends(count)
    for ranks in (1, 2, 4, 8):
        if count % ranks == 0:
            assert np.array_equal(sum_on_ranks(values, ranks), tree_sum(list(values))), ranks


@pytest.mark.parametrize(("levels", "samples"), [(1, 1), (2, 5), (3, 11), (5, 6), (4, 16)])
def test_ranks_that_do_not_divide_a_block_fill_it_up_with_zeros(levels: int, samples: int) -> None:
    values = addends(levels * samples).reshape(levels, samples, -1)
    expected = tree_sum([tree_sum(list(block)) for block in values])
    for ranks in (1, 2, 4, 8):
        missing = np.zeros((-samples % ranks, values.shape[-1]), np.float32)
        total = BlockwiseSum()
        for block in values:
            filled = np.concatenate([block, missing])
            for first in range(0, len(filled), ranks):
                total.add({"weight": add_rows(torch.tensor(filled[first : first + ranks]))})
            total.end_block()
        assert np.array_equal(total.take()["weight"].numpy(), expected), ranks
        assert total.take() == {}


def test_a_block_without_gradients_is_a_branch_like_one_of_zeros() -> None:
    values = addends(6).reshape(3, 2, -1)
    sums = []
    for nothing in ({}, {"weight": torch.zeros(50)}):
        total = BlockwiseSum()
        for block in (nothing, *({"weight": torch.tensor(block.sum(0))} for block in values)):
            total.add(block)
            total.end_block()
        sums.append(total.take()["weight"].numpy())
    assert np.array_equal(*sums)


def test_one_addend_after_the_other_gives_other_bits() -> None:
    values = addends(24)
    one_by_one = np.add.accumulate(values)[-1]
    assert not np.array_equal(sum_on_ranks(values, 1), one_by_one)
    np.testing.assert_allclose(sum_on_ranks(values, 1), one_by_one, rtol=1e-4)


def test_what_an_addend_lacks_counts_as_nothing_and_the_sum_begins_again() -> None:
    total = PairwiseSum()
    for addend in ({"a": 1.0}, {"b": 2.0}, {"a": 4.0, "b": 8.0}):
        total.add({name: torch.tensor([value]) for name, value in addend.items()})
    assert {name: value.item() for name, value in total.take().items()} == {"a": 5.0, "b": 10.0}
    assert total.take() == {}


def test_three_ranks_are_no_branch_of_the_tree() -> None:
    with pytest.raises(ValueError, match="3 ranks make no block of a binary tree"):
        add_rows(torch.ones(3, 2))


def test_exact_sums_are_those_of_fractions_however_the_numbers_are_grouped() -> None:
    random = np.random.default_rng(0)
    values = (random.normal(size=200) * 2.0 ** random.integers(-140, 120, 200)).astype(np.float32).tolist()
    exact = float(sum(map(Fraction, values)))
    assert Context(torch.device("cpu")).sum_exactly([values, values[::-1], []]) == [exact, exact, 0.0]
    for ranks in (2, 3, 4):
        parts = [expand_sum(values[rank::ranks]) for rank in range(ranks)]
        assert sum(Fraction(term) for part in parts for term in part) == sum(map(Fraction, values))
        assert round_sum([term for part in parts for term in part]) == exact


def test_sums_that_are_not_finite_stay_so() -> None:
    sums = Context(torch.device("cpu")).sum_exactly([[1.0, math.nan], [math.inf, 2.0], [math.inf, -math.inf]])
    assert [math.isnan(value) for value in sums] == [True, False, True]
    assert sums[1] == math.inf
