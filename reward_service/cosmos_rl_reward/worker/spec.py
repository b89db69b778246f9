"""How a reward is run, and how it is, as shown to clients."""

import time
from dataclasses import dataclass, field
from typing import Any

DECODE_QUEUE = "_decode"
HOST = "_host"  # key of a host's own state among those of its rewards; no reward can have either name


@dataclass(frozen=True)
class PoolSpec:
    """How a reward is run. ``message`` is the first thing its scorer gets."""

    name: str
    message: dict[str, Any]
    venv_python: str
    environment: dict[str, str]
    replicas: int
    max_batch: int
    max_wait_s: float
    deadline_s: float
    start_timeout_s: float
    max_attempts: int
    lazy: bool = False

    @property
    def decoding(self) -> bool:
        """Whether this is the latent decoder instead of a reward."""
        return self.name == DECODE_QUEUE


@dataclass
class Health:
    """State of a reward on this host, as shown to clients."""

    state: str = "loading"
    reason: str = ""
    since: float = field(default_factory=time.time)
    about: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    last_success: float = 0.0
