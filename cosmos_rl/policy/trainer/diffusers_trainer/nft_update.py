"""The gradient of DiffusionNFT for one optimiser step (arXiv 2509.16117, algorithm 1, lines 8 to 12)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from cosmos_rl.algorithms.nft import NftTerms, nft_loss, norm_ratio, velocity_kl
from cosmos_rl.diffusion.schedule import mix
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.model.diffusers.cond import Cond
from cosmos_rl.policy.model.diffusers.policies import Policies
from cosmos_rl.policy.model.diffusers.velocity_model import VelocityModel
from cosmos_rl.policy.trainer.diffusers_trainer.dealing import chosen_levels
from cosmos_rl.policy.trainer.diffusers_trainer.watch_rules import norm_metrics
from cosmos_rl.rollout.sampler import Slot

TARGET_BYTES = 256 * 2**20
"""Velocities of the old policy and the reference that are kept at once. Exchanging policies costs time where they are
copies, so they are computed for many micro-batches in a row."""


@dataclass(frozen=True)
class NftSettings:
    """The keys of the loss."""

    beta: float
    kl_beta: float
    advantage_high: float
    adaptive_weight: bool = True


@dataclass(frozen=True)
class Rows:
    """``R`` (sample, noise level) pairs of one rank, in the order in which they are run."""

    latents: Tensor
    """Clean latents ``[R, C, ...]`` on any device."""
    prompts: Sequence[str]
    sigma: Tensor
    """``[R]`` float32."""
    optimality: Tensor
    """``[R]`` in [0, 1]."""
    weight: Tensor
    """``[R]``; 0 for rows that only fill up."""
    noise_ids: Sequence[int]
    """Keys of the rows' noise."""


def drawn_rows(
    slots: Sequence[Slot],
    latents: Tensor,
    optimality_S: Tensor,
    weight_S: Tensor,
    *,
    levels: Tensor,
    count: int,
    key: tuple[int, str, int],
) -> Rows:
    """``count`` of the noise ``levels`` for each of ``S`` samples: one level of every sample, then the next one.

    Args:
        slots, latents, optimality_S, weight_S: the samples.
        levels: float32, those of the sampler without the last 0.
        key: (seed, purpose, step) of the draw.
    """
    seed, purpose, step = key
    total = len(levels)
    drawn = [chosen_levels(slot.sample_id, count, total, seed=seed, purpose=purpose, step=step) for slot in slots]
    pairs = [(row, drawn[row][j]) for j in range(count) for row in range(len(slots))]
    order = torch.tensor([row for row, _ in pairs])
    return Rows(
        latents=latents[order],
        prompts=[slots[row].prompt for row, _ in pairs],
        sigma=torch.stack([levels[level] for _, level in pairs]),
        optimality=optimality_S[order],
        weight=weight_S[order],
        noise_ids=[slots[row].sample_id * total + level for row, level in pairs],
    )


def add_gradient(loss: Tensor, factor: float) -> float:
    """Add the gradient of ``factor * loss``; the loss."""
    (factor * loss).backward()
    return float(loss.detach())


