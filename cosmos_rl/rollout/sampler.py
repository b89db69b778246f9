"""One rollout: which sample of which prompt -> media, clean latents and recorded steps."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.data.given import Given, PromptKey, choose_given, join_key
from cosmos_rl.data.images import are_finite
from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.diffusion.churn import PLAIN_CHURN, Churn
from cosmos_rl.diffusion.kernels import Kernel
from cosmos_rl.diffusion.step_recorder import StepRecorder
from cosmos_rl.distributed import randomness
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import DiffusersConfig
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.policy.model.diffusers.cond import Cond
from cosmos_rl.policy.model.diffusers.flow_model import TEXT_KEYWORDS, FlowModel
from cosmos_rl.policy.model.diffusers.pipeline_model import filter_keywords
from cosmos_rl.policy.model.driver.contract import Level

Conditions = Callable[..., Any]
"""(prompts, negative prompts or None) -> conditions on the device; ``""`` leads guidance away from the default."""


@dataclass(frozen=True)
class Sample:
    """A sample that is to be made."""

    sample_id: int
    """Global id: the key of every random draw for this sample."""
    group: int
    """Global id of the prompt's position in the stream; samples with the same one are compared with each other."""
    prompt: str
    metadata: Mapping[str, Any]
    negative: str = ""
    """What guidance leads away from."""
    seed: int | None = None
    """Seed of its start noise, as diffusers takes it; None: keyed by the run's seed and the id."""
    given: Given | None = None
    """What it is conditioned on besides the prompt; None where the model takes prompts only."""
    size: Sides | None = None
    """Height and width; those of a rollout have the same. None: those of its `RolloutSpec`."""
    prompt_set: int = 0
    """That of its `PromptRecord`."""

    @property
    def key(self) -> PromptKey:
        """What its conditions are kept under."""
        return join_key(self.prompt, self.given)


@dataclass(frozen=True)
class RolloutSpec:
    """How samples are made."""

    num_steps: int
    guidance: float
    solver: str
    noise_level: float
    deterministic: bool
    height: int
    width: int
    frames: int | None = None
    same_initial_noise: bool = False
    """Of the samples of a group."""
    churn: Churn = PLAIN_CHURN
    """More about the noise that EDM's solvers add."""

    @classmethod
    def training(cls, config: DiffusersConfig) -> "RolloutSpec":
        """The configured sampler."""
        sample = config.sample
        frames = config.train_frames if config.is_video else None
        solver = (sample.solver, sample.noise_level, sample.deterministic_sampling)
        size = (*config.inference_size, frames)
        churn = Churn(sample.noise_scale, sample.noise_above, sample.noise_below or math.inf)
        return cls(sample.num_steps, sample.guidance_scale, *solver, *size, sample.same_initial_noise, churn)

    @classmethod
    def evaluation(cls, config: DiffusersConfig) -> "RolloutSpec":
        """The ODE with ``eval_num_steps``: what the exported pipeline will do."""
        sample = config.sample
        steps = sample.eval_num_steps or sample.num_steps
        frames = config.inference_frames if config.is_video else None
        return cls(steps, sample.guidance_scale, "euler", 0.0, True, *config.inference_size, frames)


@dataclass(frozen=True)
class Rollouts:
    """``N`` finished samples."""

    samples: tuple[Sample, ...]
    latents: Tensor
    """Clean latents ``[N, C, ...]`` float32 on the CPU."""
    media: Tensor
    """uint8 ``[N, H, W, 3]``, or ``[N, T, H, W, 3]`` for videos, on the CPU."""
    finite: Tensor
    """Bool ``[N]`` on the CPU: whether all pixels were numbers."""
    fps: float | None = None
    """Frames per second of videos."""
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """What else an algorithm learns from, ``[N, ...]`` on the CPU; sharded over the ranks like the latents."""

    @property
    def learnable(self) -> dict[str, Tensor]:
        """Everything that an algorithm may learn from, by name; the latents are ``clean``."""
        return {"clean": self.latents, **self.recorded}


