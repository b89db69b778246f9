"""One call of a stock pipeline with parts of it in our hands.

Nothing of the user's pipeline is changed. Each call gets a *view*: a second object over the same components, whose
class is a subclass of the pipeline's with `encode_prompt` and `prepare_latents` overridden, and which has a scheduler
of its own and proxies in front of the denoisers and the decoder. So calls may run in several threads at once, an
exception leaves nothing to undo, and no hook is on a module that FSDP2 or torch.compile has prepared.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

OnStep = Callable[["Run", int, Tensor, Tensor, Tensor, Callable[[], Any]], Any]
"""(run, index, model output, t, state, the stock step) -> the next state, or what the stock step returned.

All three get the run, so that a callback need not refer to what refers to it: a cycle would keep tensors alive.
"""

OnDenoiser = Callable[["Run", str, tuple, dict], tuple[tuple, dict]]
"""(run, name of the denoiser, positional arguments, keyword arguments) -> the two to call it with."""

OnOutput = Callable[["Run", Callable[[], Any]], Any]
"""(run, the call of the denoiser) -> its output, or another one in its place."""

OnDecode = Callable[["Run", Tensor], Any]
"""(run, latents as the decoder gets them) -> what the decoder would return."""

_NOT_CONDITIONS = {"encode_prompt", "prepare_latents", "prepare_extra_step_kwargs"}
"""Methods of a pipeline whose name looks like those that turn media into conditions."""


class Positions(NamedTuple):
    """Where the elements of one row's state are in one row of the tensor."""

    index: Tensor
    """int64, flat, in the order of the state."""
    shape: tuple[int, ...]
    """Of one row's state."""
    layout: Sequence[int]
    """Axes of the tensor as they follow one another in memory: in half precision kernels round by it."""


class Stop(Exception):
    """Ends a call of the pipeline early with what was found. Never leaves this package."""

    def __init__(self, run: "Run", found: Any) -> None:
        super().__init__()
        self.run = run
        self.found = found


@dataclass
class Run:
    """What one call of the stock pipeline gets in place of its own parts; None leaves the part as it is.

    Attributes:
        device: where the pipeline computes.
        text: results of `encode_prompt`, one per call of it, to give instead of encoding.
        recorded: filled with the results of the real `encode_prompt`.
        prepared: filled with the flat results of `prepare_latents`.
        prepare: flat results to give instead of calling `prepare_latents`, and how to build its result of them.
        state: replaces the tensor at index `leaf` of the flat results of `prepare_latents`, or the elements of it that
            `positions` names.
        positions: where the state is in that tensor; None: it is the whole of it.
        encoded_media: results of the methods that encode media, by name and in the order of the calls, to give instead
            of encoding.
        recorded_media: filled with the results of the real ones.
        kept_encodings: what the VAE makes of media, by their form, where all runs that share it have the same ones.
        noise: function of a shape, instead of random numbers while `prepare_latents` runs.
        grid: (timesteps, sigmas) in place of the scheduler's own.
        on_step, on_denoiser, on_output, on_decode: see the types above.
        scheduler: the one that this call uses, while it lasts.
    """

    device: torch.device
    text: Sequence[Any] | None = None
    recorded: list[Any] = field(default_factory=list)
    prepared: list[Any] = field(default_factory=list)
    prepare: tuple[list[Any], tree.TreeSpec] | None = None
    spec: tree.TreeSpec | None = None
    state: Tensor | None = None
    leaf: int = 0
    positions: Positions | None = None
    encoded_media: Mapping[str, Sequence[Any]] | None = None
    recorded_media: dict[str, list[Any]] = field(default_factory=dict)
    kept_encodings: dict[Any, Any] | None = None
    noise: Callable[[tuple[int, ...]], Tensor] | None = None
    grid: tuple[Tensor, Tensor] | None = None
    on_step: OnStep | None = None
    on_denoiser: OnDenoiser | None = None
    on_output: OnOutput | None = None
    on_decode: OnDecode | None = None
    scheduler: Any = None
    encoded: int = 0
    steps: int = 0
    _inside: bool = field(default=False, init=False)
    """In one of the methods that encode media or prepare latents; what they call in turn is a part of it."""
    _media_calls: dict[str, int] = field(default_factory=dict, init=False)

    def stop(self, found: Any = None) -> NoReturn:
        """End this call with ``found``."""
        raise Stop(self, found)

    def encode_prompt(self, real: Callable[[], Any]) -> Any:
        """The recorded results in their order, else the real ones, which are recorded."""
        if self.text is None:
            self.recorded.append(self._call_inside(real))
            return self.recorded[-1]
        if self.encoded == len(self.text):
            raise ValueError(
                "the pipeline encodes more prompts than when these conditions were made: encode with the same guidance"
            )
        self.encoded += 1
        return self.text[self.encoded - 1]

    def prepare_latents(self, real: Callable[[], Any]) -> Any:
        """The real or the given results with the state put in."""
        if self.prepare is not None:
            values, self.spec = [_copy_nested(value) for value in self.prepare[0]], self.prepare[1]
        else:
            values, self.spec = tree.tree_flatten(self._call_inside(real))
            self.prepared[:] = values
        if self.state is not None:
            values[self.leaf] = put_state(self.state, values[self.leaf], self.positions)
        return tree.tree_unflatten(values, self.spec)

    def encode_media(self, name: str, real: Callable[[], Any]) -> Any:
        """The given results of one of the other methods that make conditions, else the real ones, which are noted."""
        if self._inside:
            return real()
        if self.encoded_media is None:
            found = self._call_inside(real)
            self.recorded_media.setdefault(name, []).append(found)
            return found
        number = self._media_calls[name] = self._media_calls.get(name, -1) + 1
        return self.encoded_media[name][number]

    @property
    def media_results(self) -> Mapping[str, Sequence[Any]]:
        """What the methods that encode media gave in this run, really or not."""
        return self.recorded_media or self.encoded_media or {}

    def _call_inside(self, real: Callable[[], Any]) -> Any:
        self._inside = True
        try:
            return real()
        finally:
            self._inside = False


