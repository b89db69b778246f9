"""Where the reward service is: environment variables of three generations. No torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.validation_sets import list_validation_sets
from cosmos_rl.utils.logging import logger

_GENERATIONS = ("REMOTE_REWARD", "WFM_REWARD", "DIFFUSION_REWARD")
"""Beginnings of the variables' names, the newest first."""
_TIMES = {
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_BASE_S": 30.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_PER_MB_S": 3.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_MIN_S": 60.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_MAX_S": 600.0,
    "REMOTE_REWARD_ENQUEUE_CONNECT_TIMEOUT_S": 100.0,
}
_FIXED = "REMOTE_REWARD_ENQUEUE_TIMEOUT_S"
_already_warned: set[str] = set()


@dataclass(frozen=True)
class Access:
    """Addresses of the service and how to reach it."""

    enqueue_url: str = field(repr=False)
    fetch_url: str = field(repr=False)
    token: str = field(repr=False)
    names: Mapping[str, str]
    """"ENQUEUE_URL", "FETCH_URL" and "TOKEN" -> the variable that gave each, for messages."""
    pins_replica: bool
    """Whether results are asked for at the replica that took the request."""
    connect_s: float
    fixed_s: float | None
    base_s: float
    per_mb_s: float
    min_s: float
    max_s: float

    def upload_s(self, size: int) -> float:
        """Seconds that sending ``size`` bytes may take: fixed, or clamp(base + per MiB, min, max)."""
        if self.fixed_s is not None:
            return self.fixed_s
        return min(max(self.base_s + self.per_mb_s * size / 2**20, self.min_s), self.max_s)


def read_service_access() -> Access:
    """What the environment says.

    Raises:
        UserError: an address is missing or is none.
    """
    values, names = {}, {}
    for what in ("ENQUEUE_URL", "FETCH_URL", "TOKEN"):
        names[what], values[what] = _variable(what)
    problems = [problem for what in ("ENQUEUE_URL", "FETCH_URL") if (problem := _wrong(names[what], values[what]))]
    if problems:
        raise UserError("\n".join(problems))
    times = {name: _seconds(name, default) for name, default in _TIMES.items()}
    base, per_mb, least, most, connect = times.values()
    return Access(
        values["ENQUEUE_URL"],
        values["FETCH_URL"],
        values["TOKEN"],
        names,
        os.environ.get("COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA") != "1",
        connect_s=connect,
        fixed_s=_seconds(_FIXED, 0.0) or None,
        base_s=base,
        per_mb_s=per_mb,
        min_s=least,
        max_s=most,
    )


def find_missing_access(config: Config) -> list[str]:
    """What the environment lacks for the rewards of ``config``, one line each; nothing is asked over the network."""
    if not job_kind(config).online:
        return []
    job = online_table(config)
    if job.bypass_reward:
        return []
    validates = any(one.config.validation.remote_reward is not None for one in list_validation_sets(config))
    if not job.use_remote_reward and not validates:
        return []
    found = (_variable(what) for what in ("ENQUEUE_URL", "FETCH_URL"))
    return [problem for name, value in found if (problem := _wrong(name, value))]


def _variable(what: str) -> tuple[str, str]:
    """Name and value of the newest variable that is set."""
    newest, *_ = names = [f"{generation}_{what}" for generation in _GENERATIONS]
    found = {name: value for name in names if (value := os.environ.get(name, "").strip())}
    if not found:
        return newest, ""
    name, value = next(iter(found.items()))
    if name != newest:
        _warn_once(f"{name} is the name of an older version; write {newest}")
    if len(set(found.values())) > 1:
        _warn_once(f"{' and '.join(found)} differ; {name} counts")
    return name, value


def _warn_once(text: str) -> None:
    if text not in _already_warned:
        _already_warned.add(text)
        logger.warning(text)


def _wrong(name: str, value: str) -> str:
    if not value:
        example = "enqueue"
        if name.endswith("FETCH_URL"):
            example = "pull"
        return (
            f"{name}: missing in the environment; the rewards of the configuration need the address of the reward "
            f"service, like https://HOST:PORT/api/reward/{example} (and REMOTE_REWARD_TOKEN, if it wants one)"
        )
    try:
        scheme, host = urlsplit(value).scheme, urlsplit(value).hostname
    except ValueError:
        scheme, host = "", None
    # the value itself is not shown: an address may hold a password
    if scheme in ("http", "https") and host:
        return ""
    return f"{name}: is not an address that begins with http(s)://"


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        logger.warning('%s: found "%s"; allowed: seconds, more than 0; the default is taken', name, text)
        return default
    return value
