"""Calls of a stock pipeline with parts of it replaced: what the driver and its checks are built of."""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cosmos_rl.policy.model.driver.conditions import DrivenCond, MediaCond
from cosmos_rl.policy.model.driver.contract import Medium, Size
from cosmos_rl.policy.model.driver.facts import Facts
from cosmos_rl.policy.model.driver.first_look import find_denoisers, require_seams, smallest_size, temporal_factor
from cosmos_rl.policy.model.driver.inputs import Inputs, ScalarLevel, collect_leaves
from cosmos_rl.policy.model.driver.positions import Positions, measure_positions
from cosmos_rl.policy.model.driver.rows import Row, find_row
from cosmos_rl.policy.model.driver.seams import OnStep, Run, call_pipeline, view_class
from cosmos_rl.policy.model.quiet import mute_unused_guidance

FEW_STEPS = 4
"""Of calls that end before or after a single step; the grid they make is replaced."""
_KEPT = 8
"""Sizes whose measured maps and prepared inputs are kept."""


class Prepared(NamedTuple):
    """What a pipeline prepares before its loop."""

    values: list[Any]
    """Flat results of `prepare_latents`."""
    spec: Any
    """How they are nested."""
    encoded_media: Mapping[str, Sequence[Any]]
    """Results of the methods that encode media."""


