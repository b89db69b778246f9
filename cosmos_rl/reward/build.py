"""All rewards of a job behind one call."""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import torch

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, GrpoPolicyConfig, LocalRewardConfig, RemoteRewardConfig
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.reward.combine import RewardSum, Scores, combine
from cosmos_rl.reward.functions import LocalReward, RewardFns, build_given_rewards, load_configured_rewards
from cosmos_rl.reward.futures import join_futures
from cosmos_rl.reward.local import LocalScorer
from cosmos_rl.reward.metadata import Located, list_keys, require_sendable
from cosmos_rl.reward.monitor import ScoreMonitor
from cosmos_rl.reward.remote import RemoteScorer
from cosmos_rl.reward.table import Rewards, RewardTable, ScoringRequest
from cosmos_rl.utils.logging import logger

_TRAIN = "train.train_policy"


class Scorer(Protocol):
    """One source of scores."""

    @property
    def sum(self) -> RewardSum:
        """How its scores are added up."""
        ...

    def submit(self, request: ScoringRequest) -> "Future[Scores]":
        """Begin to score."""
        ...

    def close(self) -> None:
        """End threads and connections."""
        ...


def make_rewards(
    config: Config,
    reward_fns: RewardFns | None,
    val_reward_fns: RewardFns | None = None,
    *,
    validation: bool,
    names: Sequence[str] = (),
    prompts: Sequence[Located] = (),
) -> Rewards:
    """The rewards that ``config`` and the script ask for; connections are made with the first request.

    Args:
        config: of a job with ``train.train_policy.type = "grpo"``.
        reward_fns: functions of the script, which take the place of those in the configuration.
        val_reward_fns: the same for validation alone.
        validation: those for validation. What is not set for it is as in training; what is set may be another reward.
        names: of those to take, as metrics show them; empty: all.
        prompts: whose samples are scored; what any of them knows is sent to the service for every sample.

    Raises:
        UserError: no reward at all, a name twice, a function that cannot be found or used, no address of the service,
            or metadata that cannot be sent to it.
    """
    job = online_table(config)
    if job.bypass_reward:
        return _NoRewards()
    functions, table = _functions(config, job, reward_fns, val_reward_fns, validation)
    remote = _remote_table(config, job, validation)
    requested = [] if remote is None or not remote.scale else [name for name in remote.shown_names if name]
    if names:
        functions, requested = _choose(functions, requested, names)
    scorers: list[Scorer] = []
    sends_latents = False
    try:
        if functions:
            scorers.append(LocalScorer(functions, table))
        if remote is not None and requested:
            require_sendable(prompts)
            scorers.append(RemoteScorer(remote, requested, list_keys(metadata for _, metadata in prompts)))
            sends_latents = remote.payload == "latents"
        _check(scorers, validation)
    except BaseException:
        for scorer in scorers:
            scorer.close()
        raise
    return _AllRewards(scorers, each=job.normalise_rewards == "each", sends_latents=sends_latents)


def _choose(
    functions: Sequence[LocalReward], requested: Sequence[str], names: Sequence[str]
) -> tuple[list[LocalReward], list[str]]:
    """Those of the functions, and of the scores that are ``requested`` of the service, that are named."""
    known = {one.name for one in functions} | set(requested)
    unknown = [name for name in names if name not in known]
    if unknown:
        allowed = ", ".join(sorted(known)) or "none, as there is none"
        raise UserError(f'rewards: found "{unknown[0]}"; allowed: {allowed}')
    return [one for one in functions if one.name in names], [name for name in requested if name in names]


def _remote_table(config: Config, job: GrpoPolicyConfig, validation: bool) -> RemoteRewardConfig | None:
    if validation and config.validation.remote_reward is not None:
        return config.validation.remote_reward
    if not job.use_remote_reward:
        return None
    return job.remote_reward


