"""The gradient of one optimiser step: micro-batches through the frozen policies and the trained one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from cosmos_rl.diffusion.elements import widen
from cosmos_rl.policy.config.plan import KEPT_BYTES
from cosmos_rl.policy.model.diffusers.flow_model import FlowModel
from cosmos_rl.policy.model.policies import Policies, PolicyName
from cosmos_rl.policy.trainer.rl.algorithm import VELOCITY_GRADIENT, Algorithm, MicroBatch, Rows, Terms
from cosmos_rl.policy.trainer.rl.teachers import MaxOverRanks, add_own_references, plan_passes
from cosmos_rl.rollout.sampler import Conditions


@dataclass(frozen=True)
class RowByRow:
    """How rows are trained on of which each is a forward pass, and is added up over the ranks by itself."""

    seed: Callable[[int], None]
    """Before a row's forward pass: its dropout."""
    collect: Callable[[int], None]
    """After a row's backward pass: its gradient, which is the sum over the ranks' rows of this number."""


def accumulate_gradient(
    model: FlowModel,
    policies: Policies,
    algorithm: Algorithm,
    rows: Rows,
    conditions: Conditions,
    *,
    micro_batch: int,
    frozen: Sequence[PolicyName],
    kl_beta: float,
    loss_factor: float = 1.0,
    references: Sequence[int] = (),
    max_over_ranks: MaxOverRanks = list,
    row_by_row: RowByRow | None = None,
) -> Terms:
    """Add the gradient of ``loss_factor * sum(loss)`` of this rank's rows; their terms, each ``[R]``.

    The sum is not divided by the number of rows before its backward pass: at 512 px and 10,000 rows the gradient of one
    number of the velocity would be 1e-8, which float16 does not have.

    Args:
        micro_batch: rows of one forward pass.
        frozen: policies that the loss needs.
        loss_factor: the loss scale of float16.
        references: which one each prompt set has, as `number_teachers` says; empty: all rows have the one.
        max_over_ranks: element-wise; one rank: what it is given.
        row_by_row: of micro-batches of one row, where the gradients are added up outside; None: they are over the ranks
            in the last backward pass.
    """
    found: list[Terms] = []
    slices = [slice(i, i + micro_batch) for i in range(0, len(rows.prompts), micro_batch)]
    blocks, passes = list(_blocks(slices, rows, micro_batch)), None
    if references and rows.prompt_set is not None and "reference" in frozen:
        reference_R, count = torch.tensor(references)[rows.prompt_set], max(references) + 1
        passes = plan_passes(reference_R, count, blocks, micro_batch, max_over_ranks)
    for block_number, block in enumerate(blocks):
        micros = [algorithm.micro_batch(rows, which, model.device) for which in block]
        for name in frozen:
            if passes is not None and name == "reference":
                own = passes[block_number]
                micros = add_own_references(model, policies, micros, own, conditions, algorithm.guidance)
                continue
            micros = _add_velocities(model, policies, name, micros, conditions, algorithm.guidance)
        for micro in micros:
            number = len(found)
            model.set_gradient_sync(row_by_row is not None or number + 1 == len(slices))
            if row_by_row is not None:
                row_by_row.seed(number)
            loss, terms = _compute_loss(model, algorithm, micro, conditions, kl_beta, loss_factor, rows.sampler_step)
            (loss_factor * loss).backward()
            if row_by_row is not None:
                row_by_row.collect(number)
            found.append(terms)
    if not found:
        return {}
    return {name: torch.cat([terms[name] for terms in found]) for name in found[0]}


def _compute_loss(
    model: FlowModel,
    algorithm: Algorithm,
    micro: MicroBatch,
    conditions: Conditions,
    kl_beta: float,
    loss_factor: float,
    sampler_step: torch.Tensor | None,
) -> tuple[torch.Tensor, Terms]:
    """The sum of the losses of some rows, which the trained policy runs, and their terms."""
    cond, forwards = conditions(micro.prompts), -model.num_evaluations
    velocity = model.velocity(micro.state, micro.level, cond, guidance=algorithm.guidance)
    forwards += model.num_evaluations
    model.num_evaluations += 2 * forwards  # a backward pass is as much work as two forward passes
    loss, terms = algorithm.loss(velocity, micro, cond.element_mask, kl_beta)
    if sampler_step is not None:
        measure_gradient(velocity, terms, loss_factor)
    return loss, terms


def measure_gradient(velocity: torch.Tensor, terms: Terms, loss_factor: float) -> None:
    """Have the coming backward pass add ``velocity_gradient`` to the terms: the L2 norm of the loss's gradient with
    respect to the velocity of each row, ``[B]``. It passes there anyway, and is not changed."""

    def keep(gradient: torch.Tensor) -> None:
        terms[VELOCITY_GRADIENT] = torch.linalg.vector_norm(widen(gradient).flatten(1), dim=1) / loss_factor

    velocity.register_hook(keep)


def _blocks(slices: Sequence[slice], rows: Rows, micro_batch: int) -> Iterator[Sequence[slice]]:
    """Micro-batches in blocks whose kept tensors stay under the cap."""
    latents = next(iter(rows.data.values()))
    each = 4 * 4 * micro_batch * latents[0].numel()  # clean, noised, old, reference in float32
    size = max(KEPT_BYTES // each, 1)
    for first in range(0, len(slices), size):
        yield slices[first : first + size]


@torch.no_grad()
def _add_velocities(
    model: FlowModel,
    policies: Policies,
    name: PolicyName,
    micros: Sequence[MicroBatch],
    conditions: Conditions,
    guidance: float,
) -> list[MicroBatch]:
    with policies.using(name), model.eval_mode():
        found = [model.velocity(m.state, m.level, conditions(m.prompts), guidance=guidance) for m in micros]
    return [replace(m, frozen={**m.frozen, name: v}) for m, v in zip(micros, found, strict=True)]
