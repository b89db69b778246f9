"""Diffusion-DPO (Wallace et al. 2023, arXiv 2311.12908) for flow matching: learn which of two samples is preferred.

Of a pair with one prompt both members are noised with the same noise to the same level. With the flow-matching error
``err = <(v - (noise - clean))^2>`` of a member, and ``err_ref`` that of the frozen reference, the margin
``m = (err_w - err_w_ref) - (err_l - err_l_ref)`` of the chosen ``w`` and the rejected ``l`` is negative where the
policy has come to fit the chosen one better. ``-m / 2`` takes the place of the difference of the log-likelihood ratios
in DPO (Rafailov et al. 2023, arXiv 2305.18290), whose optimum is the reference times ``exp(reward / beta)``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cosmos_rl.algorithms.advantage import ROUNDING
from cosmos_rl.diffusion.elements import check_rows, check_shapes, element_mean, widen


def dpo_loss(
    velocity: Tensor,
    velocity_ref: Tensor,
    clean: Tensor,
    noise: Tensor,
    *,
    beta: float,
    element_mask: Tensor | None = None,
    level_weight_P: Tensor | None = None,
    weight_P: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-log sigmoid(-beta / 2 m)`` of ``P`` pairs; errors are means over elements, so ``beta`` is not one of sums.

    Args:
        velocity, velocity_ref: ``[2, P, C, ...]``, trained policy and reference; the chosen members come first.
        clean: ``[2, P, C, ...]``.
        noise: ``[P, C, ...]``, that of both members.
        beta: how much a margin counts.
        element_mask: which elements count, broadcastable to ``noise``.
        level_weight_P: ``[P]`` factor on the errors of a pair by its noise level, 1 when not given.
        weight_P: ``[P]`` factor of each pair in the sum, 1 when not given; pairs of weight 0 are padding.

    Returns:
        The sum over the pairs of weight times loss, the only one with a gradient. And what is reported, each ``[P]``:
        ``policy_loss``, ``margin``, ``margin_size`` (``|m|``), ``gradient_factor`` (``sigmoid(beta / 2 m)``: 1/2 at
        the reference, 0 where a pair is learnt), ``chosen_error_change`` (``err_w - err_w_ref``: more than 0 where the
        policy fits the chosen members worse than the reference does) and ``accuracy`` (1 where the margin is negative).

    Raises:
        ValueError: shapes that do not fit; nothing is broadcast over the pairs.
    """
    check_shapes(velocity, velocity_ref, clean)
    if velocity.shape != (2, *noise.shape):
        raise ValueError(f"velocities [2, P, C, ...] for noise {list(noise.shape)}, found {list(velocity.shape)}")
    count = len(noise)
    pair_weight_P = noise.new_ones(count) if weight_P is None else weight_P
    check_rows(count, pair_weight_P, *([] if level_weight_P is None else [level_weight_P]))
    changes_P = [
        _error(velocity[i], clean[i], noise, element_mask)
        - _error(velocity_ref[i], clean[i], noise, element_mask).detach()
        for i in range(2)
    ]
    if level_weight_P is not None:
        changes_P = [change_P * level_weight_P.to(change_P) for change_P in changes_P]
    chosen_P, rejected_P = changes_P
    margin_P = chosen_P - rejected_P
    logit_P = -0.5 * beta * margin_P
    loss_P = -functional.logsigmoid(logit_P)
    terms = {
        "policy_loss": loss_P.detach(),
        "margin": margin_P.detach(),
        "margin_size": margin_P.detach().abs(),
        "gradient_factor": torch.sigmoid(-logit_P.detach()),
        "chosen_error_change": chosen_P.detach(),
        "accuracy": (margin_P.detach() < 0).to(loss_P),
    }
    return (pair_weight_P.to(loss_P) * loss_P).sum(), terms


def _error(velocity: Tensor, clean: Tensor, noise: Tensor, element_mask: Tensor | None) -> Tensor:
    return element_mean((widen(velocity) - (widen(noise) - widen(clean))) ** 2, element_mask)


@dataclass
class FollowingBeta:
    """A ``beta`` that follows the size of the margins, so that the sigmoid does not saturate while they grow
    (SimpleTuner's auto-beta): ``-2 logit(target) / mean |m|``. A learnt pair whose margin has the mean size then keeps
    the gradient factor ``target``."""

    start: float
    """Until the first margin that is not 0."""
    target: float | None = None
    """Below 1/2; None: ``beta`` stays what it is at the start."""
    decay: float = 0.99
    least: float = 0.0
    most: float = math.inf
    mean: float = 0.0
    """Moving average of ``|m|``, of the steps alone that it has seen."""
    count: int = 0
    """Of these steps."""

    @property
    def value(self) -> float:
        """``beta`` of the next step."""
        if self.target is None or self.count == 0:
            return self.start
        logit = math.log(self.target / (1.0 - self.target))
        return min(max(-2.0 * logit / self.mean, self.least), self.most)

    def follow(self, size: float) -> None:
        """Take in a step of that mean ``|m|``. At the reference all margins are 0, which says nothing of their size."""
        if self.target is None or not math.isfinite(size) or size <= 0.0:
            return
        self.count += 1
        self.mean += (1.0 - self.decay) / (1.0 - self.decay**self.count) * (size - self.mean)

    def state_dict(self) -> dict[str, float]:
        """What the next value depends on."""
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint; of a run that did not follow its margins they are not known yet."""
        self.mean, self.count = float(state.get("mean", 0.0)), int(state.get("count", 0))


def pair_best_with_worst(reward_N: Tensor, group_N: Tensor) -> dict[int, int]:
    """Index of the best sample of each group -> that of its worst one, in the order of the best ones.

    Rewards that are not finite are missing. A group whose rewards are all equal but for rounding has no pair. Of equal
    ones the first counts.
    """
    pairs: dict[int, int] = {}
    for group in group_N.unique():
        rows = torch.nonzero((group_N == group) & reward_N.isfinite()).flatten()
        rewards = reward_N[rows].double()
        if len(rows) < 2 or float(rewards.max() - rewards.min()) <= ROUNDING * float(rewards.abs().max()):
            continue
        pairs[int(rows[rewards.argmax()])] = int(rows[rewards.argmin()])
    return dict(sorted(pairs.items()))