@dataclass
class TermSums:
    """Sums and maxima over rows, ready to be reduced over ranks."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    count: float = 0.0
    norms: list[Tensor] = field(default_factory=list)
    """``[R, 2]``: norm of the velocity relative to the reference's (NaN for a row that only fills up), noise level."""
    broken: list[str] = field(default_factory=list)
    """The first rows of this rank whose loss is not finite."""

    def add(self, terms: NftTerms, weight_B: Tensor, kl_B: Tensor | None, old_kl_B: Tensor | None) -> None:
        """Rows of one optimiser step; nothing has a gradient."""
        values = {
            "policy_loss": terms.policy_B,
            "unweighted_policy_loss": terms.unweighted_B,
            "x0_norm": terms.x0_norm_B,
            "old_deviation": terms.old_deviation_B,
        }
        if kl_B is not None and old_kl_B is not None:
            values |= {"kl_loss": kl_B, "old_kl": old_kl_B}
        for name, value_B in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float((value_B.double() * weight_B.double()).sum())
        counted = weight_B > 0
        tops = {"x0_norm_max": terms.x0_norm_max_B, "old_deviation_max": terms.old_deviation_max_B}
        tops |= {name: values[name] for name in ("policy_loss", "unweighted_policy_loss", "kl_loss") if name in values}
        for name, value_B in tops.items():
            top = float(value_B[counted].max()) if bool(counted.any()) else 0.0
            self.maxima[name] = max(self.maxima.get(name, top), top)
        self.count += float(weight_B.sum())

    def merge(self, other: "TermSums") -> None:
        """Add the terms of another optimiser step."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)
        self.count += other.count
        self.norms += other.norms

    def metrics(self, context: Context, loss_weights: Mapping[str, float]) -> dict[str, float]:
        """Means over the rows of all ranks, and maxima, by their documented keys; the same on all ranks.

        ``loss_weights``: the terms that the loss is made of, and their factors in it.
        """
        names, tops = sorted(self.sums), sorted(self.maxima)
        *sums, count = context.sum_over_ranks([*(self.sums[name] for name in names), self.count])
        found = {f"train/{name}_avg": value / max(count, 1e-12) for name, value in zip(names, sums, strict=True)}
        for name, value in zip(tops, context.max_over_ranks([self.maxima[name] for name in tops]), strict=True):
            found[f"train/{name}_avg" if name.endswith("_max") else f"train/{name}_max"] = value
        if self.norms:
            ratio_R, sigma_R = context.gather_rows(torch.cat(self.norms)).unbind(1)
            found |= norm_metrics("train", ratio_R, sigma_R)
        loss = sum(weight * found.get(f"train/{name}_avg", 0.0) for name, weight in loss_weights.items())
        return {**found, "train/loss_avg": loss}


@dataclass(frozen=True)
class _Micro:
    """One forward pass, with what the frozen policies say about it."""

    clean: Tensor
    noised: Tensor
    sigma: Tensor
    places: Tensor
    """Of the rows' conditions; these are larger than all else, so they are gathered for each pass."""
    optimality: Tensor
    weight: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


