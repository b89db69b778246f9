"""Several prompt sets in one stream: shares, stages, epochs of each set, and any step by itself."""

import itertools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.data.set_schedule import SetSchedule
from cosmos_rl.data.set_stream import SetStream, group_by_set, interleave_sets
from cosmos_rl.data.streams import find_items
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import PromptSetConfig

WEIGHTS = st.lists(st.sampled_from([0.1, 0.25, 1 / 3, 0.7, 1.0, 2.0, 3.0, 7.5]), min_size=1, max_size=5)


def make_sets(*weights: float, **keys: Sequence[int | None]) -> tuple[PromptSetConfig, ...]:
    """Sets with these weights; of each key one value for each."""
    rows = [{"weight": weight, "label": f"s{i}", "name": "mock"} for i, weight in enumerate(weights)]
    return tuple(
        PromptSetConfig.model_validate({**row, **{key: values[i] for key, values in keys.items()}})
        for i, row in enumerate(rows)
    )


def draw_all(schedule: SetSchedule, steps: int) -> list[tuple[int, int]]:
    return [one for step in range(steps) for one in schedule.draw(step)]


def sorted_places(shares: Sequence[Fraction], count: int) -> list[int]:
    """Independent: the middle of each set's j-th part, sorted; of equal places the earlier set is first."""
    places = [(Fraction(2 * j + 1, 2) / p, i) for i, p in enumerate(shares) for j in range(count)]
    return [i for _, i in sorted(places)[:count]]


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(1, 7))
def test_the_order_is_that_of_exact_places(weights: list[float], per_step: int) -> None:
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    found = draw_all(SetSchedule(make_sets(*weights), per_step), 12)
    assert [number for number, _ in found] == sorted_places(shares, 12 * per_step)
    for chosen in range(len(weights)):  # each set is drawn in its own order, none left out
        assert [n for number, n in found if number == chosen] == list(range(sum(n == chosen for n, _ in found)))


@settings(max_examples=40, deadline=None)
@given(WEIGHTS)
def test_shares_are_exact_over_every_period_and_near_anywhere(weights: list[float]) -> None:
    schedule = SetSchedule(make_sets(*weights), 1)
    (stage,) = schedule.stages
    period, shares = stage.period, dict(stage.shares)
    length = min(2 * period + 5, 1000)
    drawn = np.array([number for number, _ in draw_all(schedule, length)])
    for number, share in shares.items():
        counts = np.concatenate([[0], np.cumsum(drawn == number)])
        if length > period:
            assert set(counts[period:] - counts[:-period]) == {share}
        apart = max(Fraction(abs(int(count) * period - n * share), period) for n, count in enumerate(counts))
        assert apart < 1 if len(shares) <= 3 else apart <= Fraction(1, 2) + Fraction(len(shares) * share, 2 * period)


def test_one_to_three_is_mixed_within_a_step_or_alternates_by_steps() -> None:
    sets = make_sets(3.0, 1.0)
    mixed = SetSchedule(sets, 8)
    assert all(Counter(n for n, _ in mixed.draw(step)) == {0: 6, 1: 2} for step in range(50))
    whole = SetSchedule(sets, 8, whole_steps=True)
    assert [{n for n, _ in whole.draw(step)} for step in range(8)] == [{0}, {0}, {1}, {0}] * 2
    assert [n for _, n in whole.draw(7)] == list(range(40, 48))  # five steps of the set went before


def test_stages_begin_and_end_at_their_steps_and_each_set_continues_where_it_was() -> None:
    sets = make_sets(1.0, 3.0, 1.0, first_step=[0, 4, 10], last_step=[10, 10, None])
    schedule = SetSchedule(sets, 4)
    counts = [Counter(n for n, _ in schedule.draw(step)) for step in range(14)]
    assert counts == [{0: 4}] * 4 + [{0: 1, 1: 3}] * 6 + [{2: 4}] * 4
    for number in range(3):
        own = [n for chosen, n in draw_all(schedule, 14) if chosen == number]
        assert own == list(range(len(own)))
    assert [(stage.first, stage.last) for stage in schedule.stages] == [(0, 4), (4, 10), (10, None)]


def test_a_step_without_a_set_is_an_error() -> None:
    schedule = SetSchedule(make_sets(1.0, first_step=[0], last_step=[3]), 2)
    assert len(schedule.draw(2)) == 2
    with pytest.raises(UserError, match="none is drawn in step 3"):
        schedule.draw(3)


def test_a_late_step_costs_no_more_than_the_first_and_floats_do_not_drift() -> None:
    sets = make_sets(0.1, 0.2, 0.7)
    schedule = SetSchedule(sets, 10)
    for step in (0, 10**6, 10**15):
        assert Counter(n for n, _ in schedule.draw(step)) == {0: 1, 1: 2, 2: 7}
    assert sorted(n for chosen, n in schedule.draw(10**15) if chosen == 1) == [2 * 10**15, 2 * 10**15 + 1]


