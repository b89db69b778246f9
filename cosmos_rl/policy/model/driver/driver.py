"""Conditions, levels, velocities, rollouts and media of a stock diffusers pipeline, by running the pipeline itself."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as tree

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.driver import conditioning
from cosmos_rl.policy.model.driver import media as media_maps
from cosmos_rl.policy.model.driver.calls import PipelineCalls, stop, stop_with_velocity
from cosmos_rl.policy.model.driver.conditions import DrivenCond, MediaCond, count_rows, describe_nesting, locate
from cosmos_rl.policy.model.driver.contract import Level, Medium, Rollout, Size, Transition
from cosmos_rl.policy.model.driver.inputs import Inputs, ScalarLevel, scalar_levels, swap
from cosmos_rl.policy.model.driver.seams import Run

FINE_STEPS = 1000
"""Of the grid that training levels are read from where t does not follow from sigma."""

_KEPT_LEVELS = 256
"""Levels whose inputs of the denoiser are kept: the policies of a step are all asked at the same ones."""


class Group(NamedTuple):
    """Rows of a batch that one call of the pipeline gives the velocity of."""

    denoiser: str
    """Which one is called; empty where that is not known."""
    rows: Tensor
    """int64."""
    level: ScalarLevel
    """Of one of them."""
    table: dict[str, Tensor] | None
    """Inputs to swap where they have several levels."""
    kept: int
    """How many of them, from the first one, belong into the result."""


class Driver(PipelineCalls):
    """A stock pipeline whose steps can be asked for one by one.

    `probe.prove` must have filled ``facts`` before anything is trusted.

    Attributes:
        any_over_ranks: set when the denoisers are sharded over ranks: whether any rank has each flag set.
    """

    any_over_ranks: Callable[[Sequence[bool]], list[bool]] | None = None

    def __init__(self, pipeline: Any, **options: Any) -> None:
        """Get hold of a pipeline, see `PipelineCalls`; runs nothing."""
        super().__init__(pipeline, **options)
        self._axes: dict[str, list[Any]] = {}
        self._blank: DrivenCond | None = None
        self._maps: OrderedDict[Size, media_maps.DecodeMap] = OrderedDict()
        self._grids: OrderedDict[Size, list[Level]] = OrderedDict()
        self._own_levels: dict[str, ScalarLevel] = {}
        self._by_level: OrderedDict[Any, Inputs] = OrderedDict()
        self._masks: OrderedDict[tuple[int, Size], Tensor | None] = OrderedDict()

    # ---- conditions --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], negatives: Sequence[str] | None = None, guidance: float | None = None
    ) -> DrivenCond:
        """Conditions of N prompts, made as the pipeline makes them at that guidance (None: switched off).

        Conditions made with guidance also serve without it.
        """
        prompts, negatives = list(prompts), None if negatives is None else list(negatives)
        guidance = self.guidance_off if guidance is None else guidance
        values = self._run_encoder(prompts, negatives, guidance)
        form = repr([describe_nesting(value) for value in values])
        if form not in self._axes:
            again = self._run_encoder(2 * prompts, None if negatives is None else 2 * negatives, guidance)
            self._axes[form] = [locate(a, b, len(prompts)) for a, b in zip(values, again, strict=True)]
        axes = self._axes[form]
        if count_rows(values, axes) - {len(prompts)}:
            raise UserError(f"encode_prompt gives {count_rows(values, axes)} rows for {len(prompts)} prompts")
        cond = DrivenCond(values, axes, len(prompts), guidance != self.guidance_off)
        if self.row.text_sees_media:
            cond = replace(cond, texts=tuple(zip(prompts, negatives or [None] * len(prompts), strict=True)))
        if self._blank is None:
            self._blank = _copy_cond(cond.rows(torch.tensor([0])).to("cpu"))
        return cond

    def _run_encoder(self, prompts: list[str], negatives: list[str] | None, guidance: float | None) -> list[Any]:
        run = Run(self.device, on_denoiser=stop)
        self.go(run, len(prompts), guidance, self.size, prompts=prompts, negatives=negatives)
        return run.recorded

    @torch.no_grad()
    def condition(
        self,
        cond: DrivenCond,
        media: Sequence[Medium | None],
        size: Size | None = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> DrivenCond:
        """The same rows, each conditioned on its medium too.

        Each row's media are encoded alone, as the stock call would: which others are in the batch does not matter.

        Args:
            media: one per row; None: on its text only, where the pipeline allows that.
            generators: where the pipeline draws a sample of what its VAE encodes; default: the same one for each row.
        """
        return conditioning.condition(self, cond, media, size or self.size, generators)

    def join_media(self, cond: DrivenCond, media: Sequence[MediaCond], size: Size | None = None) -> DrivenCond:
        """The same rows, each with what `condition` made of its medium earlier."""
        return conditioning.join_media(self, cond, media, size or self.size)

    def element_mask(self, kind: int, size: Size | None = None) -> Tensor | None:
        """Which elements ``[1, ...]`` of a state are generated where ``kind`` latent frames are given; None: all."""
        size = size or self.size
        key = kind, size
        if key not in self._masks:
            self._keep(self._masks, key, conditioning.measure_mask(self, kind, size))
        return self._masks[key]

    def blank_cond(self, n: int) -> DrivenCond:
        """Conditions for what does not depend on them."""
        if self._blank is None:
            self.encode([""])
        assert self._blank is not None
        return self._blank.to(self.device).rows(torch.zeros(n, dtype=torch.int64))

    # ---- levels ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def levels(self, steps: int, size: Size | None = None) -> list[Level]:
        """The pipeline's own ``steps + 1`` levels, the last one clean; a shift that depends on the size is in them."""
        size = size or self.size

        def read(run: Run, *_: Any) -> Any:
            run.stop(self._read_levels(run.scheduler))

        levels = self.go(
            Run(self.device, text=self.blank_cond(1).values, on_denoiser=read), 1, self.guidance_off, size, steps=steps
        )
        if len(levels) != steps + 1:
            raise UserError(f"{steps} steps give {len(levels) - 1} levels: not one each")
        return levels

    def _read_levels(self, scheduler: Any) -> list[Level]:
        """The grid that a scheduler has been set to, on the CPU, where reading a level waits for nothing."""
        timesteps, sigmas = scheduler.timesteps.cpu().clone(), self.to_scheduler_sigma(scheduler.sigmas.cpu().float())
        levels = [Level(t, sigma) for t, sigma in zip(timesteps, sigmas, strict=False)]
        return [*levels, Level(torch.zeros_like(timesteps[-1]), sigmas[-1].clone())]

    def training_level(self, sigma: Tensor, size: Size | None = None) -> Level:
        """The level at any sigma on the CPU, rounded where the scheduler rounds."""
        if self.facts.time_rule == "grid":
            return Level(self._interpolate_time(sigma, size or self.size), sigma.float())
        t = self.to_scheduler_sigma(sigma.double()) * self.scheduler.config.num_train_timesteps
        return Level(t.long() if self.facts.integer_time else t.float(), sigma.float())

    def _interpolate_time(self, sigma: Tensor, size: Size) -> Tensor:
        """t between those of a fine grid, for pipelines that shift sigma and not t."""
        grid = self._grids.get(size) or self._keep(self._grids, size, self.levels(FINE_STEPS, size))
        known = [np.array([float(part) for part in parts])[::-1] for parts in zip(*grid, strict=True)]
        return torch.as_tensor(np.interp(sigma.double().numpy(), known[1], known[0]), dtype=torch.float32)

    # ---- velocity ----------------------------------------------------------------------------------------------

    def velocity(
        self, state: Tensor, level: Level, cond: DrivenCond, guidance: float | None = None, size: Size | None = None
    ) -> Tensor:
        """``dx/dsigma``: what the pipeline hands to its scheduler's step.

        Args:
            state: ``[B, ...]``.
            level: one for all rows, or ``[B]``. On the CPU: elsewhere reading it waits for the device.
            cond: conditions of the B rows.
            guidance: None: off.
            size: of the media; default: the driver's.
        """
        guidance = self.guidance_off if guidance is None else guidance
        size, state = size or self.size, self.to_loop_dtype(state)
        levels = scalar_levels(level, len(state))
        if len(set(levels)) == 1 and self.any_over_ranks is None:
            return self._velocity(state, levels[0], cond, guidance, size)
        groups = self._groups(state, levels, cond, guidance, size)
        if self.any_over_ranks is not None:
            groups = self._agree(groups, self.any_over_ranks)
        out = None
        for group in groups:
            part = self._velocity(state[group.rows], group.level, cond.rows(group.rows), guidance, size, group.table)
            if len(groups) == 1:
                return part
            out = torch.zeros(state.shape, dtype=part.dtype, device=part.device) if out is None else out
            kept = group.rows[: group.kept].to(part.device)
            out = out.index_copy(0, kept, part[: group.kept])  # a part of no rows, too, must be in the graph
        assert out is not None
        return out

    def _agree(self, groups: list[Group], any_over_ranks: Callable[[Sequence[bool]], list[bool]]) -> list[Group]:
        """Has every rank call the same denoisers in the same order; sharded ones would mix up their weights otherwise.

        A rank without rows for a denoiser that another rank calls gives it one whose result is not kept.
        """
        own = {group.denoiser: group for group in groups}
        if len(own) < len(groups):
            raise RuntimeError("a denoiser that is sharded over ranks can only be called once for all rows")
        names = sorted(self.denoisers)
        needed = any_over_ranks([name in own for name in names])
        return [
            own.get(name) or Group(name, torch.tensor([0]), self._levels_of_denoisers()[name], None, kept=0)
            for name, is_needed in zip(names, needed, strict=True)
            if is_needed
        ]

    def denoisers_at(self, levels: Level) -> list[str]:
        """Which one the pipeline calls first at each of the levels ``[K]``."""
        state, cond = self.pack(torch.zeros(1, *self.noise_shape(self.size)), self.size), self.blank_cond(1)
        scalars = scalar_levels(levels, len(levels.sigma))
        return [self.first_inputs(state, one, cond, self.guidance_off, self.size).denoiser for one in scalars]

    def _levels_of_denoisers(self) -> dict[str, ScalarLevel]:
        """A level at which each of them is called."""
        if not self._own_levels:
            ends = self.training_level(torch.tensor([0.999, 0.001]))
            for level, name in zip(scalar_levels(ends, 2), self.denoisers_at(ends), strict=True):
                self._own_levels.setdefault(name, level)
        missing = self.denoisers.keys() - self._own_levels.keys()
        if missing:
            raise UserError(f"{self.facts.pipeline}: {', '.join(sorted(missing))} is called at neither end of the path")
        return self._own_levels

    def _velocity(
        self,
        state: Tensor,
        level: ScalarLevel,
        cond: DrivenCond,
        guidance: float | None,
        size: Size,
        table: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Rows of one level, or of several whose inputs are in the table."""
        run = self.run_at(state, level, cond, guidance, size, on_step=stop_with_velocity)
        table = {**conditioning.rows_of_inputs(cond, self._mode(guidance)), **(table or {})}
        run.on_denoiser = swap(table) if table else None
        return self.convert_sign(self.step(run, len(state), guidance, size))

    def _groups(
        self, state: Tensor, levels: list[ScalarLevel], cond: DrivenCond, guidance: float | None, size: Size
    ) -> list[Group]:
        """The calls that rows of several levels need."""
        members: dict[Any, list[int]] = {}
        kinds = (0,) * len(levels) if cond.media is None else cond.media.kinds
        inputs: dict[tuple[ScalarLevel, int], Inputs] = {}
        keys = self.facts.time_inputs.get(self._mode(guidance), [])
        for row, level in enumerate(levels):
            key = level, kinds[row]
            if (keys or self.any_over_ranks is not None) and key not in inputs:
                at = torch.tensor([row])
                inputs[key] = self._level_inputs(state[at].detach(), level, cond.rows(at), guidance, size, keys)
            members.setdefault(inputs[key].denoiser if keys else level, []).append(row)
        groups = []
        for rows in members.values():
            table = None
            if keys:
                # a pipeline that computes both sides of guidance in one call has all rows of one side before the other
                each = [inputs[levels[row], kinds[row]].leaves for row in rows]
                table = {key: torch.stack([leaves[key] for leaves in each], 1).flatten(0, 1) for key in keys}
            level = levels[rows[0]]
            first = inputs.get((level, kinds[rows[0]]))
            name = first.denoiser if first is not None else ""
            groups.append(Group(name, torch.tensor(rows), level, table, kept=len(rows)))
        return groups

    def _mode(self, guidance: float | None) -> str:
        return "off" if guidance == self.guidance_off else "on"

    def _level_inputs(
        self,
        state: Tensor,
        level: ScalarLevel,
        cond: DrivenCond,
        guidance: float | None,
        size: Size,
        keys: Sequence[str],
    ) -> Inputs:
        """Which denoiser a level needs, and its inputs ``keys``, which follow it and the kind: found out once."""
        key = level, guidance, size, state.dtype, cond.media and cond.media.kinds
        found = self._by_level.get(key)
        if found is None:
            inputs = self.first_inputs(state, level, cond, guidance, size)
            kept = {name: inputs.leaves[name].clone() for name in keys}  # clones keep no bigger tensor alive
            found = self._keep(self._by_level, key, Inputs(inputs.denoiser, kept), _KEPT_LEVELS)
        return found

    # ---- sampling ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(
        self,
        cond: DrivenCond,
        generators: Sequence[torch.Generator],
        steps: int,
        guidance: float | None = None,
        transition: Transition | None = None,
        size: Size | None = None,
        *,
        decode: bool = True,
        keep_velocities: bool = False,
        start: Tensor | None = None,
    ) -> Rollout:
        """The pipeline's own loop with our transition inside.

        Args:
            generators: N, for the start noise.
            transition: None: the scheduler's own.
            decode: whether to make media of the last states.
            start: the state ``[N, ...]`` to start from, in place of noise.
        """
        guidance = self.guidance_off if guidance is None else guidance
        states: list[Tensor] = []
        levels: list[Level] = []
        velocities: list[Tensor] = []

        def on_step(run: Run, index: int, v: Tensor, _t: Tensor, x: Tensor, stock: Any) -> Any:
            if index == 0:
                levels.extend(self._read_levels(run.scheduler))
            v = self.convert_sign(v)
            states.append(self.to_loop_dtype(x).clone())  # some pipelines write into theirs
            if keep_velocities:
                velocities.append(v.clone())
            if transition is None:
                moved = stock()
                last = moved[0] if isinstance(moved, tuple) else moved.prev_sample
            else:
                last = transition(index, v, levels[index], levels[index + 1].sigma, states[-1])
                moved = last = self.to_loop_dtype(last).to(x.dtype)
            if index == steps - 1:
                states.append(self.to_loop_dtype(last).clone())
            return moved

        self._check_guided(cond, guidance)
        run = Run(self.device, text=cond.values, on_step=on_step)
        output: dict[str, Any] = {"output_type": "pt" if decode else "latent"}
        if start is None:
            output["generator"] = list(generators)
        else:
            self._put_in(run, start, guidance, size or self.size, cond.media)
            table = conditioning.rows_of_inputs(cond, self._mode(guidance))
            run.on_denoiser = swap(table) if table else None
        media_or_latents = self.go(run, cond.size, guidance, size or self.size, steps=steps, **output)
        return Rollout(media_or_latents[0] if decode else None, states, levels, velocities if keep_velocities else None)

    # ---- media -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_media(self, media: Tensor, size: Size | None = None) -> Tensor:
        """Media ``[N, (T,) 3, H, W]`` in [-1, 1] -> clean states (the posterior's mean)."""
        size = size or self.size
        return media_maps.pack_state(self, media_maps.encode_latents(self, media), self.decode_map(size), size)

    @torch.no_grad()
    def decode(self, state: Tensor, size: Size | None = None, cond: DrivenCond | None = None) -> Tensor:
        """Clean states -> media ``[N, (T,) 3, H, W]`` in [0, 1], by the end of the stock call.

        ``cond``: their conditions, whose media some pipelines show in the frames that they gave.
        """
        return self._tail(state, size or self.size, Run(self.device), cond and cond.media)[0]

    @torch.no_grad()
    def before_decoder(self, state: Tensor, size: Size) -> Tensor:
        """Clean states -> what the VAE's decoder gets."""
        return self._tail(state, size, Run(self.device, on_decode=lambda run, z: run.stop(z)))

    @torch.no_grad()
    def pack(self, noise: Tensor, size: Size) -> Tensor:
        """``[N, ...]`` in the layout of the noise -> states, by the pipeline's own `prepare_latents`."""
        given = [noise]

        def draw(shape: tuple[int, ...]) -> Tensor:
            if given and shape == tuple(noise.shape):
                return given.pop()
            return torch.zeros(shape)

        run = Run(self.device, text=self.blank_cond(len(noise)).values, noise=draw, on_denoiser=stop)
        self.go(run, len(noise), self.guidance_off, size)
        made = run.prepared[self.facts.leaf]
        positions, shape = self.positions(size), self.state_shape(size)
        if positions is not None and shape is not None:
            made = made.flatten(1)[:, positions.index].reshape(len(noise), *shape)
        return made / self.facts.scale

    @torch.no_grad()
    def noise_shape(self, size: Size) -> tuple[int, ...]:
        """Shape of the noise of one row."""
        seen: list[tuple[int, ...]] = []

        def draw(shape: tuple[int, ...]) -> Tensor:
            seen.append(shape)
            return torch.zeros(shape)

        self.go(
            Run(self.device, text=self.blank_cond(1).values, noise=draw, on_denoiser=stop), 1, self.guidance_off, size
        )
        if not seen:
            raise UserError("prepare_latents does not draw its noise by randn_tensor")
        return seen[0][1:]

    def decode_map(self, size: Size) -> media_maps.DecodeMap:
        """The map between noise layout and decoder for one size, measured once."""
        found = self._maps.get(size)
        return found or self._keep(self._maps, size, media_maps.measure_map(self, size))

    def _tail(self, state: Tensor, size: Size, run: Run, media: MediaCond | None = None) -> Any:
        n = len(state)
        state = self.to_loop_dtype(state)
        run.text = self.blank_cond(n).values
        self._put_in(run, state, self.guidance_off, size, media)
        if self.facts.tail == "no step":
            run.grid = torch.empty(0), torch.zeros(1)
        else:
            run.grid = torch.tensor([500.0]), torch.tensor([0.5, 0.0])
            run.on_step = lambda *_: state
        return self.go(run, n, self.guidance_off, size, output_type="pt")


def _copy_cond(cond: DrivenCond) -> DrivenCond:
    """Conditions that keep no bigger tensor alive."""
    return replace(cond, values=tree.tree_map_only(Tensor, torch.clone, cond.values))
