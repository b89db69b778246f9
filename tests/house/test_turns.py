"""How the benchmarks take turns; no time is looked at."""

import pytest

from benchmarks.timing import median_ratio, take_turns


def test_loops_take_turns_in_changing_order_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []
    loops = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = take_turns(loops, 2, calls=2, after=lambda name: calls.append(f"after {name}"))
    one, other = ["a", "a", "after a"], ["b", "b", "after b"]
    assert calls == [*one, *other, *other, *one, *one, *other]
    assert {name: len(spent) for name, spent in times.items()} == {"a": 2, "b": 2}


def test_a_ratio_is_the_median_over_the_rounds_and_not_that_of_the_medians() -> None:
    assert median_ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2.0
    assert median_ratio([1.0, 8.0, 9.0], [4.0, 2.0, 9.0]) == 1.0
    with pytest.raises(ValueError, match="longer|shorter"):
        median_ratio([1.0], [1.0, 2.0])
