"""A step's samples with their rewards: gathered over the ranks, turned into advantages, described, shown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cosmos_rl.algorithms.advantage import (
    apply_mode,
    combine_advantages,
    gdpo_advantages,
    group_advantages,
    keep_largest,
    mean_group_std,
    scale_by_diversity,
    select_rows,
    zero_std_share,
)
from cosmos_rl.algorithms.dpo import pair_best_with_worst
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import GrpoPolicyConfig
from cosmos_rl.policy.config.plan import GALLERY
from cosmos_rl.policy.trainer.data_parallel import split_evenly
from cosmos_rl.policy.trainer.rl.algorithm import Share
from cosmos_rl.policy.trainer.rl.teachers import find_sets
from cosmos_rl.reward.by_set import SetRewards
from cosmos_rl.reward.combine import clip_scores
from cosmos_rl.reward.table import Rewards, RewardTable, ScoringRequest
from cosmos_rl.rollout.sampler import Rollouts, Sample, measure_diversity
from cosmos_rl.tracking.media import TOTAL, Shown, pick_best_and_worst

GALLERY_INTERVAL = 10
"""Steps between two galleries where logging.multi_modal_log_interval says nothing."""


@dataclass(frozen=True)
class ScoredBatch:
    """This rank's samples of a step, and the rewards of the ``N`` samples of all ranks; an index counts those."""

    samples: tuple[Sample, ...]
    """All ``N``, in the order of the ranks."""
    own: Rollouts
    first: int
    """Index of this rank's first sample."""
    reward_N: Tensor
    """float64 ``[N]``; NaN: missing."""
    scores: Mapping[str, Tensor]
    """Each reward by itself, float64 ``[N]``."""
    advantage_N: Tensor
    """float64 ``[N]``; NaN: missing."""
    used_N: Tensor
    """float64 ``[N]``: the advantages as the loss uses them, after the mode and within the bounds; NaN: missing."""
    kept_N: Tensor
    """bool ``[N]``: trained on."""
    rejected: Mapping[int, int] | None = None
    """Of an algorithm that learns from pairs: index of the best of a group -> that of its worst."""
    kl_weight_N: Tensor | None = None
    """float32 ``[N]``: factor of the distance to the reference; None: 1 each."""
    sets: SetRewards = field(default_factory=SetRewards)
    """The prompt sets that the samples are of."""
    nearest_N: Tensor | None = None
    """float64 ``[N]``: distance of the features from those of the nearest other sample of the group."""

    @property
    def learnt(self) -> list[int]:
        """Indices of the samples that are trained on, or of the best ones of pairs."""
        if self.rejected is not None:
            return list(self.rejected)
        return torch.nonzero(self.kept_N).flatten().tolist()

    @property
    def group_N(self) -> Tensor:
        """int64 ``[N]``."""
        return torch.tensor([sample.group for sample in self.samples])

    @property
    def rows_of_sets(self) -> list[tuple[int, list[int]]]:
        """(set, indices of its samples) of each set that gave some."""
        return self.sets.split([sample.prompt_set for sample in self.samples])

    def without_samples(self) -> "ScoredBatch":
        """What learning needs besides `Learnable`; media, latents and recorded steps can be freed."""
        nothing = self.own.media.new_empty(0)
        return replace(self, own=replace(self.own, media=nothing, latents=nothing.float(), recorded={}))


def build_scoring_request(rollouts: Rollouts, latents: Tensor | None = None) -> ScoringRequest:
    """Finished samples as the rewards get them; ``latents``: in the reward service's form, where that is sent."""
    samples = rollouts.samples
    return ScoringRequest(
        rollouts.media,
        [s.prompt for s in samples],
        [s.metadata for s in samples],
        [s.sample_id for s in samples],
        fps=rollouts.fps,
        latents=latents,
    )


def mean_diversity(own: Rollouts, context: Context) -> float:
    """Over the prompts of all ranks, each by its samples on one rank, so that no media travel.

    NaN where no rank has two samples of a prompt.
    """
    found = measure_diversity(own.media, [sample.group for sample in own.samples])
    total, count = context.sum_exactly([found, [1.0] * len(found)])
    if count == 0.0:
        return math.nan
    return total / count


def stack_columns(table: RewardTable, names: Sequence[str]) -> Tensor:
    """``[n, 1 + len(names)]`` float64: the total, then each score."""
    return torch.stack([table.total_N, *(table.scores[name] for name in names)], dim=1).double()