class NftUpdate:
    """Accumulates the gradient of one optimiser step."""

    def __init__(self, model: VelocityModel, policies: Policies, settings: NftSettings, micro_batch: int) -> None:
        self._model = model
        self._policies = policies
        self._settings = settings
        self._micro_batch = micro_batch

    def accumulate(
        self,
        rows: Rows,
        cond: Cond,
        *,
        row_cond: Tensor,
        noise_key: tuple[int, str, int],
        old_is_current: bool,
        kl_beta: float,
        loss_factor: float = 1.0,
    ) -> TermSums:
        """Add the gradient of ``loss_factor * sum(loss)`` of this rank's rows.

        The sum is not divided by the number of rows before its backward pass: at 512 px and 10,000 rows the gradient of
        one number of the velocity would be 1e-8, which float16 does not have.

        Args:
            rows: the pairs.
            cond: conditions of the distinct prompts.
            row_cond: int64 ``[R]``: each row's place in ``cond``.
            noise_key: (seed, purpose, step) of the rows' noise.
            old_is_current: the old policy's velocity is the trained one's, so it is not run.
            kl_beta: weight of the distance to the reference; 0 does not run it.
            loss_factor: the loss scale of float16.
        """
        told: list[_Told] = []
        micros = [slice(i, i + self._micro_batch) for i in range(0, len(rows.prompts), self._micro_batch)]
        for block in self._blocks(micros, rows):
            drawn = [self._drawn(rows, which, row_cond[which], noise_key) for which in block]
            for micro in self._with_targets(drawn, cond, old=not old_is_current, reference=kl_beta > 0.0):
                self._model.synchronise_gradients(len(told) + 1 == len(micros))
                told.append(self._backward(micro, cond.rows(micro.places), kl_beta, loss_factor))
        terms = TermSums()
        if told:
            joined, norms = _joined(told), [ratio_B for *_, ratio_B in told if ratio_B is not None]
            terms.add(*joined)  # all at once: to read a number is to wait for the device
            if norms:
                terms.norms.append(torch.stack([torch.cat(norms).cpu(), rows.sigma.cpu()], dim=1))
            if not math.isfinite(terms.sums["policy_loss"]):
                terms.broken = _broken(rows, joined[0].policy_B.cpu())
        return terms

    def _blocks(self, micros: Sequence[slice], rows: Rows) -> Iterator[Sequence[slice]]:
        """Micro-batches in blocks whose kept tensors stay under the cap."""
        each = 4 * 4 * self._micro_batch * rows.latents[0].numel()  # clean, noised, old, reference in float32
        size = max(TARGET_BYTES // each, 1)
        for first in range(0, len(micros), size):
            yield micros[first : first + size]

    def _drawn(self, rows: Rows, which: slice, places: Tensor, key: tuple[int, str, int]) -> _Micro:
        device = self._model.device
        seed, purpose, step = key
        clean = rows.latents[which].to(device)
        noise = randomness.normal(clean.shape[1:], seed, purpose, step, rows.noise_ids[which]).to(device)
        sigma = rows.sigma[which].to(device)
        optimality, weight = rows.optimality[which].to(device), rows.weight[which].to(device)
        return _Micro(clean, mix(clean, noise, sigma), sigma, places, optimality, weight)

    @torch.no_grad()
    def _with_targets(self, micros: Sequence[_Micro], cond: Cond, *, old: bool, reference: bool) -> list[_Micro]:
        """The same micro-batches with the velocities of the frozen policies that are wanted."""
        model, found = self._model, list(micros)
        for wanted, name in ((old, "old"), (reference, "reference")):
            if not wanted:
                continue
            with self._policies.using("old" if name == "old" else "reference"), model.evaluating():
                velocities = [model.velocity(m.noised, m.sigma, cond.rows(m.places)) for m in micros]
            found = [replace(m, **{name: v}) for m, v in zip(found, velocities, strict=True)]
        return found

    def _backward(self, micro: _Micro, cond: Cond, kl_beta: float, loss_factor: float) -> "_Told":
        settings = self._settings
        velocity = self._model.velocity(micro.noised, micro.sigma, cond)
        self._model.evaluations += 2 * len(velocity)  # a backward pass is as much work as two forward passes
        old = velocity.detach() if micro.old is None else micro.old
        found = nft_loss(
            velocity,
            old,
            micro.clean,
            micro.noised,
            micro.sigma,
            micro.optimality,
            beta=settings.beta,
            scale=settings.advantage_high,
            element_mask=cond.element_mask,
            adaptive_weight=settings.adaptive_weight,
            weight_B=micro.weight,
        )
        loss, kl_B, old_kl_B, ratio_B = found.loss_sum, None, None, None
        if micro.reference is not None:
            kl_B = velocity_kl(velocity, micro.reference, cond.element_mask)
            old_kl_B = velocity_kl(old, micro.reference, cond.element_mask)
            loss = loss + kl_beta * (kl_B * micro.weight.to(kl_B)).sum()
            ratio_B = norm_ratio(velocity.detach(), micro.reference, cond.element_mask)
            ratio_B = torch.where(micro.weight > 0, ratio_B, torch.nan)
        (loss_factor * loss).backward()
        found = replace(found, loss_sum=found.loss_sum.detach())
        return found, micro.weight, None if kl_B is None else kl_B.detach(), old_kl_B, ratio_B


_Told = tuple[NftTerms, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""What `TermSums.add` takes, and the rows' norm ratios."""


def _broken(rows: Rows, loss_R: Tensor) -> list[str]:
    """Where the loss is not finite, up to three rows that count."""
    places = torch.nonzero(~loss_R.isfinite() & (rows.weight.cpu() > 0)).flatten().tolist()
    return [f"{rows.prompts[i][:60]!r} at noise level {float(rows.sigma[i]):.3g}" for i in places[:3]]


def _joined(parts: Sequence[_Told]) -> tuple[NftTerms, Tensor, Tensor | None, Tensor | None]:
    """The rows of several micro-batches as those of one."""
    terms, weights, kls, old_kls, _ = zip(*parts, strict=True)
    names = [entry.name for entry in fields(NftTerms)]
    whole = {name: torch.cat([getattr(t, name) for t in terms]) for name in names if name.endswith("_B")}
    whole |= {name: torch.stack([getattr(t, name) for t in terms]).sum() for name in names if name not in whole}
    kl_B, old_kl_B = (None if part[0] is None else torch.cat(part) for part in (kls, old_kls))
    return NftTerms(**whole), torch.cat(weights), kl_B, old_kl_B
