"""Preference optimisation (Diffusion-DPO, arXiv 2311.12908): fine-tuning whose samples are preferences. See
docs/algorithms/dpo.md."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from cosmos_rl.algorithms.dpo import FollowingBeta
from cosmos_rl.data.items import Item
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import Config, DpoPolicyConfig
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from cosmos_rl.policy.trainer.diffusers_trainer.preferences import NoisedPreferences
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SftParts, SFTTrainer
from cosmos_rl.policy.trainer.task import StepReport


class DpoTrainer(SFTTrainer):
    """The task of offline DPO: the steps, data, validation and state of fine-tuning, with another loss.

    The reference is the model as the run found it.
    """

    terms: ClassVar[tuple[str, ...]] = ("margin", "margin_size", "gradient_factor", "chosen_error_change", "accuracy")

    def __init__(self, config: Config, context: Context, parts: SftParts) -> None:
        super().__init__(config, context, parts)
        job = config.train.train_policy
        assert isinstance(job, DpoPolicyConfig)
        self._beta, self._start = FollowingBeta(job.dpo_beta, **job.dpo_auto_beta.settings), job.dpo_beta
        self.policies = parts.model.policies(keep_old=False, keep_reference=True)

    def train_step(self, step: int) -> StepReport:
        """One optimiser step, after which ``beta`` follows the margins where it is to."""
        used, report = self._beta.value, super().train_step(step)
        if self._beta.target is None:
            return report
        self._beta.follow(report.metrics["train/margin_size_mean"])
        return replace(report, metrics={**report.metrics, "train/dpo_beta_mean": used})

    def prepare(
        self, purpose: str, step: int, ids: Sequence[int], items: Sequence[Item], dropout: float
    ) -> NoisedPreferences:
        """Both members at the same sigmas with the same noise, with the reference's velocities."""
        chosen = super().prepare(purpose, step, ids, items, dropout)
        beta = self._start if purpose == "validation" else self._beta.value  # validations are compared with each other
        both = NoisedPreferences.of_samples(chosen, items, self.noising.encoding, beta)
        return both.with_reference(self.model, self.policies, self._config.train.train_policy.mini_batch)

    def loss(self, samples: Any) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """See ``dpo_loss``; a member of a preference is never in another micro-batch than the other."""
        loss, weight, terms = samples.dpo_loss(self.model)
        return loss, weight, {name: terms[name] for name in self.terms}

    def extra_tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The reference, where it is not the base model."""
        return {"reference": self.policies.reference_state()}

    def state_dict(self) -> dict[str, Any]:
        """Counters, and the size of the margins so far."""
        return {**super().state_dict(), "dpo_beta": self._beta.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over those of a checkpoint."""
        super().load_state_dict(state)
        self._beta.load_state_dict(state.get("dpo_beta", {}))


def build_dpo(config: Config, context: Context, *, dataset: Any, val_dataset: Any = None) -> DpoTrainer:
    """Load everything that ``config`` names.

    Raises:
        UserError: data or model do not fit the configuration.
    """
    task = build_sft(config, context, dataset=dataset, val_dataset=val_dataset, trainer=DpoTrainer)
    assert isinstance(task, DpoTrainer)
    return task