def _functions(
    config: Config,
    job: GrpoPolicyConfig,
    reward_fns: RewardFns | None,
    val_reward_fns: RewardFns | None,
    validation: bool,
) -> tuple[list[LocalReward], LocalRewardConfig]:
    table, key, given = job.local_reward, f"{_TRAIN}.local_reward", reward_fns
    if validation and config.validation.local_reward is not None:
        table, key, given = config.validation.local_reward, "validation.local_reward", None
    if validation and val_reward_fns is not None:
        given = val_reward_fns
    if given is None:
        return load_configured_rewards(table, key), table
    if table.reward_fns:
        names = ", ".join(entry.shown_name for entry in table.reward_fns)
        logger.warning("%s.reward_fns (%s): the functions of the script take their place", key, names)
    return build_given_rewards(given), table


def _check(scorers: Sequence[Scorer], validation: bool) -> None:
    rewards = [reward for scorer in scorers for reward in scorer.sum.rewards]
    if not rewards:
        raise UserError(
            f"no reward: set {_TRAIN}.use_remote_reward = true, or name functions in {_TRAIN}.local_reward, or give "
            "reward_fns to worker_entry.main"
        )
    twice = [name for name, count in Counter(reward.name for reward in rewards).items() if count > 1]
    if twice:
        raise UserError(f"rewards: the name {twice[0]} appears twice; give each a name of its own")
    factors = [scorer.sum.factor(reward) for scorer in scorers for reward in scorer.sum.rewards]
    if not validation and not any(factors):
        names = ", ".join(reward.name for reward in rewards)
        raise UserError(f"rewards: all have weight 0 or scale 0 ({names}), so there is nothing to train on")


class _AllRewards:
    """Asks all scorers at once and adds their scores up."""

    def __init__(self, scorers: Sequence[Scorer], *, each: bool, sends_latents: bool) -> None:
        """``each``: every reward is normalised by itself, so the bounds of its table's sum cut it alone."""
        self._scorers = scorers
        self.sends_latents = sends_latents
        self._sums = [scorer.sum for scorer in scorers]
        rewards = [reward for one in self._sums for reward in one.rewards]
        self._names = tuple(reward.name for reward in rewards)
        self.terms: Sequence[str] = tuple(reward.name for reward in rewards if reward.is_term)
        self._weights = {reward.name: one.factor(reward) for one in self._sums for reward in one.rewards}
        self.bounds: Mapping[str, tuple[float, float]] = {
            reward.name: one.bounds(reward) for one in self._sums for reward in one.rewards
        }
        self.origins: Mapping[str, str] = {reward.name: reward.origin for reward in rewards}
        alone = [replace(r, clip_min=self.bounds[r.name][0], clip_max=self.bounds[r.name][1]) for r in rewards]
        self._monitor = ScoreMonitor(alone if each else rewards)

    @property
    def names(self) -> Sequence[str]:
        return self._names

    @property
    def weights(self) -> Mapping[str, float]:
        return self._weights

    def submit(self, request: ScoringRequest) -> "Future[RewardTable]":
        asked = [one for one in self._scorers if any(request.asks(reward.name) for reward in one.sum.rewards)]
        parts, count = [scorer.submit(request) for scorer in asked], len(request.prompts)
        return join_futures(parts, lambda scores: self._build_table(scores, count))  # does not hold the media

    def _build_table(self, scores: list[Scores], count: int) -> RewardTable:
        """Of all rewards; NaN for ``count`` samples where one was not asked."""
        given = {name for part in scores for name in part.values}
        sums = [replace(one, rewards=tuple(r for r in one.rewards if r.name in given)) for one in self._sums]
        found = combine([one for one in sums if one.rewards], scores)
        nothing = torch.full((count,), torch.nan, dtype=torch.float64)
        found = replace(found, scores={name: found.scores.get(name, nothing) for name in self._names})
        self._monitor.check(found.scores)
        return found

    def close(self) -> None:
        for scorer in self._scorers:
            scorer.close()


class _NoRewards:
    """`bypass_reward = true`: every total is 0 and there are no scores."""

    names: Sequence[str] = ()
    terms: Sequence[str] = ()
    weights: Mapping[str, float] = MappingProxyType({})
    bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})
    origins: Mapping[str, str] = MappingProxyType({})
    sends_latents = False

    def submit(self, request: ScoringRequest) -> "Future[RewardTable]":
        table: Future[RewardTable] = Future()
        table.set_result(RewardTable(scores={}, total_N=torch.zeros(len(request.prompts), dtype=torch.float64)))
        return table

    def close(self) -> None:
        """Nothing was opened."""
