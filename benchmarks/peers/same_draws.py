"""Epochs of DiffusionNFT's loop that draw what ours has drawn: what is then still different?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.peers.accuracy import Judges
from benchmarks.peers.loops import Bench, Nft, Ours
from benchmarks.peers.recipe import Recipe
from cosmos_rl.distributed import randomness

HEADER = "| epoch | samples | rewards | advantages | gradients | weights | old policy | average |"


@dataclass
class Drawn:
    """What an epoch of ours drew."""

    start: dict[int, Tensor] = field(default_factory=dict)
    """Start noise by sample id."""
    samples: Sequence[Any] = ()
    order: list[int] = field(default_factory=list)
    """Indices of the samples as the optimiser steps take them."""
    levels: dict[int, list[int]] = field(default_factory=dict)
    """Noise levels by sample id."""
    noise: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By sample id and noise level."""
    batch: Any = None
    gradients: list[Tensor] = field(default_factory=list)
    """Of each optimiser step, as the optimiser gets them."""


class Pair:
    """Both loops, from the same adapter."""

    def __init__(self, checkout: Path, bench: Bench, recipe: Recipe) -> None:
        if recipe.passes != 1:
            raise ValueError("draws are handed over for one pass over the samples")
        self.ours, self.theirs = Ours(bench, recipe), Nft(checkout, bench, recipe)
        self._recipe, self._task = recipe, self.ours._task
        named = self.theirs.seen["transformer"].named_parameters()
        found = {name.removeprefix("base_model.model."): p for name, p in named if ".lora_" in name}
        default = {name: p for name, p in found.items() if ".default." in name}
        if set(default) != set(self._task.params):
            raise RuntimeError(f"adapters of other layers: {sorted(set(default) ^ set(self._task.params))[:4]}")
        names = list(self._task.params)
        self._their_params = [default[name] for name in names]
        self._their_old = [found[name.replace(".default.", ".old.")] for name in names]
        self._their_ids: list[int] = []
        assert self._task.ema is not None
        self._shadow = self._task.ema.shadow
        with torch.no_grad():
            for name, param in default.items():
                self._task.params[name].copy_(param)
                self._shadow[name].copy_(param)
        self._task.policies.update_old(0.0)
        self.start = [param.detach().clone() for param in self._their_params]

    def epoch(self) -> list[float]:
        """One epoch of each; relative differences in the order of the table, by Euclidean norms."""
        drawn = self._record()
        seen, gradients = self._replay(drawn)
        ids = [sample.sample_id for sample in drawn.samples]
        place = [ids.index(one) for one in self._their_ids]
        followed = [id(param) for param in self.theirs.seen["transformer_trainable_parameters"]]
        averages = dict(zip(followed, self.theirs.seen["ema"].ema_parameters, strict=True))
        averaged = [averages[id(param)] for param in self._their_params]
        names, task = list(self._task.params), self._task
        old = task.policies.old_state()
        return [
            _apart([drawn.batch.own.latents[place]], [seen["filtered_samples"]["latents_clean"]]),
            _apart([drawn.batch.reward_N[place]], [torch.from_numpy(seen["gathered_rewards_dict"]["avg"][:, 0])]),
            _apart([drawn.batch.advantage_N[place]], [seen["filtered_samples"]["advantages"][:, 0]]),
            _apart(drawn.gradients, gradients),
            self._moved_apart([task.params[name] for name in names], self._their_params),
            self._moved_apart([old[name] for name in names], self._their_old),
            self._moved_apart([self._shadow[name] for name in names], averaged),
        ]

    def _moved_apart(self, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
        """Of what has changed since the start."""
        return _apart(
            [a - b for a, b in zip(ours, self.start, strict=True)],
            [a - b for a, b in zip(theirs, self.start, strict=True)],
        )

    def _record(self) -> Drawn:
        drawn, task = Drawn(), self._task
        noise, plan, rows = task._sampler._noise, task._plan_updates, type(task.algorithm).rows
        step = task.optimizer.torch_optimizer.step

        def note_noise(samples: Sequence[Any], purpose: str, step: int) -> Any:
            made = noise(samples, purpose, step)
            drawn.start.update(zip([sample.sample_id for sample in samples], made["latents"], strict=True))
            return made

        def note_plan(draws: Any, batch: Any) -> Any:
            updates = plan(draws, batch)
            drawn.batch, drawn.samples = batch, batch.samples
            drawn.order = [index for update in updates for index in update]
            return updates

        def note_rows(algorithm: Any, share: Any, *, levels: Any, **given: Any) -> Any:
            made, total = rows(algorithm, share, levels=levels, **given), len(levels.sigma)
            shape = made.data["clean"].shape[1:]
            noises = randomness.normal(shape, *made.noise_key, made.noise_ids)
            for number, one in zip(made.noise_ids, noises, strict=True):
                drawn.levels.setdefault(number // total, []).append(number % total)
                drawn.noise[number // total, number % total] = one
            return made

        def note_step(*args: Any, **given: Any) -> Any:
            drawn.gradients += [_gradient(param) for param in task.params.values()]
            return step(*args, **given)

        with (
            mock.patch.object(task._sampler, "_noise", note_noise),
            mock.patch.object(task, "_plan_updates", note_plan),
            mock.patch.object(type(task.algorithm), "rows", note_rows),
            mock.patch.object(task.optimizer.torch_optimizer, "step", note_step),
        ):
            self.ours.epoch()
        return drawn

    def _replay(self, drawn: Drawn) -> tuple[dict[str, Any], list[Tensor]]:
        """What their loop knew before learning, and its gradients."""
        theirs, module, total = self.theirs, self.theirs.module, self._recipe.sampling_steps
        gradients: list[Tensor] = []
        encode, optimizer = module.compute_text_embeddings, theirs.seen["optimizer"]
        step = optimizer.step

        def note_prompts(prompts: Sequence[str], *args: Any, **given: Any) -> Any:
            free = {prompt: [s.sample_id for s in drawn.samples if s.prompt == prompt] for prompt in set(prompts)}
            self._their_ids = [free[prompt].pop(0) for prompt in prompts]
            return encode(prompts, *args, **given)

        def start(*args: Any) -> Tensor:
            return torch.stack([drawn.start[one] for one in self._their_ids])

        def note_step(*args: Any, **given: Any) -> Any:
            gradients.extend(_gradient(param) for param in self._their_params)
            return step(*args, **given)

        ids = [drawn.samples[index].sample_id for index in drawn.order]
        given = _Given(ids, lambda: self._their_ids, drawn, total, self._recipe)
        with (
            mock.patch.object(module, "compute_text_embeddings", note_prompts),
            mock.patch.object(module, "torch", given),
            mock.patch.object(theirs.seen["pipeline"], "prepare_latents", start),
            mock.patch.object(optimizer, "step", note_step),
            theirs._random.in_use(),
        ):
            seen = theirs._advance("learning")
            theirs.seen = theirs._advance("sampling")
        return seen, gradients

    def close(self) -> None:
        """End both."""
        self.ours.close()
        self.theirs.close()


class _Given:
    """torch for their loop, with the draws of ours where they are trained on: the order of the samples, then that of
    the noise levels of each of them, then noise for each micro-batch and level."""

    def __init__(
        self, ids: Sequence[int], their_ids: Callable[[], Sequence[int]], drawn: Drawn, total: int, recipe: Recipe
    ) -> None:
        self._ids, self._their_ids, self._drawn, self._recipe = ids, their_ids, drawn, recipe
        self._permuted = self._noised = 0
        self._levels = [[*drawn.levels[one], *(k for k in range(total) if k not in drawn.levels[one])] for one in ids]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randperm(self, count: int, **given: Any) -> Tensor:
        """The order of the samples, then of the levels of each."""
        if "generator" in given:
            return torch.randperm(count, **given)
        self._permuted += 1
        if self._permuted == 1:
            return torch.tensor([self._their_ids().index(one) for one in self._ids])
        return torch.tensor(self._levels[self._permuted - 2])

    def randn_like(self, like: Tensor) -> Tensor:
        """Noise of a micro-batch at its level."""
        number, level = divmod(self._noised, self._recipe.levels)
        self._noised += 1
        first = number * self._recipe.micro_batch
        rows = range(first, first + len(like))
        return torch.stack([self._drawn.noise[self._ids[row], self._levels[row][level]] for row in rows])


def _apart(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    a, b = (torch.cat([one.detach().double().flatten() for one in side]) for side in (ours, theirs))
    return float((a - b).norm() / b.norm())


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad.clone()


def measure(checkout: Path, bench: Bench, recipe: Recipe, epochs: int, judges: Judges) -> list[str]:
    """Lines of the table, and what the judges say of both at the end."""
    pair = Pair(checkout, bench, recipe)
    rows = [HEADER, "|---" * 8 + "|"]
    for number in range(epochs):
        rows.append(f"| {number + 1} | {' | '.join(f'{one:.0e}' for one in pair.epoch())} |")
    for name, loop in (("ours", pair.ours), ("theirs", pair.theirs)):
        with loop.result() as pipe:
            look = judges.look(pipe)
        rows.append(f"{name}: judge 2 {look.judge_2:.3f}, judge 1 {look.judge_1:.3f}, reward {look.reward:.4f}")
    pair.close()
    return rows