class RolloutSampler:
    """Makes samples with whatever policy the model acts as at the moment."""

    def __init__(self, model: FlowModel, spec: RolloutSpec, seed: int) -> None:
        self._model = model
        self.spec = spec
        self._seed = seed
        self._trained: dict[Sides | None, Level] = {}

    def trained_levels(self) -> Level:
        """Those of the states at the model's present size, without the clean one; some pipelines have others at another
        size."""
        size = self._model.media_size
        if size not in self._trained:
            levels, _ = self.transitions()
            self._trained[size] = levels.rows(slice(-1))
        return self._trained[size]

    def transitions(self) -> tuple[Level, Kernel]:
        """Levels of the states that it passes through at the model's present size, and the steps between them."""
        spec, model = self.spec, self._model
        return model.transitions(
            spec.solver,
            model.sampling_levels(spec.num_steps),
            noise_level=spec.noise_level,
            deterministic=spec.deterministic,
            churn=spec.churn,
        )

    def require_noise(self, steps: Collection[int]) -> None:
        """Steps without noise have no log-probability, so that they cannot be trained.

        Raises:
            UserError: some of these have none at the model's present size.
        """
        if not steps:
            return
        levels, kernel = self.transitions()
        sigmas = levels.sigma.tolist()
        noisy = [index for index in range(self.spec.num_steps) if kernel(index, sigmas).s > 0.0]
        if without := sorted(set(steps) - set(noisy)):
            raise UserError(
                f"train.train_policy.steps: the sampling steps {without} may be trained and have no noise; allowed: of "
                f"{noisy}, by train.train_policy.steps or policy.diffusers.timesteps_fraction, or other noise between "
                "the steps (policy.diffusers.sample.noise_above, noise_below)"
            )

    def sample(
        self,
        samples: Sequence[Sample],
        conditions: Conditions,
        purpose: str,
        step: int,
        recorder: StepRecorder | None = None,
    ) -> Rollouts:
        """Make all ``samples`` in one call; noise is keyed by (seed, purpose, step, sample id).

        ``recorder``: a new one, which keeps some of the steps for training.

        Raises:
            ValueError: the model's sampler gives other shapes than asked for.
            UserError: steps are to be recorded of a sampler that is a user's own.
        """
        cond = self._condition(samples, conditions)
        visuals, states = self._call_model(samples, cond, purpose, step, keep=False, recorder=recorder)
        latents, recorded = states[-1].to("cpu", torch.float32), {}
        if recorder is not None:
            recorded = recorder.recorded()
        if visuals is None:
            media, finite = self._model.decode_media(states[-1], cond)
        else:
            media, finite = self._model.to_media(visuals), are_finite(visuals)
        return Rollouts(tuple(samples), latents, media, finite, self._model.fps, recorded)

    def trajectory(self, samples: Sequence[Sample], conditions: Conditions, purpose: str, step: int) -> list[Tensor]:
        """The states ``[N, C, ...]`` of the sampling loop, from the start noise to the clean latents, on the device."""
        return self._call_model(samples, self._condition(samples, conditions), purpose, step, keep=True)[1]

    @staticmethod
    def _condition(samples: Sequence[Sample], conditions: Conditions) -> Any:
        negative = [sample.negative for sample in samples]
        return conditions([sample.key for sample in samples], negative if any(negative) else None)

    def _call_model(
        self,
        samples: Sequence[Sample],
        cond: Any,
        purpose: str,
        step: int,
        *,
        keep: bool,
        recorder: StepRecorder | None = None,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Media where a user's own sampler makes them, and states; with ``keep`` false perhaps only the last one."""
        spec, model = self.spec, self._model
        height, width = self._find_size(samples)
        keywords: dict[str, Any] = {
            "num_inference_steps": spec.num_steps,
            "guidance_scale": spec.guidance,
            "output_type": "pt",
            "height": height,
            "width": width,
            "noise_level": spec.noise_level,
            "deterministic": spec.deterministic,
            "solver": spec.solver,
            "num_frames": spec.frames,
            "generator": [self._generator(sample, purpose, step) for sample in samples],
        }
        method = model.pipeline_with_logprob
        own_sampler = getattr(method, "__func__", None) is not FlowModel.pipeline_with_logprob
        accepted = inspect.signature(method).parameters
        if takes_start_noise(model):
            keywords |= self._noise(samples, purpose, step)
        if "keep_trajectory" in accepted:
            keywords["keep_trajectory"] = keep
        if "churn" in accepted or not own_sampler:
            keywords["churn"] = spec.churn
        elif spec.churn != PLAIN_CHURN:
            raise UserError(
                f"policy.diffusers.sample: found noise_scale, noise_above or noise_below; {type(model).__name__} has a "
                "pipeline_with_logprob of its own without the parameter churn (cosmos_rl.diffusion.churn.Churn), which "
                "holds them; add it, or leave them out"
            )
        if recorder is not None:
            if own_sampler:
                raise UserError(
                    f"{type(model).__name__} has a pipeline_with_logprob of its own, whose steps cannot be recorded; "
                    "leave it out, or use an algorithm that needs no steps (diffusion_nft)"
                )
            keywords["recorder"] = recorder
        with torch.no_grad():
            if not own_sampler:
                keywords["output_type"] = "latent"
                _, states, _ = model.rollout(cond, **keywords)
                return None, states
            visuals, states, _ = method(**_texts_for(method, cond), **keywords)
        if len(visuals) != len(samples) or len(states[-1]) != len(samples):
            raise ValueError(
                f"{type(model).__name__}.pipeline_with_logprob gave {len(visuals)} media and {len(states[-1])} latents "
                f"for {len(samples)} prompts"
            )
        return visuals, states

    def draw_start(self, samples: Sequence[Sample], purpose: str, step: int) -> Tensor:
        """The noise ``[N, ...]`` that ``sample`` starts from for these arguments, in the layout of the model's
        ``latent_shape``, on the CPU; only of a model that ``takes_start_noise``."""
        shape = self._model.latent_shape(*self._find_size(samples))
        return torch.stack([torch.randn(shape, generator=self._generator(one, purpose, step)) for one in samples])

    def _noise(self, samples: Sequence[Sample], purpose: str, step: int) -> dict[str, Any]:
        """Start noise, and generators for that of the steps: keyed apart, so that either can be drawn alone."""
        start = self.draw_start(samples, purpose, step)
        ids = [sample.sample_id for sample in samples]
        steps = [randomness.generator(self._seed, f"{purpose}/steps", step, sample_id) for sample_id in ids]
        return {"latents": start, "generator": steps}

    def _find_size(self, samples: Sequence[Sample]) -> Sides:
        return samples[0].size or (self.spec.height, self.spec.width)

    def _generator(self, sample: Sample, purpose: str, step: int) -> torch.Generator:
        if sample.seed is not None:
            return torch.Generator().manual_seed(sample.seed)
        if self.spec.same_initial_noise:
            return randomness.generator(self._seed, f"{purpose}/group", step, sample.group)
        return randomness.generator(self._seed, purpose, step, sample.sample_id)


def takes_start_noise(model: FlowModel) -> bool:
    """Whether the model's sampler is given its start noise; one of a user's own may draw it from its generators."""
    return "latents" in inspect.signature(model.pipeline_with_logprob).parameters


def _texts_for(method: Callable[..., Any], cond: Cond) -> dict[str, Any]:
    """Keywords of a user's own sampler: the usual ones, and those that only their class has, where it takes them."""
    text, negative = {**cond.text, **cond.shared}, cond.negative or {}
    found = {**text, **{f"negative_{keyword}": value for keyword, value in negative.items()}}
    usual = {
        prefix + name: found.pop(prefix + keyword)
        for name, keyword in TEXT_KEYWORDS.items()
        for prefix in ("", "negative_")
        if prefix + keyword in found
    }
    return usual | filter_keywords(method, found)


@dataclass(frozen=True)
class Giving:
    """How many latent frames of each prompt's medium are given.

    Attributes:
        clean_frames: least and most; (0, 0): the model takes prompts only.
        seed: of the draw between the two, one for each group of samples; None: always the most.
    """

    clean_frames: tuple[int, int] = (0, 0)
    seed: int | None = None

    def __call__(self, position: int, record: PromptRecord) -> Given | None:
        """What the samples of the prompt at a position of the stream are conditioned on."""
        u = 1.0
        if self.seed is not None and self.clean_frames[1] > 0:
            u = float(randomness.uniform(self.seed, "conditional_frames", 0, [position])[0])
        return choose_given(record, self.clean_frames, u)


NOTHING_GIVEN = Giving()
"""Samples are made of their prompts alone."""


def group_samples(
    records: Iterable[tuple[int, PromptRecord]],
    count: int,
    give: Giving = NOTHING_GIVEN,
    size: Sides | None = None,
) -> list[Sample]:
    """``count`` samples of each prompt, those of a prompt in a row; a record comes with its position in the stream."""
    made = []
    for position, record in records:
        given = give(position, record)
        about = {"given": given, "size": size, "prompt_set": record.prompt_set}
        for k in range(count):
            made.append(Sample(position * count + k, position, record.prompt, record.metadata, **about))
    return made


def build_validation_samples(records: Sequence[PromptRecord], count: int, give: Giving = NOTHING_GIVEN) -> list[Sample]:
    """`group_samples` for validation, where the records' own negative prompts and seeds act: sample k has seed + k."""
    samples = group_samples(enumerate(records), count, give)
    numbered = ((sample, records[sample.group], sample.sample_id % count) for sample in samples)
    return [
        replace(sample, negative=record.negative_prompt, seed=None if record.seed is None else record.seed + k)
        for sample, record, k in numbered
    ]


def concat_rollouts(parts: Sequence[Rollouts], media: Tensor) -> Rollouts:
    """Several rollouts as one, in their order; ``media`` are those of all, see `place_media`."""
    if len(parts) == 1:
        return replace(parts[0], media=media)
    samples = tuple(sample for part in parts for sample in part.samples)
    recorded = {name: torch.cat([p.recorded[name] for p in parts]) for name in parts[0].recorded}
    rows = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("latents", "finite")}
    return Rollouts(samples, media=media, **rows, fps=parts[0].fps, recorded=recorded)


