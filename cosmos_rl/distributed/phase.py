"""What this process is doing at the moment, for whoever shows it to a person. No torch."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

_entered: list["Phase"] = []
"""Of the thread that trains; others enter none."""


@dataclass(eq=False)
class Phase:
    """Something that takes a while."""

    name: str
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int = 0
    """Parts of it; 0: nothing is counted."""

    def count(self, done: int, total: int) -> None:
        """So many parts are done."""
        self.done, self.total = done, total


def current_phase() -> Phase | None:
    """The innermost phase; None: between two. Any thread may ask."""
    newest = _entered[-1:]
    return newest[0] if newest else None


def count_parts(done: int, total: int) -> None:
    """So many parts of the innermost phase are done."""
    phase = current_phase()
    if phase is not None:
        phase.count(done, total)


@contextlib.contextmanager
def enter_phase(name: str) -> Iterator[Phase]:
    """Within the block this process is in the phase ``name``."""
    phase = Phase(name)
    _entered.append(phase)
    try:
        yield phase
    finally:
        _entered.remove(phase)
