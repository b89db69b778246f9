"""A reference that becomes the trained policy again and again: after so many steps, or where the policy has come far
(GARDO, arXiv 2512.24138)."""

from collections.abc import Mapping
from typing import Any

from cosmos_rl.optim.optimizer import Optimizer
from cosmos_rl.policy.config import GrpoPolicyConfig
from cosmos_rl.policy.config.plan import moves_reference
from cosmos_rl.policy.model.policies import Policies
from cosmos_rl.utils.logging import logger


class MovingReference:
    """``reference_reset_interval`` and ``reference_reset_kl``; without either nothing moves."""

    def __init__(self, job: GrpoPolicyConfig, policies: Policies, optimizer: Optimizer) -> None:
        self._job, self._policies, self._optimizer = job, policies, optimizer
        self._moves = moves_reference(job)
        self._last: int | None = None  # training steps done when it was last renewed

    def after_step(self, done: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Renew the reference where that is due after ``done`` training steps; how many steps old it then is.

        ``metrics``: of the step, the same on all ranks, which must all decide alike.
        """
        if not self._moves:
            return {}
        interval, bound = self._job.reference_reset_interval, self._job.reference_reset_kl
        if self._last is None:  # the start, or a checkpoint that does not say it
            self._last = 0 if interval is None else (done - 1) // interval * interval
        kl = metrics.get("train/reference_kl_mean", metrics.get("train/kl_loss_mean", 0.0))
        is_far = bound is not None and kl > bound
        if is_far:
            logger.info(f"step {done}: the distance to the reference is {kl:.3g}, so it becomes the present model")
        if is_far or (interval is not None and done - self._last >= interval):
            self._last = done
            with self._optimizer.average_parameters():
                self._policies.reset_reference()
            if self._job.reset_optimizer_with_reference:
                self._optimizer.forget_moments()
        return {"train/reference_age": float(done - self._last)}

    def state_dict(self) -> dict[str, Any]:
        """When it was last renewed."""
        return {"last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from a checkpoint."""
        self._last = state.get("last")