def place_media(part: Rollouts, media: Tensor | None, first: int, total: int) -> tuple[Rollouts, Tensor]:
    """The same rollouts with their media within those of all ``total`` samples, from ``first`` on, and all of these.
    So the media of a step, which are large, are never held twice. None: these are the first."""
    if media is None and len(part.samples) == total:
        return part, part.media
    if media is None:
        media = part.media.new_empty(total, *part.media.shape[1:])
    rows = media[first : first + len(part.samples)]
    rows.copy_(part.media)
    return replace(part, media=rows), media


def measure_diversity(media: Tensor, groups: Sequence[int]) -> list[float]:
    """The population standard deviation within each group, mean over elements; 0: all samples are alike.

    Args:
        media: ``[N, ...]``; uint8 counts as [0, 1].
        groups: ``N`` ids; a group of one sample is left out.
    """
    scale, stds = 1.0, []
    frames: Sequence[Tensor] = [media]
    if media.dtype == torch.uint8:
        scale = 255.0
    if media.ndim == 5:  # one after the other: videos as float32 would take four times their memory
        frames = media.unbind(1)
    for group in dict.fromkeys(groups):
        rows = [i for i, g in enumerate(groups) if g == group]
        if len(rows) > 1:
            found = [float((frame[rows].float() / scale).std(0, correction=0).mean()) for frame in frames]
            stds.append(sum(found) / len(found))
    return stds
