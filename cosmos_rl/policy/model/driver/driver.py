"""The model contract, fulfilled by running a stock diffusers pipeline."""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.driver import media as media_maps
from cosmos_rl.policy.model.driver.conditions import DrivenCond, count_rows, describe_nesting, locate
from cosmos_rl.policy.model.driver.contract import FlowModel, Level, Rollout, Size, Transition
from cosmos_rl.policy.model.driver.facts import Facts
from cosmos_rl.policy.model.driver.first_look import find_denoisers, require_seams, smallest_size
from cosmos_rl.policy.model.driver.inputs import Inputs, ScalarLevel, collect_leaves, scalar_levels, swap
from cosmos_rl.policy.model.driver.rows import Row, find_row
from cosmos_rl.policy.model.driver.seams import OnStep, Run, call_pipeline, view_class

FEW_STEPS = 4
"""Of calls that end before or after a single step; the grid they make is replaced."""
FINE_STEPS = 1000
"""Of the grid that training levels are read from where t does not follow from sigma."""
_KEPT = 8
"""Sizes whose measured maps and prepared inputs are kept."""


class Driver:
    """A stock pipeline as a `FlowModel`; `probe.prove` must have filled ``facts`` before anything is trusted.

    The pipeline itself is never changed, and no draw comes from the global random state. Calls may come from several
    threads.

    Attributes:
        pipeline: the diffusers pipeline.
        facts: how it is driven.
        denoisers: the trained parts by name.
        size: of the media where a call names none.
        device: where the pipeline computes.
    """

    def __init__(
        self,
        pipeline: Any,
        *,
        call: Mapping[str, Any] | None = None,
        size: Size | None = None,
        device: torch.device | str | None = None,
        row: Row | None = None,
    ) -> None:
        """Get hold of a pipeline; runs nothing.

        Args:
            call: more arguments of every call, for example ``{"max_sequence_length": 128}``.
            size: default of the media's size; the smallest sensible one where it is None.
            device: where it computes; default: where its denoiser is.
            row: data of the family; default: the one in the table.

        Raises:
            UserError: a seam is missing.
        """
        self.pipeline = pipeline
        self.row = row or find_row(type(pipeline).__name__)
        self.facts = Facts(pipeline=type(pipeline).__name__)
        require_seams(pipeline)
        self._accepted = inspect.signature(type(pipeline).__call__).parameters
        self.call = {name: value for name, value in {**self.row.call, **(call or {})}.items() if name in self._accepted}
        self.guidance_name = self._find_accepted(self.row.guidance, "true_cfg_scale", "guidance_scale")
        self.frames_name = self._find_accepted(self.row.frames, "num_frames", "frames")
        self.denoisers: dict[str, nn.Module] = find_denoisers(pipeline)
        self.device = torch.device(device or next(next(iter(self.denoisers.values())).parameters()).device)
        self.size = size or smallest_size(pipeline, video=self.frames_name is not None)
        self.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
        self._view = view_class(type(pipeline))
        self._axes: dict[str, list[Any]] = {}
        self._blank: DrivenCond | None = None
        self._prepared: OrderedDict[Any, tuple[list[Any], tree.TreeSpec]] = OrderedDict()
        self._maps: OrderedDict[Size, media_maps.DecodeMap] = OrderedDict()
        self._grids: OrderedDict[Size, list[Level]] = OrderedDict()
        self._lock = threading.Lock()

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Literal["flow", "edm"]:
        return self.facts.path

    @property
    def guidance_off(self) -> float | None:
        return self.facts.guidance_off

    @property
    def state_dtype(self) -> torch.dtype:
        return getattr(torch, self.facts.state_dtype)

    def _to_loop_dtype(self, state: Tensor) -> Tensor:
        """A state of a dtype that the loop has, too: before its first step that may be another one than later."""
        if state.dtype == getattr(torch, self.facts.first_dtype):
            return state
        return state.to(self.state_dtype)

    def _find_accepted(self, *names: str | None) -> str | None:
        return next((name for name in names if name in self._accepted), None)

    # ---- conditions --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], negatives: Sequence[str] | None = None, guidance: float | None = None
    ) -> DrivenCond:
        """Conditions of N prompts, see `FlowModel`. Conditions made with guidance also serve without it."""
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
        if self._blank is None:
            self._blank = _copy_cond(cond.rows(torch.tensor([0])).to("cpu"))
        return cond

    def _run_encoder(self, prompts: list[str], negatives: list[str] | None, guidance: float | None) -> list[Any]:
        run = Run(self.device, on_denoiser=_stop)
        self.go(run, len(prompts), guidance, self.size, prompts=prompts, negatives=negatives)
        return run.recorded

    def _blank_cond(self, n: int) -> DrivenCond:
        """Conditions for what does not depend on them."""
        if self._blank is None:
            self.encode([""])
        assert self._blank is not None
        return self._blank.to(self.device).rows(torch.zeros(n, dtype=torch.int64))

    # ---- levels ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def levels(self, steps: int, size: Size | None = None) -> list[Level]:
        """The stock grid, see `FlowModel`; the shift that depends on the size is in it."""
        size = size or self.size

        def read(run: Run, *_: Any) -> Any:
            run.stop(self._read_levels(run.scheduler))

        levels = self.go(
            Run(self.device, text=self._blank_cond(1).values, on_denoiser=read), 1, self.guidance_off, size, steps=steps
        )
        if len(levels) != steps + 1:
            raise UserError(f"{steps} steps give {len(levels) - 1} levels: not one each")
        return levels

    def _read_levels(self, scheduler: Any) -> list[Level]:
        """The grid that a scheduler has been set to, on the CPU, where reading a level waits for nothing."""
        timesteps, sigmas = scheduler.timesteps.cpu().clone(), self._convert_sigma(scheduler.sigmas.cpu().float())
        levels = [Level(t, sigma) for t, sigma in zip(timesteps, sigmas, strict=False)]
        return [*levels, Level(torch.zeros_like(timesteps[-1]), sigmas[-1].clone())]

    def training_level(self, sigma: Tensor, size: Size | None = None) -> Level:
        """The level at any sigma on the CPU, rounded where the scheduler rounds."""
        if self.facts.time_rule == "grid":
            return Level(self._interpolate_time(sigma, size or self.size), sigma.float())
        t = self._convert_sigma(sigma.double()) * self.scheduler.config.num_train_timesteps
        return Level(t.long() if self.facts.integer_time else t.float(), sigma.float())

    def _interpolate_time(self, sigma: Tensor, size: Size) -> Tensor:
        """t between those of a fine grid, for pipelines that shift sigma and not t."""
        grid = self._grids.get(size) or self._keep(self._grids, size, self.levels(FINE_STEPS, size))
        known = [np.array([float(part) for part in parts])[::-1] for parts in zip(*grid, strict=True)]
        return torch.as_tensor(np.interp(sigma.double().numpy(), known[1], known[0]), dtype=torch.float32)

    def _convert_sigma(self, sigma: Any) -> Any:
        """Between the scheduler's sigma and ours, where the scheduler counts from noise = 0 to data = 1."""
        if self.facts.inverted:
            return 1 - sigma
        return sigma

    def convert_sign(self, model_output: Tensor) -> Tensor:
        """Between what the scheduler's step gets and d state / d sigma."""
        return -model_output if self.facts.inverted else model_output

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
        size, state = size or self.size, self._to_loop_dtype(state)
        levels = scalar_levels(level, len(state))
        if len(set(levels)) == 1:
            return self._velocity(state, levels[0], cond, guidance, size)
        out = None
        for index, shared, table in self._groups(state, levels, cond, guidance, size):
            part = self._velocity(state[index], shared, cond.rows(index), guidance, size, table)
            if len(index) == len(state):
                return part
            out = torch.zeros(state.shape, dtype=part.dtype, device=part.device) if out is None else out
            out = out.index_copy(0, index.to(part.device), part)
        assert out is not None
        return out

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
        run = self._run_at(state, level, cond, guidance, size, on_step=_stop_with_velocity)
        run.on_denoiser = None if table is None else swap(table)
        return self.convert_sign(self._step(run, len(state), guidance, size))

    def _groups(
        self, state: Tensor, levels: list[ScalarLevel], cond: DrivenCond, guidance: float | None, size: Size
    ) -> list[tuple[Tensor, ScalarLevel, dict[str, Tensor] | None]]:
        """(rows, a level of them, inputs to swap) of each call that rows of several levels need."""
        members: dict[Any, list[int]] = {}
        inputs: dict[ScalarLevel, Inputs] = {}
        keys = self.facts.time_inputs.get("off" if guidance == self.guidance_off else "on", [])
        for row, level in enumerate(levels):
            if keys and level not in inputs:
                at = torch.tensor([row])
                inputs[level] = self.first_inputs(state[at].detach(), level, cond.rows(at), guidance, size)
            members.setdefault(inputs[level].denoiser if keys else level, []).append(row)
        groups = []
        for rows in members.values():
            table = None
            if keys:
                # a pipeline that computes both sides of guidance in one call has all rows of one side before the other
                each = [inputs[levels[row]].leaves for row in rows]
                table = {key: torch.stack([leaves[key] for leaves in each], 1).flatten(0, 1) for key in keys}
            groups.append((torch.tensor(rows), levels[rows[0]], table))
        return groups

    @torch.no_grad()
    def first_inputs(
        self, state: Tensor, level: ScalarLevel, cond: DrivenCond, guidance: float | None, size: Size
    ) -> Inputs:
        """What the first call of a denoiser would get; it is not made."""
        run = self._run_at(state, level, cond, guidance, size)
        run.on_denoiser = lambda run, name, args, kwargs: run.stop(Inputs(name, collect_leaves((args, kwargs))))
        return self._step(run, len(state), guidance, size)

    @torch.no_grad()
    def all_inputs(
        self, state: Tensor, level: ScalarLevel, cond: DrivenCond, guidance: float | None, size: Size
    ) -> list[Inputs]:
        """What all calls of denoisers at one level get."""
        seen: list[Inputs] = []

        def note(_: Run, name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            seen.append(Inputs(name, collect_leaves((args, kwargs))))
            return args, kwargs

        run = self._run_at(state, level, cond, guidance, size, on_step=_stop_with_velocity)
        run.on_denoiser = note
        self._step(run, len(state), guidance, size)
        return seen

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
        """The stock loop, see `FlowModel`. It starts from the state ``start`` ``[N, ...]`` where there is one."""
        guidance = self.guidance_off if guidance is None else guidance
        states: list[Tensor] = []
        levels: list[Level] = []
        velocities: list[Tensor] = []

        def on_step(run: Run, index: int, v: Tensor, _t: Tensor, x: Tensor, stock: Any) -> Any:
            if index == 0:
                levels.extend(self._read_levels(run.scheduler))
            v = self.convert_sign(v)
            states.append(x.clone())  # some pipelines write into theirs
            if keep_velocities:
                velocities.append(v.clone())
            if transition is None:
                moved = stock()
                last = moved[0] if isinstance(moved, tuple) else moved.prev_sample
            else:
                moved = last = transition(index, v, levels[index], levels[index + 1].sigma, states[-1]).to(x.dtype)
            if index == steps - 1:
                states.append(last.clone())
            return moved

        self._check_guided(cond, guidance)
        run = Run(self.device, text=cond.values, on_step=on_step)
        output: dict[str, Any] = {"output_type": "pt" if decode else "latent"}
        if start is None:
            output["generator"] = list(generators)
        else:
            self._put_in(run, start, guidance, size or self.size)
        media_or_latents = self.go(run, cond.size, guidance, size or self.size, steps=steps, **output)
        return Rollout(media_or_latents[0] if decode else None, states, levels, velocities if keep_velocities else None)

    # ---- media -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_media(self, media: Tensor, size: Size | None = None) -> Tensor:
        """Media ``[N, (T,) 3, H, W]`` in [-1, 1] -> clean states (the posterior's mean)."""
        size = size or self.size
        return media_maps.pack_state(self, media_maps.encode_latents(self, media), self.decode_map(size), size)

    @torch.no_grad()
    def decode(self, state: Tensor, size: Size | None = None) -> Tensor:
        """Clean states -> media ``[N, (T,) 3, H, W]`` in [0, 1], by the end of the stock call."""
        return self._tail(state, size or self.size, Run(self.device))[0]

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

        run = Run(self.device, text=self._blank_cond(len(noise)).values, noise=draw, on_denoiser=_stop)
        self.go(run, len(noise), self.guidance_off, size)
        return run.prepared[self.facts.leaf] / self.facts.scale

    @torch.no_grad()
    def noise_shape(self, size: Size) -> tuple[int, ...]:
        """Shape of the noise of one row."""
        seen: list[tuple[int, ...]] = []

        def draw(shape: tuple[int, ...]) -> Tensor:
            seen.append(shape)
            return torch.zeros(shape)

        self.go(
            Run(self.device, text=self._blank_cond(1).values, noise=draw, on_denoiser=_stop), 1, self.guidance_off, size
        )
        if not seen:
            raise UserError("prepare_latents does not draw its noise by randn_tensor")
        return seen[0][1:]

    def decode_map(self, size: Size) -> media_maps.DecodeMap:
        """The map between noise layout and decoder for one size, measured once."""
        found = self._maps.get(size)
        return found or self._keep(self._maps, size, media_maps.measure_map(self, size))

    def _tail(self, state: Tensor, size: Size, run: Run) -> Any:
        n = len(state)
        state = self._to_loop_dtype(state)
        run.text = self._blank_cond(n).values
        self._put_in(run, state, self.guidance_off, size)
        if self.facts.tail == "no step":
            run.grid = torch.empty(0), torch.zeros(1)
        else:
            run.grid = torch.tensor([500.0]), torch.tensor([0.5, 0.0])
            run.on_step = lambda *_: state
        return self.go(run, n, self.guidance_off, size, output_type="pt")

    # ---- the one way in ----------------------------------------------------------------------------------------

    def _run_at(
        self,
        state: Tensor,
        level: ScalarLevel,
        cond: DrivenCond,
        guidance: float | None,
        size: Size,
        on_step: OnStep | None = None,
    ) -> Run:
        """A run of one step at one level that starts from the state."""
        if cond.size != len(state):
            raise ValueError(f"{len(state)} states and {cond.size} conditions")
        self._check_guided(cond, guidance)
        run = Run(self.device, text=cond.values, on_step=on_step)
        t = torch.tensor([level[0]], dtype=torch.int64 if self.facts.integer_time else torch.float32)
        run.grid = t, self._convert_sigma(torch.tensor([level[1], 0.0]))
        self._put_in(run, state, guidance, size)
        return run

    def _step(self, run: Run, n: int, guidance: float | None, size: Size) -> Any:
        """A run of `_run_at`: what the pipeline prepares is given, so its frames may not matter."""
        return self.go(run, n, guidance, size._replace(frames=1) if self.row.one_frame else size)

    def _check_guided(self, cond: DrivenCond, guidance: float | None) -> None:
        if guidance != self.guidance_off and not cond.guided:
            raise ValueError(
                f"guidance {guidance} and conditions made without guidance: encode(..., guidance={guidance})"
            )

    def _put_in(self, run: Run, state: Tensor, guidance: float | None, size: Size) -> None:
        """Have a run start from a state. What else `prepare_latents` makes depends on shapes only and is kept."""
        key = len(state), size, guidance
        prepared = self._prepared.get(key)
        if prepared is None:
            first = Run(self.device, text=run.text, on_denoiser=_stop)
            self.go(first, len(state), guidance, size)
            values = [None if index == self.facts.leaf else value for index, value in enumerate(first.prepared)]
            prepared = self._keep(self._prepared, key, (values, first.spec))
        run.prepare, run.state, run.leaf = prepared, state, self.facts.leaf

    def _keep(self, kept: OrderedDict, key: Any, value: Any) -> Any:
        with self._lock:
            kept[key] = value
            while len(kept) > _KEPT:
                kept.popitem(last=False)
        return value

    def go(
        self,
        run: Run,
        n: int,
        guidance: float | None,
        size: Size,
        *,
        prompts: list[str] | None = None,
        negatives: list[str] | None = None,
        steps: int = FEW_STEPS,
        **more: Any,
    ) -> Any:
        """One call of the stock pipeline. Noise that nobody sees comes from a generator of its own."""
        generator = torch.Generator().manual_seed(0)
        arguments = self.arguments(n, guidance, size, prompts, negatives, steps)
        arguments.update({"output_type": "latent", "generator": generator, **more})
        return call_pipeline(self.pipeline, self._view, list(self.denoisers), self.scheduler, run, arguments)

    def arguments(
        self,
        n: int,
        guidance: float | None,
        size: Size,
        prompts: list[str] | None = None,
        negatives: list[str] | None = None,
        steps: int = FEW_STEPS,
    ) -> dict[str, Any]:
        """Keyword arguments of the stock call for n rows, but for the generator and the kind of output."""
        # a list of its own: Z-Image writes into the one it gets
        made = {**self.call, "prompt": list(prompts or [""] * n), "num_inference_steps": steps, "return_dict": False}
        made.update(height=size.height, width=size.width)
        if self.frames_name is not None:
            made[self.frames_name] = size.frames
        if self.guidance_name is not None and guidance is not None:
            made[self.guidance_name] = guidance
        if negatives is None and (self.row.negative is not None or self.guidance_name == "true_cfg_scale"):
            negatives = [self.row.negative or ""] * n  # this argument works only with a negative prompt
        if negatives is not None and "negative_prompt" in self._accepted:
            made["negative_prompt"] = list(negatives)
        return made


def _copy_cond(cond: DrivenCond) -> DrivenCond:
    """Conditions that keep no bigger tensor alive."""
    return replace(cond, values=tree.tree_map_only(Tensor, torch.clone, cond.values))


def _stop(run: Run, *_: Any) -> Any:
    run.stop()


def _stop_with_velocity(run: Run, _index: int, v: Tensor, *_: Any) -> Any:
    run.stop(v)


if TYPE_CHECKING:

    def _fulfils_the_contract(driver: Driver) -> FlowModel[DrivenCond]:
        return driver