def score_batch(
    samples: Sequence[Sample],
    own: Rollouts,
    tables: Sequence[RewardTable],
    *,
    rewards: Rewards,
    sets: SetRewards,
    job: GrpoPolicyConfig,
    global_std: bool,
    in_pairs: bool,
    context: Context,
    nearest_N: Tensor | None = None,
) -> ScoredBatch:
    """Rewards of all ranks, and from them the advantages; every rank computes the same.

    Args:
        samples: all of the step, in the order of the ranks.
        own, tables: this rank's samples, and their rewards chunk by chunk.
        rewards: what gave them.
        sets: the prompt sets; advantages are those of each set's own rewards, with statistics of its own samples.
        in_pairs: train on the best and the worst of each group.
        nearest_N: see `ScoredBatch`; it changes the advantages.

    Raises:
        UserError: more rewards are missing than the configuration allows, of the step or of a prompt set.
    """
    names = rewards.names
    table_NF = context.gather_rows(torch.cat([stack_columns(table, names) for table in tables]))
    reward_N, scores = table_NF[:, 0], {name: table_NF[:, 1 + i] for i, name in enumerate(names)}
    _check_missing(reward_N, own, tables, job)
    _check_missing_of_sets(reward_N, samples, sets, own, tables, job)
    group_N = torch.tensor([sample.group for sample in samples])
    advantage_N = used_N = torch.zeros_like(reward_N)
    kept_N = torch.ones(len(reward_N), dtype=torch.bool)
    if not job.bypass_reward:
        advantage_N = torch.full_like(reward_N, torch.nan)
        for number, rows in sets.split([sample.prompt_set for sample in samples]):
            counted = {name: score[rows] for name, score in scores.items() if sets.counts(number, name)}
            nearest = None if nearest_N is None else nearest_N[rows]
            advantage_N[rows] = _advantages(
                reward_N[rows], counted, group_N[rows], rewards, job=job, std=global_std, nearest_N=nearest
            )
        used_N = apply_mode(advantage_N, job.advantage_mode).clamp(job.advantage_low, job.advantage_high)
        whole_groups = job.on_missing_reward == "drop_group"
        kept_N = select_rows(used_N, group_N, whole_groups=whole_groups, drop_equal_groups=job.drop_equal_groups)
    kept_N = keep_largest(used_N, kept_N, job.learnt_share)
    rejected = None
    if in_pairs:
        rejected = pair_best_with_worst(torch.where(kept_N, advantage_N, torch.nan), group_N)
        kept_N = torch.zeros_like(kept_N)
        kept_N[[*rejected, *rejected.values()]] = True
    first = context.dp_rank * len(own.samples)
    found = (reward_N, scores, advantage_N, used_N, kept_N, rejected)
    return ScoredBatch(tuple(samples), own, first, *found, sets=sets, nearest_N=nearest_N)


def _advantages(
    reward_N: Tensor,
    scores: Mapping[str, Tensor],
    group_N: Tensor,
    rewards: Rewards,
    *,
    job: GrpoPolicyConfig,
    std: bool,
    nearest_N: Tensor | None,
) -> Tensor:
    """Of the total, or of each reward within its bounds, added up with scale times weight; float64 ``[N]``."""
    counted = clip_scores(rewards, scores)
    weights, temperature = {name: rewards.weights[name] for name in counted}, job.advantage_temperature
    if job.normalise_rewards == "gdpo":
        return gdpo_advantages(counted, weights, group_N)
    if job.normalise_rewards == "each":
        return combine_advantages(counted, weights, group_N, global_std=std, temperature=temperature)
    size_N = torch.stack([abs(weights[name]) * score.abs() for name, score in counted.items()]).sum(0)
    if nearest_N is not None:
        return scale_by_diversity(reward_N, nearest_N, group_N, size_N=size_N) / (temperature or 1.0)
    return group_advantages(reward_N, group_N, global_std=std, size_N=size_N, temperature=temperature)


def _check_missing(reward_N: Tensor, own: Rollouts, tables: Sequence[RewardTable], job: GrpoPolicyConfig) -> None:
    missing = int(reward_N.isnan().sum())
    if not missing:
        return
    if job.on_missing_reward == "raise":
        rule = 'train.train_policy.on_missing_reward = "raise"'
    elif missing / len(reward_N) > job.max_missing_frac:
        rule = f"train.train_policy.max_missing_frac = {job.max_missing_frac:g} allows fewer"
    else:
        return
    first = "\n  ".join(explain_missing(own, tables)[:5]) or "these samples are on another rank"
    raise UserError(f"{missing} of {len(reward_N)} rewards of this step are missing ({rule}):\n  {first}")


