"""What a tracker knows of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrackedRun:
    """How a run is called in a tracker."""

    folder: Path
    project: str
    group: str | None
    name: str
    run_id: str
    """The name of the run folder, so that a resumed run continues under the same id."""
    config: dict[str, Any]
    start: int = 0
    """Steps that are done already; later ones of an interrupted attempt will be logged again."""
