"""The rules of the guard: numbers in, metrics and alarms out. What is measured, and how, is in `guard_probe`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.algorithms.paired import PairedChange, compare_pairs
from cosmos_rl.policy.config import RewardHackingGuardConfig
from cosmos_rl.policy.config.plan import GUARD_SIGMAS
from cosmos_rl.utils.logging import warn_of_all


@dataclass(frozen=True)
class Measurement:
    """What is measured at one time; the same on all ranks."""

    loss: float
    """Mean flow-matching loss of the held-out samples."""
    norm: Tensor
    """``[W, len(GUARD_SIGMAS)]``: root mean square of the velocity at each of their points."""
    diversity: float
    """How much the samples of one prompt differ."""


def compute_norm_metrics(kind: str, ratio_R: Tensor, sigma_R: Tensor) -> dict[str, float]:
    """Median and 90 % quantile of the norm ratios of ``R`` velocities, by quarter of the noise levels; NaN: none."""
    quarter_R = (sigma_R * len(GUARD_SIGMAS)).long().clamp(max=len(GUARD_SIGMAS) - 1)
    found = {}
    for number, sigma in enumerate(GUARD_SIGMAS):
        ratios = ratio_R[(quarter_R == number) & ~ratio_R.isnan()]
        if len(ratios):
            found[f"{kind}/velocity_norm_ratio/{sigma:g}"] = float(ratios.quantile(0.5))
            found[f"{kind}/velocity_norm_ratio_p90/{sigma:g}"] = float(ratios.quantile(0.9))
    return found


def compare_measurements(
    config: RewardHackingGuardConfig, start: Measurement, now: Measurement
) -> tuple[dict[str, float], list[str]]:
    """(metrics, what is wrong: one sentence each). Both are of the same samples with the same noise, so a policy
    that did not change has ratios of exactly 1."""
    wrong = []
    ratio = now.loss / max(start.loss, 1e-12)
    metrics = {"guard/loss_ratio": ratio}
    if not ratio <= config.max_loss_ratio:  # NaN is an alarm too
        wrong.append(
            f"the held-out flow-matching loss is {ratio:.3g} times that of the start "
            f"(reward_hacking_guard.max_loss_ratio = {config.max_loss_ratio:g}): the policy is leaving "
            "what the model knows"
        )
    if start.diversity > 0:
        metrics["guard/diversity_ratio"] = share = now.diversity / start.diversity
        if not share >= config.min_diversity_ratio:
            wrong.append(
                f"the samples of one prompt differ only {share:.3g} times as much as at the start "
                f"(reward_hacking_guard.min_diversity_ratio = {config.min_diversity_ratio:g}): the policy collapses"
            )
    ratios = now.norm / start.norm
    sigma_R = torch.tensor(GUARD_SIGMAS).repeat(len(ratios))
    return metrics | compute_norm_metrics("guard", ratios.flatten(), sigma_R), wrong


class UntrainedRewards:
    """Validation rewards that are not trained on, compared with their first scores, sample by sample."""

    def __init__(self, config: RewardHackingGuardConfig) -> None:
        self._config = config
        self._of = ""  # a digest of the validation whose scores are compared
        self._first: dict[str, list[float | None]] = {}
        self._means: dict[str, float] = {}
        self._changes: dict[str, PairedChange | None] = {}
        self._good = 0  # the last step at which all were known and none had fallen

    def note(self, step: int, scores: Mapping[str, Tensor], of: str) -> int:
        """Take in the scores ``[N]`` by reward of a validation after ``step`` steps; NaN: missing.

        Args:
            of: what was validated and by what. Scores of another validation do not compare: these are then the first.

        Returns:
            The last step at which all of them were known and none had fallen. A reward whose scores are missing is not
            known: it is no alarm, and nothing that a run should go back to.
        """
        if self._of not in ("", of):
            warn_of_all(
                "validation prompts, samples or rewards are not those of the run that is resumed: rewards that are not "
                f"trained on are compared with their scores of step {step} (train.train_policy.reward_hacking_guard)"
            )
            self._first = {}
        self._of = of
        for name, score_N in scores.items():
            if name not in self._first and bool(score_N.isfinite().any()):
                self._first[name] = [value if math.isfinite(value) else None for value in score_N.tolist()]
        self._means = {name: float(score_N[score_N.isfinite()].mean()) for name, score_N in scores.items()}
        self._changes = {name: self._change(name, score_N) for name, score_N in scores.items()}
        if all(change is not None and not self._has_fallen(change) for change in self._changes.values()):
            self._good = step
        return self._good

    def _change(self, name: str, score_N: Tensor) -> PairedChange | None:
        first = self._first.get(name)
        if first is None:
            return None
        return compare_pairs(_tensor(first), score_N)

    def _has_fallen(self, change: PairedChange) -> bool:
        return change.has_fallen(self._config.max_untrained_drop, self._config.untrained_sigmas)

    def check(self) -> tuple[dict[str, float], list[str]]:
        """(metrics, what is wrong) of the newest validation."""
        metrics, wrong = {f"guard/untrained_reward/{name}": mean for name, mean in self._means.items()}, []
        for name, change in self._changes.items():
            if change is None:
                continue
            if math.isfinite(change.drop):
                metrics[f"guard/untrained_drop/{name}"] = change.drop
            if self._has_fallen(change):
                now, error = self._means[name], abs(change.sigmas)
                wrong.append(
                    f"the reward {name}, which is not trained on, fell from {now - change.mean:.4g} to {now:.4g}, by "
                    f"{change.drop:.3g} standard deviations of its first scores "
                    f"(reward_hacking_guard.max_untrained_drop = {self._config.max_untrained_drop:g}) and {error:.3g} "
                    f"standard errors (reward_hacking_guard.untrained_sigmas = {self._config.untrained_sigmas:g}): the "
                    "policy exploits the trained reward"
                )
        return metrics, wrong

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues from."""
        changes = {name: None if c is None else [c.mean, c.std, c.sigmas] for name, c in self._changes.items()}
        return {"of": self._of, "first": self._first, "means": self._means, "changes": changes, "good": self._good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds."""
        self._of, self._first = str(state["of"]), dict(state["first"])
        self._means, self._good = dict(state["means"]), int(state["good"])
        self._changes = {name: None if c is None else PairedChange(*c) for name, c in state["changes"].items()}


def _tensor(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
