"""What was found out about a pipeline by running it: printable, and kept next to other caches."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cosmos_rl.policy.model.driver.contract import Size
from cosmos_rl.storage import atomic


@dataclass(frozen=True)
class Check:
    """One passed check, in words, with what was measured."""

    name: str
    detail: str = ""


@dataclass
class Facts:
    """How a pipeline is driven, and how that was proved.

    Attributes:
        pipeline, diffusers: class name and version that the facts hold for.
        size: of the media that were used.
        leaf: index of the state in the flat results of `prepare_latents`.
        partial: the state is a part of that tensor: what the loop steps, without the frames that a medium gives.
        path: ``flow``: ``x = (1 - s) x0 + s e``, or ``edm``: ``x = x0 + s e``.
        scale: the factor between noise and the first state.
        guidance_name, guidance_off, guidance_style: the argument, the value that switches it off, how it is computed.
        denoisers: their names in the pipeline.
        time_inputs: for guidance "off" and "on": inputs of the denoiser that follow the level only, so that rows of
            several levels can share a call; empty where every level needs a call of its own.
        integer_time: t is a whole number.
        time_rule: t is "proportional" to sigma, or must be read from the "grid" of the size.
        inverted: the scheduler's sigma is 0 at noise and 1 at data; ours is one minus it.
        tail: how the pipeline is brought to decode: by no step at all, or by one that returns the state.
        first_dtype: of the state before the first step; some pipelines round it from then on, and t with it.
        state_dtype, state_shape, noise_shape, latent_shape: of one row; the last is what the decoder gets.
        affine: range of the factors and offsets between noise layout and decoder.
        timesteps, sigmas: the stock grid of the probe.
        perturbed: the weights were degenerate and had noise added while they were checked.
        checks: what was proved, in order.
    """

    pipeline: str = ""
    diffusers: str = ""
    size: Size = field(default_factory=lambda: Size(0, 0))
    leaf: int = 0
    partial: bool = False
    path: Literal["flow", "edm"] = "flow"
    scale: float = 1.0
    guidance_name: str | None = None
    guidance_off: float | None = None
    guidance_style: str = ""
    denoisers: list[str] = field(default_factory=list)
    time_inputs: dict[str, list[str]] = field(default_factory=dict)
    integer_time: bool = False
    time_rule: Literal["proportional", "grid"] = "proportional"
    inverted: bool = False
    tail: Literal["no step", "one step"] = "no step"
    first_dtype: str = "float32"
    state_dtype: str = "float32"
    state_shape: list[int] = field(default_factory=list)
    noise_shape: list[int] = field(default_factory=list)
    latent_shape: list[int] = field(default_factory=list)
    affine: str = ""
    timesteps: list[float] = field(default_factory=list)
    sigmas: list[float] = field(default_factory=list)
    perturbed: bool = False
    checks: list[Check] = field(default_factory=list)

    def table(self) -> list[tuple[str, str]]:
        """(what, value) pairs in plain words, without the checks."""
        frames, weights = "", "as they are"
        if self.perturbed:
            weights = "degenerate: checked with noise added, then restored"
        if self.size.frames > 1:
            frames = f" x {self.size.frames} frames"
        rows = {mode: "one call" if keys else "a call per level" for mode, keys in self.time_inputs.items()}
        guidance = "no argument"
        if self.guidance_name is not None:
            guidance = f"{self.guidance_name}: {self.guidance_style}; off at {self.guidance_off:g}"
        return [
            ("pipeline", f"{self.pipeline}, diffusers {self.diffusers}"),
            ("checked at", f"{self.size.height} x {self.size.width}{frames}"),
            ("state", f"{_shape(self.state_shape)} {self.state_dtype}, noise {_shape(self.noise_shape)}"),
            ("path", {"flow": "x = (1 - s) x0 + s e", "edm": f"x = x0 + s e, first s {self.scale:g}"}[self.path]),
            ("guidance", guidance),
            ("denoisers", ", ".join(self.denoisers)),
            ("rows of several levels", ", ".join(f"guidance {mode}: {how}" for mode, how in rows.items())),
            ("sigmas", " ".join(f"{sigma:.4g}" for sigma in self.sigmas)),
            ("timesteps", " ".join(f"{t:.5g}" for t in self.timesteps) + self._time()),
            ("decoder", f"{_shape(self.latent_shape)} by {self.tail}; {self.affine}"),
            ("weights", weights),
        ]

    def _time(self) -> str:
        said = []
        if self.integer_time:
            said.append("whole numbers")
        if self.time_rule == "grid":
            said.append("read from the grid of the size")
        if self.inverted:
            said.append("the scheduler counts backwards")
        return "".join(f"; {part}" for part in said)


def _shape(sides: list[int]) -> str:
    return " x ".join(str(side) for side in sides)


def cache_key(pipeline: Any, call: dict[str, Any], size: Size) -> str:
    """Digest of all that the facts depend on: versions, class, configurations of all parts, dtypes, call, size."""
    import diffusers
    import torch

    parts = {}
    for name, part in pipeline.components.items():
        config: Any = getattr(part, "config", None) or {}
        held = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        held.pop("_name_or_path", None)  # a folder that may be a temporary one
        parts[name] = [type(part).__name__, str(getattr(part, "dtype", "")), str(getattr(part, "device", "")), held]
    index = {name: value for name, value in pipeline.config.items() if name != "_name_or_path"}
    all_of_it = [diffusers.__version__, torch.__version__, index, parts, call, list(size)]
    named = [f"{type(pipeline).__module__}.{type(pipeline).__qualname__}", all_of_it]
    return hashlib.sha256(json.dumps(named, sort_keys=True, default=str).encode()).hexdigest()[:32]


def load(folder: Path, key: str) -> Facts | None:
    """The facts under a key; None where there are none, or none of this form."""
    try:
        found = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if set(found) != {item.name for item in dataclasses.fields(Facts)}:
        return None  # written by another version of this file
    found["size"] = Size(*found["size"])
    found["checks"] = [Check(**check) for check in found["checks"]]
    return Facts(**found)


def save(folder: Path, key: str, facts: Facts) -> None:
    """Keep the facts under a key."""
    atomic.write_text(folder / f"{key}.json", json.dumps(dataclasses.asdict(facts), indent=1))
