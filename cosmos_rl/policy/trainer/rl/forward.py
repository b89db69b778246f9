"""Objectives on the forward process other than DiffusionNFT: EPG, PEPG and PAR (arXiv 2602.04663), AWM
(arXiv 2509.25050). They run what DiffusionNFT runs and differ in the loss alone, ``algorithms/forward_process.py``."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from cosmos_rl.algorithms.forward_process import EPG, FORWARD_PROCESSES, ForwardProcess, forward_process_loss
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.trainer.rl.algorithm import MicroBatch, Terms
from cosmos_rl.policy.trainer.rl.nft import DiffusionNft


@dataclass(frozen=True)
class ForwardObjective(DiffusionNft):
    """An objective of ``FORWARD_PROCESSES``, and the answers to what a step asks (``Algorithm``)."""

    objective: ForwardProcess = EPG

    name: ClassVar[str] = "Forward-process policy gradient"
    purpose: ClassVar[str] = "forward"
    neutral: ClassVar[float] = 0.0
    maxima: ClassVar[tuple[str, ...]] = ("policy_loss", "kl_loss", "log_ratio")

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """The keys that DiffusionNFT reads; the trainer's name is that of the objective."""
        objective = FORWARD_PROCESSES[online_table(config).trainer_type]
        return replace(super().from_config(config), objective=objective)

    def values(self, advantage_N: Tensor) -> Tensor:
        """The advantages themselves."""
        return advantage_N

    def policy_loss(
        self, velocity: Tensor, old: Tensor, micro: MicroBatch, element_mask: Tensor | None
    ) -> tuple[Tensor, Terms]:
        """The objective's, the distance to the old policy included."""
        return forward_process_loss(
            velocity,
            old,
            micro.data["clean"],
            micro.state,
            micro.level.sigma,
            micro.value,
            self.objective,
            element_mask=element_mask,
            weight_B=micro.weight,
        )