def _check_missing_of_sets(
    reward_N: Tensor,
    samples: Sequence[Sample],
    sets: SetRewards,
    own: Rollouts,
    tables: Sequence[RewardTable],
    job: GrpoPolicyConfig,
) -> None:
    """A set without any score may be too small a part of a step for the bound on the whole step.

    A share is no bound here: of few samples one that is lost is a large one.
    """
    for number, rows in sets.split([sample.prompt_set for sample in samples]) if sets.labels else ():
        if job.max_missing_frac < 1 and bool(reward_N[rows].isnan().all()):
            first = "\n  ".join(explain_missing(own, tables, number)[:5]) or "these samples are on another rank"
            raise UserError(
                f"all {len(rows)} rewards of prompt set {sets.labels[number]} in this step are missing "
                f"(only train.train_policy.max_missing_frac = 1 allows that):\n  {first}"
            )


@dataclass(frozen=True)
class Learnable:
    """What an algorithm may learn from, of the samples that this rank holds."""

    data: Mapping[str, Tensor]
    """``[samples, ...]`` on the CPU."""
    place: Mapping[int, int]
    """Index of a sample -> its row in ``data``."""
    rejected: Mapping[int, int] | None = None

    def rows(self, indices: Sequence[int]) -> Tensor:
        """int64 ``[len(indices)]``: where these samples are."""
        return torch.tensor([self.place[index] for index in indices], dtype=torch.int64)

    def rejected_rows(self, indices: Sequence[int]) -> Tensor | None:
        """Those of the samples that were rejected for these; None where nothing is learnt from pairs."""
        if self.rejected is None:
            return None
        return self.rows([self.rejected[index] for index in indices])