def put_state(state: Tensor, leaf: Any, positions: Positions | None) -> Tensor:
    """States ``[n, ...]`` in the layout of `prepare_latents`: the elements that are not the state's are the leaf's."""
    if positions is None:
        return state
    rows = leaf.expand(len(state), *leaf.shape[1:])
    index, values = positions.index.to(state.device), state.flatten(1).to(leaf.dtype)
    filled = rows.flatten(1).index_copy(1, index, values).view(rows.shape)
    order = positions.layout
    return filled.permute(*order).contiguous().permute([order.index(axis) for axis in range(leaf.ndim)])


def _copy_nested(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return value


class _Front:
    """Stands in front of a module: everything but what a subclass defines is the module's own, its type included."""

    def __init__(self, module: Any) -> None:
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    @property
    def __class__(self) -> type:  # isinstance, by which some pipelines choose their maths
        return type(self.__dict__["_module"])


class _DenoiserFront(_Front):
    def __init__(self, module: nn.Module, name: str, run: Run) -> None:
        super().__init__(module)
        self.__dict__.update(_name=name, _run=run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run.on_denoiser is not None:
            args, kwargs = self._run.on_denoiser(self._run, self._name, args, kwargs)
        if self._run.on_output is not None:
            return self._run.on_output(self._run, lambda: self._module(*args, **kwargs))
        return self._module(*args, **kwargs)


class _VaeFront(_Front):
    def __init__(self, vae: Any, run: Run) -> None:
        super().__init__(vae)
        self.__dict__["_run"] = run

    def encode(self, media: Tensor, *args: Any, **kwargs: Any) -> Any:
        kept = self._run.kept_encodings
        media = media.to(self._module.dtype)  # LTX makes them of the dtype of the text features
        if kept is None:
            return self._module.encode(media, *args, **kwargs)
        key = tuple(media.shape), media.dtype
        if key not in kept:
            kept[key] = self._module.encode(media, *args, **kwargs)
        return kept[key]

    def decode(self, z: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._run.on_decode is not None:
            return self._run.on_decode(self._run, z)
        # states in half precision; not every pipeline converts them for a VAE in float32
        return self._module.decode(z.to(self._module.dtype), *args, **kwargs)


def view_class(pipeline_class: type) -> type:
    """The subclass that views are made of. Its name and module are the pipeline's, since diffusers looks at both."""
    plain = inspect.unwrap(pipeline_class.prepare_latents)  # pyright: ignore[reportAttributeAccessIssue]

    def encode_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run.encode_prompt(lambda: pipeline_class.encode_prompt(self, *args, **kwargs))  # pyright: ignore

    def prepare_latents(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = plain
        if self._run.noise is not None:
            function = _replace_noise(plain, self._run.noise)
        return self._run.prepare_latents(lambda: function(self, *args, **kwargs))

    names = [name for name in dir(pipeline_class) if name.startswith(("encode_", "prepare_"))]
    return type(
        pipeline_class.__name__,
        (pipeline_class,),
        {
            **{name: _media_seam(pipeline_class, name) for name in set(names) - _NOT_CONDITIONS},
            "__module__": pipeline_class.__module__,
            "encode_prompt": functools.wraps(pipeline_class.encode_prompt)(encode_prompt),  # pyright: ignore
            "prepare_latents": functools.wraps(plain)(prepare_latents),
            # the stock property walks through all modules on each call
            "_execution_device": property(lambda self: self._run.device),
            # offloading puts hooks on modules, not on what stands in front of them here
            "maybe_free_model_hooks": lambda self: self._whole.maybe_free_model_hooks(),
        },
    )


def _media_seam(pipeline_class: type, name: str) -> Any:
    """A method that encodes media, with a run in between."""
    stock = getattr(pipeline_class, name)

    def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run.encode_media(name, lambda: stock.__get__(self)(*args, **kwargs))

    return functools.wraps(stock)(encode)


def _replace_noise(function: Any, noise: Callable[[tuple[int, ...]], Tensor]) -> Any:
    """A copy of `prepare_latents` that calls ``noise`` where it called `randn_tensor`."""

    def randn_tensor(shape: Any, *_: Any, device: Any = None, dtype: Any = None, **__: Any) -> Tensor:
        return noise(tuple(shape)).to(device=device, dtype=dtype)

    changed = {**function.__globals__, "randn_tensor": randn_tensor}
    made = types.FunctionType(
        function.__code__, changed, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def fresh_copy(scheduler: Any) -> Any:
    """A scheduler of its own: same type, nothing that two calls could both write to."""
    made = copy.copy(scheduler)
    made.__dict__.update({name: list(v) for name, v in vars(made).items() if type(v) is list})
    return made


def wrap_scheduler(pristine: Any, run: Run) -> Any:
    """A copy of a scheduler with grid and step in our hands. Patched as an object: some pipelines ask for the type."""
    scheduler = fresh_copy(pristine)
    stock_set, stock_step = scheduler.set_timesteps, scheduler.step

    @functools.wraps(stock_set)  # pipelines look at the signature
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        stock_set(*args, **kwargs)
        run.steps = 0
        if run.grid is not None:
            timesteps, sigmas = run.grid
            scheduler.timesteps = timesteps.to(scheduler.timesteps.device)
            scheduler.sigmas = sigmas.to(scheduler.sigmas)
            scheduler.num_inference_steps = len(timesteps)

    @functools.wraps(stock_step)
    def step(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        def stock() -> Any:
            return stock_step(model_output, timestep, sample, *args, **kwargs)

        if run.on_step is None:
            return stock()
        index, run.steps = run.steps, run.steps + 1
        moved = run.on_step(run, index, model_output, timestep, sample, stock)
        if not isinstance(moved, Tensor):
            return moved
        if kwargs.get("return_dict", True):
            return _StepResult(moved)
        return (moved,)

    scheduler.__dict__.update(set_timesteps=set_timesteps, step=step)
    return scheduler


@dataclass
class _StepResult:
    prev_sample: Tensor


def call_pipeline(
    pipeline: Any, view: type, denoisers: Sequence[str], scheduler: Any, run: Run, arguments: dict[str, Any]
) -> Any:
    """One call of the stock `__call__`, without its `no_grad`. Returns what it returns, or what `Stop` brought.

    Every other exception passes through.
    """
    run.scheduler = held = wrap_scheduler(scheduler, run)
    fronts: dict[str, Any] = {name: _DenoiserFront(getattr(pipeline, name), name, run) for name in denoisers}
    fronts["vae"] = _VaeFront(pipeline.vae, run)
    proxy = object.__new__(view)
    proxy.__dict__.update({**vars(pipeline), **fronts, "scheduler": held, "_run": run, "_whole": pipeline})
    proxy.__dict__["_progress_bar_config"] = {"disable": True}
    try:
        return inspect.unwrap(view.__call__)(proxy, **arguments)
    except Stop as stop:
        if stop.run is not run:
            raise
        stop.__traceback__ = stop.__context__ = None  # else its frames keep every tensor of the call
        return stop.found
    finally:
        run.scheduler = None
        proxy.__dict__.clear()
        held.__dict__.clear()  # its two functions refer to it
