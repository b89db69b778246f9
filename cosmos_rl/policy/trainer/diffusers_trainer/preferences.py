"""Preferences -> what DPO trains on: both members at one noise level with one noise, and the reference's velocities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cosmos_rl.algorithms.dpo import dpo_loss
from cosmos_rl.data.items import Item
from cosmos_rl.diffusion.schedule import loss_weight
from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.policies import Policies
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding
from cosmos_rl.policy.trainer.diffusers_trainer.noising import NoisedSamples


@dataclass(frozen=True)
class NoisedPreferences(NoisedSamples):
    """Noised samples, the chosen ones, with the rejected ones of the same conditions, noise and levels."""

    rejected: Tensor
    """Latents like ``clean``."""
    beta: float
    """Of their loss."""
    reference: Tensor | None = None
    """Velocities of the frozen reference, ``[B, 2, C, ...]``, the chosen ones first."""

    @classmethod
    def of_samples(
        cls, chosen: NoisedSamples, items: Sequence[Item], encoding: Encoding, beta: float
    ) -> "NoisedPreferences":
        """``items``: those of which ``chosen`` was made.

        Raises:
            UserError: one has no rejected member.
        """
        rejected = [item.rejected for item in items if item.rejected is not None]
        if len(rejected) < len(items):
            alone = next(item.name for item in items if item.rejected is None)
            raise UserError(
                f'sample {alone}: has no rejected image; with train.train_policy.type = "dpo" a data set gives '
                "'visual', 'rejected' and 'prompt'"
            )
        return cls(chosen.clean, chosen.cond, chosen.noise, chosen.index, encoding.latents(rejected), beta)

    def rows(self, which: slice) -> "NoisedPreferences":
        """Some of the preferences, as a view."""
        chosen, both = super().rows(which), self.rejected[which]
        reference = None if self.reference is None else self.reference[which]
        return NoisedPreferences(chosen.clean, chosen.cond, chosen.noise, chosen.index, both, self.beta, reference)

    def velocities(self, model: PipelineModel) -> Tensor:
        """Of both members in one forward pass, ``[2, B, C, ...]``."""
        twice = torch.arange(len(self.clean)).repeat(2)
        index, noise = self.index[twice], torch.cat([self.noise, self.noise])
        noised, _, timestep = model.add_noise(torch.cat([self.clean, self.rejected]), timestep=index, noise=noise)
        level = Level(timestep, self._sigma(model)[twice.to(timestep.device)])
        return model.velocity(noised, level, self.cond.rows(twice)).unflatten(0, (2, -1))

    @torch.no_grad()
    def with_reference(self, model: PipelineModel, policies: Policies, size: int) -> "NoisedPreferences":
        """The same with the velocities of the reference, ``size`` preferences at a time."""
        with policies.using("reference"), model.eval_mode():
            parts = [self.rows(slice(i, i + size)).velocities(model) for i in range(0, len(self.clean), size)]
            reference = torch.cat(parts, dim=1)
        return replace(self, reference=reference.transpose(0, 1))

    def dpo_loss(self, model: PipelineModel) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """``(sum, weight)`` of the preferences' losses, and their terms ``[B]``."""
        assert self.reference is not None
        loss, terms = dpo_loss(
            self.velocities(model),
            self.reference.transpose(0, 1),
            torch.stack([self.clean, self.rejected]),
            self.noise,
            beta=self.beta,
            element_mask=self.cond.element_mask,
            level_weight_P=loss_weight(self._sigma(model), model.config.weighting_scheme),
        )
        return loss, loss.new_tensor(float(len(self.clean))), terms

    def _sigma(self, model: PipelineModel) -> Tensor:
        return model.sigma_map[self.index.to(model.sigma_map.device)].to(self.clean.device)