def shard_learnable(
    step: ScoredBatch, batches: Sequence[Sequence[int]], context: Context, *, in_turn: bool = False
) -> Learnable:
    """This rank's own samples, or where ``batches`` give a sample to another rank than made it, those that it needs.

    ``in_turn``: see `split_evenly`.
    """
    local, ranks, data = len(step.own.samples), context.dp_size, step.own.learnable
    rejected = step.rejected or {}
    needed: list[set[int]] = []
    for rank in range(ranks):
        splits = [split_evenly(indices, rank, ranks, in_turn=in_turn) for indices in batches]
        trained = {index for split in splits for index in split.indices}
        needed.append(trained | {rejected[index] for index in trained & rejected.keys()})
    if any(index // local != rank for rank, indices in enumerate(needed) for index in indices):
        own = sorted(needed[context.dp_rank])
        data = {name: _exchange(value, own, context) for name, value in data.items()}
    else:
        own = range(step.first, step.first + local)
    return Learnable(data, {index: row for row, index in enumerate(own)}, step.rejected)


def _exchange(value: Tensor, needed: Sequence[int], context: Context) -> Tensor:
    """Rows ``needed``, by their index in the step, of a tensor whose rows lie on all ranks.

    One row of each rank travels at a time, so that no rank holds the rows of all.
    """
    found, place = value.new_empty(len(needed), *value.shape[1:]), {index: row for row, index in enumerate(needed)}
    for row in range(len(value)):
        for rank, given in enumerate(context.gather_rows(value[row : row + 1])):
            index = rank * len(value) + row
            if index in place:
                found[place[index]] = given
    return found


def take_share(
    indices: Sequence[int],
    batch: ScoredBatch,
    learnable: Learnable,
    value_N: Tensor,
    job: GrpoPolicyConfig,
    context: Context,
    *,
    in_turn: bool = False,
) -> Share:
    """This rank's samples of an optimiser step on those at ``indices``, over all ranks; see `split_evenly`."""
    own = split_evenly(indices, context.dp_rank, context.dp_size, in_turn=in_turn)
    samples = [batch.samples[index] for index in own.indices]
    return Share(
        [sample.sample_id for sample in samples],
        [sample.key for sample in samples],
        learnable.data,
        learnable.rows(own.indices),
        value_N[list(own.indices)],
        torch.tensor(own.weights),
        own.positions,
        learnable.rejected_rows(own.indices),
        None if batch.kl_weight_N is None else batch.kl_weight_N[list(own.indices)],
        find_sets(job, samples),
    )


def explain_missing(own: Rollouts, tables: Sequence[RewardTable], prompt_set: int | None = None) -> list[str]:
    """One line for each sample of this rank, or of one prompt set on it, whose reward is missing."""
    lines, offset = [], 0
    for table in tables:
        for row, reason in sorted(table.reasons.items()):
            sample = own.samples[offset + row]
            if prompt_set in (None, sample.prompt_set):
                lines.append(f"sample {sample.sample_id} ({sample.prompt[:60]!r}): {reason}")
        offset += len(table.total_N)
    return lines


def compute_statistics(value_N: Tensor) -> dict[str, float]:
    """Mean, population standard deviation, largest and smallest of what is not missing; NaN when all is."""
    valid = value_N[~value_N.isnan()]
    if len(valid) == 0:
        return dict.fromkeys(("mean", "std", "max", "min"), math.nan)
    found = {"mean": valid.mean(), "std": valid.std(correction=0), "max": valid.max(), "min": valid.min()}
    return {name: float(value) for name, value in found.items()}


def mean(value_N: Tensor) -> float:
    """Mean of what is not missing."""
    return compute_statistics(value_N)["mean"]


def compute_validation_metrics(reward_NF: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Of the rows that ``columns`` gives for validation samples."""
    total_N = reward_NF[:, 0]
    metrics = {f"val/reward/{key}": value for key, value in compute_statistics(total_N).items()}
    metrics |= {f"val/reward/{name}_mean": mean(reward_NF[:, 1 + i]) for i, name in enumerate(names)}
    return metrics | {"val/samples": float(len(reward_NF)), "val/missing": float(total_N.isnan().sum())}


def has_no_signal(step: ScoredBatch) -> bool:
    """Whether the advantages of every prompt's samples are all alike."""
    return zero_std_share(step.used_N, step.group_N) == 1.0


def compute_reward_metrics(step: ScoredBatch) -> dict[str, float]:
    """What a step's rewards and advantages looked like."""
    metrics = {f"reward/{name}": value for name, value in compute_statistics(step.reward_N).items()}
    metrics |= {f"adv/{name}": value for name, value in compute_statistics(step.advantage_N).items()}
    asked = [name for name in step.scores if any(step.sets.counts(number, name) for number, _ in step.rows_of_sets)]
    metrics |= {f"reward/{name}_mean": mean(step.scores[name]) for name in asked}
    metrics["reward/group_std"] = mean_group_std(step.reward_N, step.group_N)
    metrics["adv/zero_std_ratio"] = zero_std_share(step.used_N, step.group_N)
    metrics["rollout/missing"] = float(step.reward_N.isnan().sum())
    metrics["train/samples_used"] = float(step.kept_N.sum())
    for number, rows in step.rows_of_sets if step.sets.labels else ():
        label = step.sets.labels[number]
        metrics[f"reward/{label}/mean"] = mean(step.reward_N[rows])
        scored = not bool(step.used_N[rows].isnan().all())
        share = zero_std_share(step.used_N[rows], step.group_N[rows]) if scored else math.nan
        metrics[f"adv/{label}/zero_std_ratio"] = share
    if step.kl_weight_N is not None:
        metrics["train/kl_gated_ratio"] = mean(step.kl_weight_N)
    if step.nearest_N is not None:
        metrics["adv/nearest_distance"] = mean(step.nearest_N)
    return metrics


def to_score_dict(row: Tensor, names: Sequence[str]) -> dict[str, float | None]:
    """A row of `columns` as what a gallery shows; None: missing."""
    values = [None if math.isnan(value) else value for value in row.tolist()]
    return dict(zip([TOTAL, *names], values, strict=True))


def is_gallery_due(done: int, total_steps: int, interval: int | None) -> bool:
    """Whether the samples of the step that makes it ``done`` steps are shown."""
    return done == 1 or done % (interval or GALLERY_INTERVAL) == 0 or done == total_steps


def build_gallery(step: ScoredBatch) -> list[Shown]:
    """The best and the worst samples of all ranks, with the pixels of this rank's own. Empty for what is no image."""
    if step.own.media.dtype != torch.uint8:
        return []
    best, worst = _pick_of_sets(step)
    names, own = list(step.scores), range(step.first, step.first + len(step.own.samples))
    table_NF = torch.stack([step.reward_N, *step.scores.values()], dim=1)
    gallery = []
    for row, group in [*((row, "best") for row in best), *((row, "worst") for row in worst)]:
        pixels, sample = None, step.samples[row]
        if row in own:
            pixels = step.own.media[row - step.first].clone()  # does not keep the others
        scores = to_score_dict(table_NF[row], names)
        scores = {n: score for n, score in scores.items() if n == TOTAL or step.sets.counts(sample.prompt_set, n)}
        gallery.append(Shown(pixels, sample.prompt, sample.sample_id, group, scores, fps=step.own.fps))
    return gallery


def _pick_of_sets(step: ScoredBatch) -> tuple[list[int], list[int]]:
    """Best and worst samples, as many of each set, as rewards of different sets do not compare."""
    best, worst, parts = list[int](), list[int](), step.rows_of_sets
    for _, rows in parts:
        found = pick_best_and_worst(step.reward_N[rows], step.group_N[rows], max(GALLERY // len(parts), 1))
        best += [rows[row] for row in found[0]]
        worst += [rows[row] for row in found[1]]
    return best, worst
