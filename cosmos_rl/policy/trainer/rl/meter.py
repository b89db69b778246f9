"""Sums and maxima of rows' terms over the optimiser steps and ranks of a training step."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_grpo import STOPPED
from cosmos_rl.data.given import text_of
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.trainer.rl.algorithm import VELOCITY_GRADIENT, Rows, Terms
from cosmos_rl.policy.trainer.rl.guard_rules import compute_norm_metrics
from cosmos_rl.utils.logging import logger

_NORM_RATIO = "velocity_norm_ratio"


def count_moving(terms: Terms, rows: Rows, neutral: float) -> float:
    """How many rows should give a gradient at the first step: they count, have another value than the neutral one, and
    no trust region stops them."""
    moving_R = (rows.weight > 0) & (rows.value != neutral)
    for name in STOPPED:
        if name in terms:
            moving_R = moving_R & (terms[name].cpu() == 0)
    return float(moving_R.sum())


def warn_if_broken(step: int, terms: Terms, rows: Rows) -> None:
    """Name up to three rows of this rank whose loss counts and is not finite."""
    if not terms:
        return
    broken_R = ~terms["policy_loss"].cpu().isfinite() & (rows.weight > 0)
    found = torch.nonzero(broken_R).flatten().tolist()[:3]
    if found:
        sigma_R = rows.level.sigma
        first = [f"{text_of(rows.prompts[i])[:60]!r} at noise level {float(sigma_R[i]):.3g}" for i in found]
        logger.warning(f"step {step + 1}: the loss is not finite, first for {'; '.join(first)}")


class Meter:
    """One for each training step."""

    def __init__(self, maxima: Sequence[str], sets: Sequence[str] = ()) -> None:
        """
        Args:
            maxima: terms of which the largest value is reported next to the mean.
            sets: names of several prompt sets, of which the distance to the reference is reported each.
        """
        self._with_maxima, self._sets = maxima, sets
        self._by_set: dict[str, tuple[list[float], list[float]]] = {}  # name of a set -> (distances, weights)
        self._values: dict[str, list[float]] = {}  # of all rows: they are added exactly, in whatever order
        self._maxima: dict[str, float] = {}
        self._weights: list[float] = []
        self._gradients: dict[int, list[float]] = {}  # step of the sampler -> its rows' norms
        self._norm_ratios: list[Tensor] = []  # [R, 2]: ratio (NaN for a row that only fills up), sigma

    def add(self, terms: Terms, rows: Rows) -> dict[str, list[float]]:
        """Take in the rows of one optimiser step; their weighted values. Reads the numbers, so waits for the device."""
        weight_R, found = rows.weight.double(), dict[str, list[float]]()
        counted = weight_R > 0
        for name, value_R in ((name, value_R.cpu()) for name, value_R in terms.items()):
            if name == _NORM_RATIO:
                ratio_R = torch.where(counted, value_R, torch.nan)
                self._norm_ratios.append(torch.stack([ratio_R, rows.level.sigma.to(ratio_R)], dim=1))
                continue
            if name == VELOCITY_GRADIENT:
                self._add_gradients(value_R.double(), rows)
                continue
            if name.endswith("_max") or name in self._with_maxima:
                top = float(value_R[counted].max()) if bool(counted.any()) else 0.0
                self._maxima[name] = max(self._maxima.get(name, top), top)
            if not name.endswith("_max"):
                found[name] = (value_R.double() * weight_R).tolist()
                self.add_values(name, found[name])
        self._weights += weight_R.tolist()
        if rows.prompt_set is not None and "kl_loss" in terms:
            self._add_by_set(terms["kl_loss"].cpu().double() * weight_R, rows.prompt_set, weight_R)
        return found

    def _add_gradients(self, norm_R: Tensor, rows: Rows) -> None:
        assert rows.sampler_step is not None
        for step in rows.sampler_step.unique().tolist():
            self._gradients.setdefault(step, []).extend(norm_R[rows.sampler_step == step].tolist())

    def _add_by_set(self, distance_R: Tensor, prompt_set_R: Tensor, weight_R: Tensor) -> None:
        for number, name in enumerate(self._sets):  # all of them, as ranks add up the same numbers
            own_R, columns = prompt_set_R == number, self._by_set.setdefault(name, ([], []))
            for column, value_R in zip(columns, (distance_R, weight_R), strict=True):
                column += value_R[own_R].tolist()

    def add_values(self, name: str, values: Sequence[float]) -> None:
        """Add to one of the sums."""
        self._values.setdefault(name, []).extend(values)

    def metrics(self, context: Context, loss_weights: Mapping[str, float]) -> dict[str, float]:
        """Means over the rows of all ranks, and maxima, by their documented keys; the same on all ranks.

        ``loss_weights``: the terms that the loss is made of, and their factors in it.
        """
        names, tops = sorted(self._values), sorted(self._maxima)
        *sums, weight = context.sum_exactly([*(self._values[name] for name in names), self._weights])
        found = {f"train/{name}_mean": value / max(weight, 1e-12) for name, value in zip(names, sums, strict=True)}
        for name, value in zip(tops, context.max_over_ranks([self._maxima[name] for name in tops]), strict=True):
            statistic = "max"
            if name.endswith("_max"):
                statistic = "mean"
            found[f"train/{name}_{statistic}"] = value
        if self._norm_ratios:
            ratio_R, sigma_R = context.gather_rows(torch.cat(self._norm_ratios)).unbind(1)
            found |= compute_norm_metrics("train", ratio_R, sigma_R)
        found |= self._means_by_set(context) | self._share_gradients(context)
        loss = sum(weight * found.get(f"train/{name}_mean", 0.0) for name, weight in loss_weights.items())
        return {**found, "train/loss_mean": loss}

    def _share_gradients(self, context: Context) -> dict[str, float]:
        """Each trained step's share of the gradients' norms; NaN: all are 0. All ranks train the same steps."""
        if not self._gradients:
            return {}
        steps = sorted(self._gradients)
        sums = context.sum_exactly([self._gradients[step] for step in steps])
        total = sum(sums) or math.nan
        return {f"train/gradient_share/{step}": own / total for step, own in zip(steps, sums, strict=True)}

    def _means_by_set(self, context: Context) -> dict[str, float]:
        """Distances to the reference of the sets that the step has samples of."""
        if not self._by_set:
            return {}
        flat = context.sum_exactly([column for columns in self._by_set.values() for column in columns])
        sums = zip(self._by_set, flat[::2], flat[1::2], strict=True)
        return {f"train/{name}/kl_loss_mean": total / weight for name, total, weight in sums if weight > 0.0}
