"""From rewards to advantages and to DiffusionNFT's optimality.

A reward that is not finite is missing: it enters no statistic, and the sample's advantage is NaN, which the caller has
to leave out (:func:`select_rows`). Groups are distinguished by their id, never by the text of their prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]
AdvantageTransform = Literal["identity", "exp_reward", "centred_exp_reward"]

ROUNDING = 1e-6
"""Numbers that differ by at most this share of their size are equal. Scores are often float32, and equal sums of scores
that were added in another order differ in their last digits."""

_SAME = 1e-12
"""Features at most this far apart are the same: what float64 makes of their product with themselves is not 1."""


def all_equal(values: Tensor) -> bool:
    """Whether all finite ``values`` are equal but for rounding; so are none and a single one."""
    values = values[values.isfinite()].double()
    return len(values) < 2 or float(values.max() - values.min()) <= ROUNDING * float(values.abs().max())


def group_advantages(
    reward_N: Tensor,
    group_N: Tensor,
    *,
    global_std: bool,
    eps: float = 1e-4,
    size_N: Tensor | None = None,
    temperature: float | None = None,
) -> Tensor:
    """``(reward - mean of its group) / (std + eps)``, float64 ``[N]``; NaN where the reward is missing.

    Args:
        reward_N: ``[N]`` rewards of a whole step, all ranks together.
        group_N: ``[N]`` integer ids; samples with one id were made from one prompt entry.
        global_std: population standard deviation over all rewards of the step; else over those of the sample's group.
        eps: added to the standard deviation.
        size_N: ``[N]`` size of what each reward was computed from, where that is larger than the reward: the sum of
            the sizes of its terms. It says how far rewards may be apart by rounding alone.
        temperature: what to divide by in place of the standard deviation and ``eps``.

    Groups whose rewards are all equal, those with one reward, and a reward that is the mean of its group, each but for
    rounding (``ROUNDING``), give exactly 0, so that no mode makes something of the sign of a rounding error.
    """
    groups = _Groups.from_rewards(reward_N, group_N)
    deviation_N = groups.offset_N - groups.mean_P(groups.offset_N)[groups.inverse_N]
    if size_N is None:
        size_N = groups.reward_N
    deviation_N = groups.drop_rounding(deviation_N, size_N)
    if temperature is not None:
        return torch.where(groups.valid_N, deviation_N / temperature, torch.nan)
    if global_std:
        valid = groups.reward_N[groups.valid_N]
        std_N = (valid.std(correction=0) if len(valid) else valid.sum()).expand_as(deviation_N)
    else:
        std_N = groups.mean_P(deviation_N**2).sqrt()[groups.inverse_N]
    return torch.where(groups.valid_N, deviation_N / (std_N + eps), torch.nan)


def mean_group_std(reward_N: Tensor, group_N: Tensor) -> float:
    """Population standard deviation of the rewards of each group, averaged; groups without any are left out."""
    groups = _Groups.from_rewards(reward_N, group_N)
    deviation_N = groups.offset_N - groups.mean_P(groups.offset_N)[groups.inverse_N]
    std_P = groups.mean_P(deviation_N**2).sqrt()
    return float(std_P[groups.count_P > 0].mean())


def combine_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    group_N: Tensor,
    *,
    global_std: bool,
    temperature: float | None = None,
) -> Tensor:
    """Normalise each reward by itself, then add up with the weights; float64 ``[N]``.

    Unlike a sum of rewards, a reward with small numbers counts as much as one with large ones. A sample that lacks one
    of the rewards is missing as a whole. Rewards of weight 0 or without a weight do not count. What cancels but for
    rounding is exactly 0.
    """
    counted = {name: weight for name, weight in weights.items() if weight != 0.0}
    absent = sorted(set(counted) - set(rewards))
    if absent or not counted:
        raise ValueError(f"rewards that are weighed: {sorted(counted)}; rewards given: {sorted(rewards)}")
    stacked = torch.stack([rewards[name].double() for name in counted])
    stacked = torch.where(stacked.isfinite().all(0), stacked, torch.nan)
    parts = [
        weight * group_advantages(reward_N, group_N, global_std=global_std, temperature=temperature)
        for reward_N, weight in zip(stacked, counted.values(), strict=True)
    ]
    stacked_KN = torch.stack(parts)
    added_N = stacked_KN.sum(0)
    groups = _Groups.from_rewards(added_N, group_N)
    return torch.where(groups.valid_N, groups.drop_rounding(added_N, stacked_KN.abs().sum(0)), torch.nan)


def gdpo_advantages(
    rewards: Mapping[str, Tensor], weights: Mapping[str, float], group_N: Tensor, eps: float = 1e-4
) -> Tensor:
    """GDPO (arXiv 2601.05242): ``combine_advantages`` with the deviations of the groups, over the population standard
    deviation of the step; float64 ``[N]``, NaN where a reward is missing.

    So each reward decides as much within a group, however many rewards there are. The mean over a group is 0 already.
    """
    added_N = combine_advantages(rewards, weights, group_N, global_std=False)
    valid = added_N[added_N.isfinite()]
    if len(valid) == 0:
        return added_N
    return added_N / (valid.std(correction=0) + eps)


def measure_nearest(feature_ND: Tensor, group_N: Tensor) -> Tensor:
    """Cosine distance of each sample's features to those of the nearest other sample of its group, ``[N]`` in [0, 2].

    The diversity of GARDO (arXiv 2512.24138), with features of an image encoder; a sample that is alone has 0.
    """
    unit_ND = torch.nn.functional.normalize(feature_ND.double(), dim=1)
    others_NN = (group_N[:, None] == group_N[None, :]).fill_diagonal_(False)
    nearest_N = (1.0 - unit_ND @ unit_ND.T).masked_fill(~others_NN, torch.inf).amin(1)
    return torch.where(nearest_N.isfinite() & (nearest_N > _SAME), nearest_N, 0.0)


def scale_by_diversity(
    reward_N: Tensor, diversity_N: Tensor, group_N: Tensor, *, size_N: Tensor | None = None
) -> Tensor:
    """Advantages of GARDO (arXiv 2512.24138), which count a good sample the more the less it is like the others of its
    group; float64 ``[N]``, NaN where the reward is missing.

    ``(reward - mean) d / mean(d)`` where the reward is at least the mean of its group, else ``reward - mean``, without
    a standard deviation. Not as in the paper, the mean of each group is then subtracted again: a sum that is not 0
    pushes all samples alike. Rounding is nothing, by ``size_N`` as in `group_advantages`.
    """
    groups = _Groups.from_rewards(reward_N, group_N)
    deviation_N = groups.offset_N - groups.mean_P(groups.offset_N)[groups.inverse_N]
    if size_N is None:
        size_N = groups.reward_N
    deviation_N = groups.drop_rounding(deviation_N, size_N)
    mean_N = groups.mean_P(diversity_N.double())[groups.inverse_N]
    factor_N = torch.where(mean_N > 0, diversity_N.double() / mean_N, 1.0)
    scaled_N = torch.where(deviation_N >= 0, deviation_N * factor_N, deviation_N)
    centred_N = scaled_N - groups.mean_P(scaled_N)[groups.inverse_N]
    return torch.where(groups.valid_N, groups.drop_rounding(centred_N, size_N), torch.nan)


def apply_mode(advantage_N: Tensor, mode: AdvantageMode) -> Tensor:
    """Advantages ``[N]`` -> what training uses of them; NaN stays NaN.

    ``all``: as they are; ``positive_only``, ``negative_only``: the others count as 0; ``one_only``: 1 where positive,
    else 0; ``binary``: the sign.
    """
    if mode == "all":
        return advantage_N
    if mode == "positive_only":
        return advantage_N.clamp(min=0.0)
    if mode == "negative_only":
        return advantage_N.clamp(max=0.0)
    if mode == "one_only":
        return torch.where(advantage_N.isnan(), advantage_N, (advantage_N > 0).to(advantage_N))
    if mode == "binary":
        return torch.where(advantage_N.isnan(), advantage_N, advantage_N.sign())
    raise ValueError(f'advantage mode: found "{mode}"; allowed: all, positive_only, negative_only, one_only, binary')


def transform_advantages(advantage_N: Tensor, transform: AdvantageTransform) -> Tensor:
    """DDRL's monotone transform (arXiv 2512.04332) of advantages ``[N]``; NaN stays NaN.

    ``exp_reward``: ``-exp(-A)``, whose optimum is the data times ``exp(A)``; ``centred_exp_reward``: ``1 - exp(-A)``,
    with the same expected gradient, and 0 for a sample like the mean of its group; ``identity``: ``A``.
    """
    if transform == "identity":
        return advantage_N
    if transform == "exp_reward":
        return -torch.exp(-advantage_N)
    if transform == "centred_exp_reward":
        return -torch.expm1(-advantage_N)
    raise ValueError(
        f'transform of the advantage: found "{transform}"; allowed: identity, exp_reward, centred_exp_reward'
    )


def optimality(advantage_N: Tensor, low: float, high: float) -> Tensor:
    """DiffusionNFT's weight ``r = clip(clip(A, low, high) / (2 high) + 1/2, 0, 1)``, ``[N]``; NaN stays NaN.

    It is the probability that the sample is a good one (Zheng et al. 2025, arXiv 2509.16117).
    """
    if not (high > 0.0 and low < high):
        raise ValueError(f"bounds of the advantage: found {low} and {high}; allowed: low < high and high > 0")
    return (advantage_N.clamp(low, high) / (2.0 * high) + 0.5).clamp(0.0, 1.0)


def zero_std_share(advantage_N: Tensor, group_N: Tensor) -> float:
    """Share of the groups whose advantages are all equal, so that they teach nothing; groups without any left out."""
    groups = _Groups.from_rewards(advantage_N, group_N)
    scored_P = groups.count_P > 0
    return float((groups.equal_P & scored_P).sum() / scored_P.sum().clamp(min=1))


def select_rows(advantage_N: Tensor, group_N: Tensor, *, whole_groups: bool, drop_equal_groups: bool) -> Tensor:
    """Which samples are trained on, bool ``[N]``.

    Args:
        advantage_N: ``[N]`` as the loss uses them; NaN: missing, never kept.
        group_N: ``[N]`` integer ids.
        whole_groups: leave out not only a sample without an advantage, but its whole group.
        drop_equal_groups: leave out groups whose advantages are all equal.
    """
    groups = _Groups.from_rewards(advantage_N, group_N)
    kept_N = groups.valid_N
    if whole_groups:
        whole_P = groups.count_P == torch.bincount(groups.inverse_N, minlength=len(groups.count_P))
        kept_N = kept_N & whole_P[groups.inverse_N]
    if drop_equal_groups:
        kept_N = kept_N & ~groups.equal_P[groups.inverse_N]
    return kept_N


def keep_largest(advantage_N: Tensor, kept_N: Tensor, share: float) -> Tensor:
    """Of the samples that are trained on, the ``share`` with the largest ``|advantage|``, bool ``[N]``.

    A sample near the mean of its group has almost no gradient and costs as much as one that is far from it. The number
    is rounded, and at least 1 where there are any; of equal ones the first are kept. Max-variance down-sampling (arXiv
    2504.13818) keeps the most extreme of each group; here all groups of a step compete.

    Args:
        advantage_N: ``[N]`` as the loss uses them.
        kept_N: bool ``[N]``, what `select_rows` leaves.
        share: in (0, 1].
    """
    count = max(round(share * int(kept_N.sum())), 1)
    order = torch.where(kept_N, advantage_N.abs(), -1.0).argsort(descending=True, stable=True)[:count]
    chosen_N = torch.zeros_like(kept_N)
    chosen_N[order] = True
    return chosen_N & kept_N


@dataclass(frozen=True)
class _Groups:
    """Rewards (or advantages) sorted into ``P`` groups."""

    reward_N: Tensor
    valid_N: Tensor
    inverse_N: Tensor
    """Row -> index of its group."""
    count_P: Tensor
    """Rewards that are there, per group."""
    offset_N: Tensor
    """Reward minus the smallest of its group, 0 where missing: exactly 0 in a group of equal rewards."""

    @classmethod
    def from_rewards(cls, reward_N: Tensor, group_N: Tensor) -> "_Groups":
        if reward_N.ndim != 1 or reward_N.shape != group_N.shape:
            raise ValueError(f"rewards {list(reward_N.shape)} and groups {list(group_N.shape)}; allowed: both [N]")
        reward_N = reward_N.double()
        valid_N = reward_N.isfinite()
        ids_P, inverse_N = group_N.unique(return_inverse=True)
        count_P = torch.bincount(inverse_N[valid_N], minlength=len(ids_P))
        lowest_P = reward_N.new_full((len(ids_P),), torch.inf)
        lowest_P = lowest_P.scatter_reduce(0, inverse_N[valid_N], reward_N[valid_N], "amin")
        offset_N = torch.where(valid_N, reward_N - lowest_P[inverse_N], 0.0)
        return cls(reward_N, valid_N, inverse_N, count_P, offset_N)

    def mean_P(self, value_N: Tensor) -> Tensor:
        """Mean per group of values that are 0 where the reward is missing; 0 for a group without rewards."""
        total_P = value_N.new_zeros(len(self.count_P)).index_add(
            0, self.inverse_N, torch.where(self.valid_N, value_N, 0.0)
        )
        return total_P / self.count_P.clamp(min=1)

    def drop_rounding(self, value_N: Tensor, size_N: Tensor) -> Tensor:
        """``value_N`` with exactly 0 where it is rounding: at most ``ROUNDING`` of the largest size in its group."""
        size_N = torch.where(self.valid_N, size_N.double().abs(), 0.0)
        largest_P = size_N.new_zeros(len(self.count_P)).scatter_reduce(0, self.inverse_N, size_N, "amax")
        return torch.where(value_N.abs() <= ROUNDING * largest_P[self.inverse_N], 0.0, value_N)

    @property
    def equal_P(self) -> Tensor:
        """bool ``[P]``: all numbers of the group that are there are exactly equal."""
        return self.mean_P(self.offset_N) == 0
