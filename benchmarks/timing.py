"""CPU time of what is measured in turn inside one process, so that a busy machine slows all of it."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def cpu_seconds(call: Callable[[], object], calls: int = 1) -> float:
    """CPU seconds of a call, as the mean of so many in a row."""
    began = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - began) / calls


def take_turns(
    loops: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    calls: int = 1,
    warm_up: int = 1,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Name -> CPU seconds of a call in each round.

    Args:
        calls: of each loop in a row, of which the mean is taken.
        warm_up: rounds before those that are counted.
        after: called with a loop's name after its turn; its time is not counted.
    """
    times: dict[str, list[float]] = {key: [] for key in loops}
    for number in range(warm_up + rounds):
        for key in sorted(loops, reverse=number % 2 == 1):  # none is always the first
            spent = cpu_seconds(loops[key], calls)
            after(key)
            if number >= warm_up:
                times[key].append(spent)
    return times


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
