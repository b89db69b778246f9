"""GARDO (arXiv 2512.24138) in a step of any algorithm: which samples the distance to the reference acts on, and how far
each sample is from the others of its prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.algorithms.advantage import measure_nearest
from cosmos_rl.algorithms.kl_gate import GateShare, gate_rows, measure_uncertainty
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import GrpoPolicyConfig
from cosmos_rl.policy.trainer.rl.batch import ScoredBatch
from cosmos_rl.reward.features import FeatureFunction
from cosmos_rl.reward.table import Rewards
from cosmos_rl.rollout.sampler import Sample


class KlGate:
    """``[train.train_policy.kl_gate]``; without auxiliary rewards nothing is gated."""

    def __init__(self, job: GrpoPolicyConfig, rewards: Rewards) -> None:
        """
        Raises:
            UserError: an auxiliary reward is not measured, or is trained on.
        """
        self._table = job.kl_gate
        self._state = GateShare(job.kl_gate.share)
        untrained = [name for name, weight in rewards.weights.items() if weight == 0]
        for name in job.kl_gate.rewards:
            if name not in untrained:
                known = ", ".join(f'"{one}"' for one in untrained) or "none is"
                raise UserError(
                    f'train.train_policy.kl_gate.rewards: found "{name}"; allowed: rewards that are measured with '
                    f"weight 0 ({known}); of the service those with measured = true"
                )

    def apply(self, batch: ScoredBatch) -> ScoredBatch:
        """With the factor of the distance to the reference for each sample; every rank computes the same."""
        table = self._table
        if not table.rewards:
            return batch
        uncertainty_N = measure_uncertainty(batch.reward_N, [batch.scores[name] for name in table.rewards])
        gated_N = gate_rows(uncertainty_N, self._state.share)
        self._state = self._state.follow(uncertainty_N, table.least_share, table.most_share)
        return replace(batch, kl_weight_N=gated_N.float())

    def state_dict(self) -> dict[str, Any]:
        """What the share of the next step depends on."""
        return {"share": self._state.share, "means": list(self._state.means)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the share of a checkpoint; one of a run in which nothing was gated yet has none of its own."""
        if state["means"]:
            self._state = GateShare(float(state["share"]), tuple(state["means"]))


class NearestSample:
    """How far a sample's features are from those of the nearest other sample of its prompt."""

    def __init__(self, job: GrpoPolicyConfig, *, each: bool = False) -> None:
        """
        Args:
            each: one sample in a call.

        Raises:
            UserError: there is no such function of features.
        """
        self._features, table = None, job.local_reward
        if each:
            table = table.model_copy(update={"batch_size": 1})
        if job.diversity_features is not None:
            self._features = FeatureFunction(job.diversity_features, table)

    def measure(self, own_media: Tensor, samples: Sequence[Sample], context: Context) -> Tensor | None:
        """float64 ``[N]`` of the samples of all ranks; None where it does not count."""
        features = self._features
        if features is None:
            return None
        feature_ND = context.gather_rows(context.share_with_peers(lambda: features(own_media)))
        return measure_nearest(feature_ND, torch.tensor([sample.group for sample in samples]))

    def close(self) -> None:
        """End the thread of the function."""
        if self._features is not None:
            self._features.close()
