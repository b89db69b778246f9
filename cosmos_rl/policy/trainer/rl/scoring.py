"""Scores of rollouts, asked for while the next samples are made, each with a deadline."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import TrainingStoppedError
from cosmos_rl.policy.config import GrpoPolicyConfig
from cosmos_rl.policy.model.diffusers.flow_model import FlowModel
from cosmos_rl.policy.trainer.rl.batch import build_scoring_request
from cosmos_rl.reward.by_set import SetRewards
from cosmos_rl.reward.table import Rewards, RewardTable
from cosmos_rl.rollout.sampler import Rollouts
from cosmos_rl.utils.logging import warn_of_all

_PATIENCE_S = 60.0
"""Seconds after which peers hear that scores are still awaited: far below the deadline of a collective."""


class Scoring:
    """The rewards of a task, asked for the samples of its model, once for all context-parallel peers."""

    def __init__(
        self,
        rewards: Rewards,
        model: FlowModel,
        job: GrpoPolicyConfig,
        chunk: int,
        context: Context,
        sets: SetRewards | None = None,
    ) -> None:
        """``chunk``: samples in one request. ``sets``: what scores the samples of which set; None: all score all."""
        self.rewards, self.sets = rewards, sets or SetRewards()
        self._model, self._job, self._chunk, self._context = model, job, chunk, context

    def submit(self, rollouts: Rollouts) -> "Future[RewardTable] | None":
        """Begin to score one chunk; None on a rank whose peer does so."""
        if not self._context.is_first_peer:
            return None
        latents = None
        if self.rewards.sends_latents:
            latents = self._model.reward_latents(rollouts.latents)
        numbers = [sample.prompt_set for sample in rollouts.samples]
        return self.sets.submit(self.rewards, build_scoring_request(rollouts, latents), numbers)

    def wait(self, pending: "Future[RewardTable] | None") -> RewardTable:
        """The scores of one chunk, the same on all peers, who must all call it.

        The rewards keep deadlines of their own; this one is for when they do not.

        Raises:
            TrainingStoppedError: nothing has arrived in the sum of the times that the configuration allows.
        """
        began, share = time.monotonic(), self._context.share_with_peers
        while not share(lambda: self._has_arrived(pending, began)):
            pass
        return share(lambda: _expect(pending).result())

    def _has_arrived(self, pending: "Future[RewardTable] | None", began: float) -> bool:
        """Whether the scores are there, after a while; peers wait for this answer, and not longer than a collective."""
        job, names = self._job, self.rewards.names
        calls = self._chunk * max(len(names), 1)
        seconds = calls * job.local_reward.timeout_s + 2.0 * job.remote_reward.timeout_s + 60.0
        left = began + seconds - time.monotonic()
        done = bool(wait([_expect(pending)], min(max(left, 0.0), _PATIENCE_S)).done)
        if not done and left <= _PATIENCE_S:
            raise TrainingStoppedError(
                f"the rewards {', '.join(names)} of {self._chunk} samples have not arrived after {seconds:g} s (the "
                "sum of what timeout_s in train.train_policy.local_reward and remote_reward allow)"
            )
        return done

    def settings(self) -> dict[str, list[Any]]:
        """Weight and origin of each reward: what scores before and after a resume depend on."""
        weights, origins = self.rewards.weights, self.rewards.origins
        found = {name: [weights[name], origins[name]] for name in weights if name not in self.rewards.terms}
        named = zip(self.sets.labels, self.sets.rewards, strict=True)
        return {**found, **{f"those of the set {label}": sorted(own) for label, own in named if own is not None}}

    def warn_if_changed(self, before: Mapping[str, Any]) -> None:
        """Compare with the ``settings`` of the run that is resumed."""
        now = self.settings()
        changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if changed:
            warn_of_all(
                f"the rewards are not those of the run that is resumed ({', '.join(changed)}: other function or "
                "weight, new, or gone); scores before and after do not compare"
            )


def _expect(pending: "Future[RewardTable] | None") -> "Future[RewardTable]":
    assert pending is not None  # on the rank that asked
    return pending
