"""How a reward is run, and how it is, as shown to clients."""

import time
from dataclasses import dataclass, field
from typing import Any

from cosmos_rl_reward.config import WorkerArgs

DECODE_QUEUE = "_decode"
HOST = "_host"  # key of a host's own state among those of its rewards; no reward can have either name


@dataclass(frozen=True)
class PoolSpec:
    """How a reward is run. ``message`` is the first thing its scorer gets."""

    name: str
    message: dict[str, Any]
    workers: WorkerArgs
    max_attempts: int
    max_batch: int = 1
    max_wait_s: float = 0.0
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