def make_stream(lengths: Sequence[int], *weights: float, **keys: Sequence[int | None]) -> SetStream:
    ends = list(itertools.accumulate(lengths, initial=0))
    members = [range(a, b) for a, b in itertools.pairwise(ends)]
    return SetStream(members, SetSchedule(make_sets(*weights, **keys), 6), 40, seed=5)


def test_each_set_has_shuffled_epochs_of_its_own() -> None:
    stream = make_stream([7, 10], 1.0, 2.0)
    indices = [position.index for batch in stream.batches(0, 40) for position in batch]
    for members in stream.members:
        own = [index for index in indices if index in members]
        epochs = [own[i : i + len(members)] for i in range(0, len(own) - len(members) + 1, len(members))]
        assert len(epochs) > 2
        assert all(sorted(epoch) == list(members) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert (stream.length, stream.batch, stream.steps_until(1), stream.epoch_of(39)) == (17, 6, 40, 0)


def own_orders(stream: SetStream, first: int = 0) -> list[list[int]]:
    """Of each set which of its prompts are drawn from step ``first`` on, by their places in the set."""
    drawn = [position.index for batch in stream.batches(first, 60) for position in batch]
    return [[list(members).index(i) for i in drawn if i in members] for members in stream.members]


def test_the_epochs_of_a_set_are_in_an_order_that_no_other_set_weight_or_stage_changes() -> None:
    plain = own_orders(make_stream([6, 6, 4], 1.0, 1.0, 1.0))
    for lengths, weights, stages in (
        ([6, 11, 4], (1.0, 1.0, 1.0), {}),  # another size of another set
        ([6, 6, 4], (5.0, 0.5, 2.0), {}),  # other shares
        ([6, 6, 4], (1.0, 1.0, 1.0), {"first_step": [0, 3, 7], "last_step": [None, 30, None]}),  # stages
    ):
        for number, own in enumerate(own_orders(make_stream(lengths, *weights, **stages))):
            if lengths[number] == len(make_stream([6, 6, 4], 1.0, 1.0, 1.0).members[number]):
                both = min(len(own), len(plain[number]))
                assert both > 3 * lengths[number]
                assert own[:both] == plain[number][:both]
    assert plain[0][:60] != plain[1][:60]  # of sets of one size each has its own order
    ends = [len(own) for own in plain]
    for first in range(0, 60, 7):  # a resume within epochs of all of them draws what is left of each order
        rest = own_orders(make_stream([6, 6, 4], 1.0, 1.0, 1.0), first)
        assert [own[len(own) - len(left) :] for own, left in zip(plain, rest, strict=True)] == rest
        assert [end - len(left) for end, left in zip(ends, rest, strict=True)] == [2 * first] * 3


def test_without_shuffling_each_set_repeats_in_the_order_of_its_file() -> None:
    shuffled = make_stream([7, 3], 2.0, 1.0)
    stream = SetStream(shuffled.members, shuffled.schedule, 60, seed=5, shuffle=False)
    for members, own in zip(stream.members, own_orders(stream), strict=True):
        assert own == list(itertools.islice(itertools.cycle(range(len(members))), len(own)))


def test_a_step_is_the_same_by_itself_and_for_any_number_of_ranks() -> None:
    stream = make_stream([5, 3, 11], 2.0, 1.0, 1.0, first_step=[0, 0, 9])
    steps = list(stream.batches(0, 40))
    for step in (0, 8, 9, 10, 39):  # as a resume finds it: another object that begins there
        assert make_stream([5, 3, 11], 2.0, 1.0, 1.0, first_step=[0, 0, 9]).positions(step) == steps[step]
        assert [position.sample_id for position in steps[step]] == list(range(6 * step, 6 * step + 6))
        for ranks in (1, 2, 3):
            shares = [steps[step][rank::ranks] for rank in range(ranks)]
            merged = sorted((p for share in shares for p in share), key=lambda p: p.sample_id)
            assert merged == steps[step]
    assert find_items(stream, 40) == list(range(19))
    assert max(find_items(stream, 9)) < 8  # the third set is not drawn yet
    first, *_ = steps[20]
    others = list(stream.following(first))
    (own,) = [members for members in stream.members if first.index in members]
    assert others[0] == first.index
    assert sorted(others) == list(own)


def test_records_are_sorted_by_set_and_a_set_without_any_is_named() -> None:
    records = [PromptRecord("a", prompt_set=1), PromptRecord("b"), PromptRecord("c", prompt_set=1)]
    assert group_by_set(records, 2) == [[1], [0, 2]]
    assert [record.prompt for record in interleave_sets(records)] == ["b", "a", "c"]
    with pytest.raises(UserError, match=r"train.train_policy.dataset.sets.2: the data set has no prompts of it"):
        group_by_set(records, 3)
    with pytest.raises(UserError, match="data set element 0: prompt_set: found 1; allowed: 0 to 0, the numb"):
        group_by_set(records, 1)
