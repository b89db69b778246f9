"""On-policy distillation: policies in the place of the reference, one for all prompts or one for each prompt set."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cosmos_rl.policy.config import Config, GrpoPolicyConfig
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.config.plan import copies_reference, keeps_common_reference, list_teachers, number_teachers
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.diffusers.flow_model import FlowModel
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.policies import Kept, Policies
from cosmos_rl.policy.trainer.rl.algorithm import MicroBatch
from cosmos_rl.rollout.sampler import Conditions, Sample

MaxOverRanks = Callable[[Sequence[float]], list[float]]


def choose_policies(job: GrpoPolicyConfig, *, keep_old: bool) -> Kept:
    """Which policies a run keeps beside the trained one; ``keep_old`` as `plan_online` says."""
    kept: Kept = {"keep_old": keep_old, "keep_reference": keeps_common_reference(job)}
    if copies_reference(job):
        kept["moving_reference"] = True
    if number_teachers(job):
        kept["teachers"] = len(list_teachers(job))
    return kept


def load_teachers(config: Config, model: PipelineModel, policies: Policies) -> None:
    """Put the teachers in their places: that of all prompts in the reference's, those of prompt sets after it.

    Raises:
        UserError: one has other weights than the policy.
    """
    job = online_table(config)
    if job.teacher:
        policies.load_reference(lambda: model.load_policy(job.teacher, "train.train_policy.teacher"))
    for number, (key, place) in enumerate(list_teachers(job).items(), 1):
        policies.load_reference(lambda key=key, place=place: model.load_policy(place, key), number)


def find_sets(job: GrpoPolicyConfig, samples: Sequence[Sample]) -> Tensor | None:
    """Which prompt set each sample is of, int64 ``[S]``; None: there is one."""
    if not job.dataset.sets:
        return None
    return torch.tensor([sample.prompt_set for sample in samples], dtype=torch.int64)


class _Pass(NamedTuple):
    reference: int
    rows: list[int]


def plan_passes(
    reference_R: Tensor, count: int, blocks: Sequence[Sequence[slice]], size: int, max_over_ranks: MaxOverRanks
) -> list[list[_Pass]]:
    """The forward passes of the references for each block of micro-batches, as ``(reference, rows)``.

    A row is in one pass, that of its own reference, with at most ``size`` rows, counted within the block. A sharded
    network needs all ranks in every pass, with the same weights, so each rank has as many of each reference as the rank
    that has most; where its own rows end, it has a pass of one row whose result nobody takes.

    Args:
        reference_R: ``[R]``.
        count: how many references there are, the same on all ranks.
        blocks: slices of the rows.
    """
    parts: list[list[list[list[int]]]] = []
    for block in blocks:
        own_B = reference_R[block[0].start : block[-1].stop]
        rows = [torch.nonzero(own_B == k).flatten().tolist() for k in range(count)]
        parts.append([[own[i : i + size] for i in range(0, len(own), size)] for own in rows])
    counts = max_over_ranks([float(len(passes)) for block in parts for passes in block])
    found, left = [], iter(counts)
    for block in parts:
        padded = ((k, [*passes, *[[]] * (int(next(left)) - len(passes))]) for k, passes in enumerate(block))
        found.append([_Pass(k, rows) for k, passes in padded for rows in passes])
    return found


@torch.no_grad()
def add_own_references(
    model: FlowModel,
    policies: Policies,
    micros: Sequence[MicroBatch],
    passes: Sequence[_Pass],
    conditions: Conditions,
    guidance: float,
) -> list[MicroBatch]:
    """The micro-batches of a block with the velocities of each row's own reference, by ``plan_passes``."""
    state = torch.cat([micro.state for micro in micros])
    level = Level(*(torch.cat([micro.level[part] for micro in micros]) for part in range(2)))
    prompts = [prompt for micro in micros for prompt in micro.prompts]
    found: list[Tensor] = []
    for number in dict.fromkeys(one.reference for one in passes):
        with policies.using("reference", number), model.eval_mode():
            for rows in (one.rows for one in passes if one.reference == number):
                index = torch.tensor(rows or [0], device=state.device)
                cond = conditions([prompts[i] for i in index.tolist()])
                velocity = model.velocity(state[index], level.rows(index), cond, guidance=guidance)
                found.append(velocity[: len(rows)])
    order = torch.tensor([row for one in passes for row in one.rows], device=state.device)
    velocities = torch.cat(found)[order.argsort()].split([len(micro.state) for micro in micros])
    return [
        replace(micro, frozen={**micro.frozen, "reference": velocity})
        for micro, velocity in zip(micros, velocities, strict=True)
    ]