class PipelineCalls:
    """A stock pipeline, and one call of it.

    The pipeline itself is never changed, and no draw comes from the global random state. Calls may come from several
    threads.

    Attributes:
        pipeline: the diffusers pipeline.
        facts: how it is driven.
        denoisers: all of them by name.
        size: of the media where a call names none.
        device: where the pipeline computes.
        most_kept: entries of what is measured once for each size.
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
        mute_unused_guidance(pipeline)
        self._accepted = inspect.signature(type(pipeline).__call__).parameters
        self.call = {name: value for name, value in {**self.row.call, **(call or {})}.items() if name in self._accepted}
        self.guidance_name = self._find_accepted(*self.row.guidance_names)
        self.frames_name = self._find_accepted(self.row.frames, "num_frames", "frames")
        self.denoisers: dict[str, nn.Module] = find_denoisers(pipeline)
        self.device = torch.device(device or next(next(iter(self.denoisers.values())).parameters()).device)
        self.size = size or smallest_size(pipeline, video=self.frames_name is not None, given=self.row.clean_frames[1])
        self.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
        self.most_kept = _KEPT
        self._view = view_class(type(pipeline))
        self._prepared: OrderedDict[Any, Prepared] = OrderedDict()
        self._black_encodings: dict[Any, Any] = {}
        self._black_results: Mapping[str, Sequence[Any]] | None = None
        self._positions: OrderedDict[Size, Positions] = OrderedDict()
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

    def to_loop_dtype(self, state: Tensor) -> Tensor:
        """A state of a dtype that the loop has, too: before its first step that may be another one than later."""
        if state.dtype == getattr(torch, self.facts.first_dtype):
            return state
        return state.to(self.state_dtype)

    def count_given(self, kind: int) -> int:
        """Frames of a medium that makes ``kind`` latent ones."""
        return 1 + (kind - 1) * temporal_factor(self.pipeline)

    def _find_accepted(self, *names: str | None) -> str | None:
        return next((name for name in names if name in self._accepted), None)

    def to_scheduler_sigma(self, sigma: Any) -> Any:
        """Between the scheduler's sigma and ours, where the scheduler counts from noise = 0 to data = 1."""
        if self.facts.inverted:
            return 1 - sigma
        return sigma

    def convert_sign(self, model_output: Tensor) -> Tensor:
        """Between what the scheduler's step gets and d state / d sigma."""
        return -model_output if self.facts.inverted else model_output

    @torch.no_grad()
    def first_inputs(
        self, state: Tensor, level: ScalarLevel, cond: DrivenCond, guidance: float | None, size: Size
    ) -> Inputs:
        """What the first call of a denoiser would get; it is not made."""
        run = self.run_at(state, level, cond, guidance, size)
        run.on_denoiser = lambda run, name, args, kwargs: run.stop(Inputs(name, collect_leaves((args, kwargs))))
        return self.step(run, len(state), guidance, size)

    @torch.no_grad()
    def all_inputs(
        self, state: Tensor, level: ScalarLevel, cond: DrivenCond, guidance: float | None, size: Size
    ) -> list[Inputs]:
        """What all calls of denoisers at one level get."""
        seen: list[Inputs] = []

        def note(_: Run, name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            seen.append(Inputs(name, collect_leaves((args, kwargs))))
            return args, kwargs

        run = self.run_at(state, level, cond, guidance, size, on_step=stop_with_velocity)
        run.on_denoiser = note
        self.step(run, len(state), guidance, size)
        return seen

    # ---- the one way in ----------------------------------------------------------------------------------------

    def run_at(
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
        run.grid = t, self.to_scheduler_sigma(torch.tensor([level[1], 0.0]))
        self._put_in(run, state, guidance, size, cond.media)
        return run

    def step(self, run: Run, n: int, guidance: float | None, size: Size) -> Any:
        """A run of `run_at`: what the pipeline prepares is given, so its frames may not matter."""
        return self.go(run, n, guidance, size._replace(frames=1) if self.row.one_frame else size)

    def _check_guided(self, cond: DrivenCond, guidance: float | None) -> None:
        if guidance != self.guidance_off and not cond.guided:
            raise ValueError(
                f"guidance {guidance} and conditions made without guidance: encode(..., guidance={guidance})"
            )

    def _put_in(
        self, run: Run, state: Tensor, guidance: float | None, size: Size, media: MediaCond | None = None
    ) -> None:
        """Have a run start from a state, with what its media were made into.

        Without media, what else `prepare_latents` makes depends on shapes only and is kept.
        """
        key = len(state), size, guidance
        prepared = self._prepared.get(key)
        if prepared is None:
            first = Run(self.device, text=run.text, on_denoiser=stop)
            self.go(first, len(state), guidance, size)
            values = list(first.prepared)
            if not self.facts.partial:
                values[self.facts.leaf] = None
            blank = Prepared(values, first.spec, first.media_results)
            prepared = self._keep(self._prepared, key, blank)
        run.prepare = prepared.values, prepared.spec
        if self.row.media is not None:
            run.encoded_media = prepared.encoded_media
        if media is not None:
            run.encoded_media = media.encoded
            run.prepare = list(media.prepared), prepared.spec
        run.state, run.leaf, run.positions = state, self.facts.leaf, self.positions(size)

    def positions(self, size: Size) -> Positions | None:
        """Where the state's elements are in the tensor that `prepare_latents` gives.

        None: the state is the whole of it.
        """
        if not self.facts.partial:
            return None
        found = self._positions.get(size)
        if found is None:
            found = self._keep(self._positions, size, measure_positions(self, size))
        return found

    def state_shape(self, size: Size) -> tuple[int, ...] | None:
        """Shape of one row's state where it is a part of what `prepare_latents` gives."""
        self.positions(size)
        found = self._positions.get(size)
        return found and found.shape

    def _keep(self, kept: OrderedDict, key: Any, value: Any, most: int | None = None) -> Any:
        with self._lock:
            kept[key] = value
            while len(kept) > (most or self.most_kept):
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
        medium: Medium | None = None,
        **more: Any,
    ) -> Any:
        """One call of the stock pipeline. Noise that nobody sees comes from a generator of its own.

        Where a medium is needed and none is given, all calls have the same black one, which is encoded once.
        """
        blank = self.row.needs_media and medium is None
        if blank:
            run.kept_encodings = self._black_encodings
            run.encoded_media = run.encoded_media or self._black_results
        generator = torch.Generator().manual_seed(0)
        arguments = self.arguments(n, guidance, size, prompts, negatives, steps, medium)
        arguments.update({"output_type": "latent", "generator": generator, **more})
        found = call_pipeline(self.pipeline, self._view, list(self.denoisers), self.scheduler, run, arguments)
        if blank:
            self._black_results = self._black_results or run.recorded_media or None
        return found

    def arguments(
        self,
        n: int,
        guidance: float | None,
        size: Size,
        prompts: list[str] | None = None,
        negatives: list[str] | None = None,
        steps: int = FEW_STEPS,
        medium: Medium | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments of the stock call for n rows, but for the generator and the kind of output.

        ``medium``: of a single row. A pipeline that always needs one gets a black image where there is none.
        """
        # a list of its own: Z-Image writes into the one it gets
        made = {**self.call, "prompt": list(prompts or [""] * n), "num_inference_steps": steps, "return_dict": False}
        made.update(height=size.height, width=size.width, **self.row.call_at(size.height, size.width))
        if medium is not None:
            assert self.row.media is not None
            made.update(self.row.media(medium))
        elif self.row.needs_media:  # as a tensor of the final size, in memory like an image, it costs no resizing
            count = n if self.row.blank_each else 1
            made["image"] = torch.zeros(count, size.height, size.width, 3).movedim(-1, 1)
        if self.frames_name is not None:
            made[self.frames_name] = size.frames
        if self.guidance_name is not None and guidance is not None:
            made[self.guidance_name] = guidance
        if negatives is None and (self.row.negative is not None or self.guidance_name == "true_cfg_scale"):
            negatives = [self.row.negative or ""] * n  # this argument works only with a negative prompt
        if negatives is not None and "negative_prompt" in self._accepted:
            made["negative_prompt"] = list(negatives)
        return made


def stop(run: Run, *_: Any) -> Any:
    run.stop()


def stop_with_velocity(run: Run, _index: int, v: Tensor, *_: Any) -> Any:
    run.stop(v)
