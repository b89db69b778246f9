"""The trainable model of every pipeline class without maths of its own here: the stock pipeline, driven."""

import inspect
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_matching import combine_weights, flow_matching_loss
from cosmos_rl.diffusion.kernels import STOCK
from cosmos_rl.diffusion.schedule import loss_weight
from cosmos_rl.distributed.sharding import Sharding
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import DiffusersConfig
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.policy.config.model_rules import (
    BINNING,
    call_switches,
    conditional_frames_problem,
    frames_problem,
    latents_problem,
)
from cosmos_rl.policy.config.plan import DECODED_PIXELS
from cosmos_rl.policy.model.diffusers.cond import Negative, negatives
from cosmos_rl.policy.model.diffusers.flow_model import Visuals
from cosmos_rl.policy.model.diffusers.pipeline_model import PipelineModel
from cosmos_rl.policy.model.driver.binning import require_listed_size
from cosmos_rl.policy.model.driver.conditions import DrivenCond
from cosmos_rl.policy.model.driver.contract import Level, Medium, Size, stack_levels
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.loading import list_denoisers
from cosmos_rl.policy.model.driver.path import PATHS
from cosmos_rl.policy.model.driver.probe import prove
from cosmos_rl.policy.model.driver.rows import find_row
from cosmos_rl.storage.cache_folder import facts_folder
from cosmos_rl.utils.logging import logger

_GUIDED = 2.0
"""Any value that switches guidance on: conditions made with it serve every other one."""


class DrivenModel(PipelineModel):
    """A pipeline of any class that passes the checks of the driver, with all its maths left to diffusers.

    Latents are states in the pipeline's own layout, which may be packed; noise has the layout in which the pipeline
    draws it, see ``start_state``.

    Attributes:
        driver: what runs the pipeline.
    """

    def __init__(self, config: DiffusersConfig, *, sharding: Sharding | None = None, **kwargs: Any) -> None:
        """Load the pipeline and prove that it can be driven, see ``PipelineModel``.

        Raises:
            UserError: a check failed, or the pipeline does not fit the configuration.
        """
        super().__init__(config, sharding=sharding, **kwargs)
        call: dict[str, Any] = call_switches(
            prompt_instruction=config.prompt_instruction, resolution_binning=config.resolution_binning
        )
        if "max_prompt_length" in config.model_fields_set:
            call["max_sequence_length"] = config.max_prompt_length
        self.size = Size(*config.inference_size, self._count_frames())
        self._grids: dict[tuple[Size, int], tuple[Tensor, Tensor, Tensor]] = {}
        # at the smallest size, which may be in no list of sizes
        probed = Driver(self.pipeline, call={**call, BINNING: False}, device=self.device)
        self.driver = Driver(self.pipeline, call=call, device=self.device, size=self.size)
        # ranks that read the cache would not meet those that run the checks
        cache = facts_folder() if sharding is None else None
        encoders = [] if self._texts_apart else self._encoders()  # the checks call them and the denoisers in turn
        staying = self.on_device(*encoders, *self._media_encoders())
        with self.encoding_texts(), staying, self.eval_mode(), self._autocast():
            self.driver.facts = prove(probed, cache=cache)
            self.conditional_frames = self._find_conditional_frames()
            self._prepare_sizes(probed)
        if sharding is not None:
            self._keep_ranks_in_step(sharding)
        self._path = PATHS[self.driver.path]
        logger.info(
            f"the stock {type(self.pipeline).__name__} is driven "
            f"({len(self.driver.facts.checks)} checks passed; cosmos-rl check-model shows them)"
        )
        self.set_scheduler_timestep(self.train_sampling_steps)

    def _prepare_sizes(self, probed: Driver) -> None:
        """What is refused or measured for each size. ``probed``: calls the pipeline without its list of sizes."""
        kinds = range(self.conditional_frames[0], self.conditional_frames[1] + 1)
        sizes = [self.size._replace(height=h, width=w) for h, w in self.config.training_sizes]
        self.driver.most_kept = max(self.driver.most_kept, len(kinds) * len(sizes))
        key = "policy.diffusers.inference_size"
        if self.config.buckets is not None:
            key = "policy.diffusers.buckets.sizes"
        for size in sizes:
            if self.config.resolution_binning:
                require_listed_size(self.driver, probed, size, key)
            for kind in kinds:
                self.driver.element_mask(kind, size)  # calls the denoiser, which all ranks must do together

    def set_size(self, size: Sides) -> None:
        """See ``FlowModel``. Pipelines have other noise levels at other sizes."""
        super().set_size(size)
        self.size = self.driver.size = self.size._replace(height=size[0], width=size[1])
        self.set_scheduler_timestep(self._training_steps)

    def sampling_call(self) -> dict[str, Any]:
        """Arguments with which the pipeline's call samples as it was trained."""
        length = inspect.signature(type(self.pipeline).__call__).parameters.get("max_sequence_length")
        call = dict(self.driver.call)
        if length is not None and isinstance(length.default, int):
            call.setdefault("max_sequence_length", length.default)
        return call

    def _keep_ranks_in_step(self, sharding: Sharding) -> None:
        """Sharded weights are gathered call by call, so all ranks must call the same denoisers equally often."""
        if not self.driver.facts.time_inputs["off"]:
            raise UserError(
                f"{type(self.pipeline).__name__} needs a call for each noise level of a batch, and ranks may have "
                "different numbers of them: set policy.parallelism.dp_shard_size = 1, and train with one rank"
            )
        if len(self.driver.denoisers) > 1:
            self.driver.any_over_ranks = sharding.any_over_ranks

    def _count_frames(self) -> int:
        """Frames of all media; 1 for images.

        Raises:
            UserError: the pipeline's VAE has no such number, or training and validation differ in it.
        """
        if not self.config.is_video:
            return 1
        frames = self.config.train_frames
        if self.config.inference_frames != frames:
            raise UserError(
                f"policy.diffusers.inference_frames = {self.config.inference_frames}, train_frames = {frames}: not "
                "supported yet, set both to the same number"
            )
        parts = vars(self.pipeline).items()
        step = max((value for name, value in parts if name.startswith("vae") and "temporal" in name), default=1)
        problem = frames_problem("policy.diffusers.train_frames", frames, self.model_str, step)
        if problem is not None:
            raise UserError(problem)
        self.fps = find_row(type(self.pipeline).__name__).fps
        return frames

    def _find_conditional_frames(self) -> tuple[int, int]:
        """What the configuration asks for, or the least that the pipeline can do."""
        row = self.driver.row
        chosen = row.choose_clean_frames(self.config.conditional_frames)
        problem = conditional_frames_problem(chosen, self.model_str, row.clean_frames)
        if problem is not None:
            raise UserError(problem)
        return chosen

    def _media_encoders(self) -> list[torch.nn.Module]:
        parts = [self.vae]
        if getattr(self.pipeline, "image_encoder", None) is not None:
            parts.append(self.pipeline.image_encoder)
        if self.driver.row.text_sees_media:
            parts += self._encoders()
        return parts

    @property
    def keeps_media_apart(self) -> bool:
        """Whether there are conditions of media that do not change those of the texts."""
        return self.conditional_frames[1] > 0 and not self.driver.row.text_sees_media

    @staticmethod
    def supported_model_types() -> list[str]:
        """Every class that no other model serves."""
        return []

    def makes_videos(self, processor: str) -> bool:
        """Whether the pipeline takes a number of frames: some make images with a video's autoencoder."""
        names = {"num_frames", "frames", find_row(type(self.pipeline).__name__).frames}
        return bool(names & inspect.signature(type(self.pipeline).__call__).parameters.keys())

    def find_trained(self) -> list[str]:
        """The denoisers that ``policy.diffusers.trained_denoiser`` names."""
        found, wanted = list_denoisers(self.base_folder), self.config.trained_denoiser
        if wanted == "all":
            return found
        if wanted not in found:
            raise UserError(
                f'policy.diffusers.trained_denoiser = "{wanted}": {self.model_str} has {" and ".join(found)}; set it '
                'to one of them, or to "all"'
            )
        return [wanted]

    # ---- sigmas ------------------------------------------------------------------------------------------------

    def set_scheduler_timestep(self, num_steps: int) -> None:
        """Cache the pipeline's own grid of training, ascending, without the levels of experts that are frozen."""
        self._training_steps, key = num_steps, (self.size, num_steps)
        if key not in self._grids:
            levels = self.sampling_levels(num_steps).rows(slice(0, num_steps))
            self._start_sigma = levels.sigma[0]
            trained = self._serves_trained(levels)
            ascending = levels.t.float()[trained].flip(0), levels.sigma[trained].flip(0)
            self._grids[key] = (self._start_sigma, *ascending)
        self._start_sigma, self.timestep_map, self.sigma_map = self._grids[key]
        self.train_sampling_steps = len(self.sigma_map)

    def _serves_trained(self, levels: Level) -> Tensor:
        """At which of the levels, sorted, a trained denoiser is called: bool ``[K]``. Each serves one interval."""
        names = [""] * len(levels.sigma)
        if len(self._trained) == len(self.driver.denoisers):
            return torch.ones(len(names), dtype=torch.bool)

        def fill(first: int, last: int) -> None:
            here = torch.tensor([first, last])
            names[first], names[last] = self.driver.denoisers_at(self._path.to_stock_level(levels.rows(here)))
            if names[first] == names[last]:
                names[first:last] = [names[first]] * (last - first)
            elif last - first > 1:
                middle = (first + last) // 2
                fill(first, middle)
                fill(middle, last)

        fill(0, len(names) - 1)
        return torch.tensor([name in self._trained for name in names])

    def sampling_levels(self, num_steps: int, scheduler: Any = None) -> Level:
        """The ``[num_steps + 1]`` levels that the pipeline samples at, at the configured size, the last one clean."""
        with self.encoding_texts():
            levels = self._path.from_stock_level(stack_levels(self.driver.levels(num_steps)))
        levels.sigma[-1] = 0.0  # one path ends at a smallest sigma, and what it ends with is taken as clean
        return levels

    def sampling_sigmas(self, num_steps: int, scheduler: Any = None) -> Tensor:
        """The sigmas of ``sampling_levels``."""
        return self.sampling_levels(num_steps).sigma

    def training_level(self, sigma: Tensor) -> Level:
        """The level at any sigma, by the pipeline's own rule."""
        sigma = sigma.detach().float().cpu()
        if self.driver.path == "edm":
            sigma = sigma.clamp(max=float(self._start_sigma))  # sigma 1 is an infinite one of the pipeline's
        stock = self._path.to_stock_level(Level(sigma, sigma))
        return Level(self.driver.training_level(stock.sigma).t, sigma)

    # ---- conditions --------------------------------------------------------------------------------------------

    def encode_prompts(self, prompts: Sequence[str], negative: Negative = None, *, each: bool = False) -> DrivenCond:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Prompts -> conditions, see ``FlowModel``. An empty negative prompt is the pipeline's own default."""
        away = negatives(negative, len(prompts))
        pairs = list(zip(prompts, away or [""] * len(prompts), strict=True))
        distinct = pairs if each else list(dict.fromkeys(pairs))
        texts, away = [prompt for prompt, _ in distinct], [other for _, other in distinct]
        with torch.no_grad(), self.encoding_texts():
            cond = self._encode_texts(texts, away, guided=negative is not None)
        if len(distinct) == len(pairs):
            return cond
        return cond.rows(torch.tensor([distinct.index(pair) for pair in pairs]))

    def encode_each(self, pairs: Sequence[tuple[str, str | None]]) -> list[DrivenCond]:
        """The conditions of (prompt, negative prompt) pairs, each made alone: what they are depends on no other one."""
        with torch.no_grad(), self.encoding_texts():
            return [self._encode_texts([text], [away or ""], guided=away is not None) for text, away in pairs]

    def count_given(self, clean: int) -> int:
        """See ``FlowModel``."""
        return self.driver.count_given(clean)

    def condition(self, cond: DrivenCond, media: Sequence[Medium | None]) -> DrivenCond:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What the pipeline makes of a medium for each row, see ``FlowModel``."""
        with torch.no_grad(), self.on_device(*self._media_encoders()):
            return self.driver.condition(cond, media)

    def _encode_texts(self, texts: list[str], away: list[str], *, guided: bool) -> DrivenCond:
        return self.driver.encode(texts, away if any(away) else None, guidance=_GUIDED if guided else None)

    def text_identity(self) -> str:
        """Everything other than the texts and the encoders' weights that decides what conditions are."""
        import diffusers
        import transformers

        held = [type(self.pipeline).__name__, self.driver.call, self.driver.row.negative, list(self.size)]
        return json.dumps([*held, diffusers.__version__, transformers.__version__], sort_keys=True, default=str)

    # ---- velocity ----------------------------------------------------------------------------------------------

    def velocity(self, latents: Tensor, level: Level, cond: DrivenCond, *, guidance: float = 1.0) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What the pipeline hands to its scheduler's step, see ``FlowModel``."""
        guided = guidance > 1.0
        self.num_evaluations += len(latents) * (2 if guided and self._doubles else 1)
        state, stock_level = self._path.to_stock_state(latents, level.sigma), self._path.to_stock_level(level.to("cpu"))
        with self._autocast():
            found = self.driver.velocity(state, stock_level, cond, guidance if guided else None, self.size)
        velocity = self._path.from_stock_velocity(found, state, level.sigma).to(latents.dtype)
        if torch.is_grad_enabled() and not velocity.requires_grad:
            velocity.requires_grad_()  # only a frozen expert was called: a loss can go back, and finds nothing to train
        return velocity

    def set_gradient_sync(self, wanted: bool) -> None:
        """See ``FlowModel``. Of several experts the last micro-batch may call one only, so each reduces its own."""
        super().set_gradient_sync(wanted or len(self.driver.denoisers) > 1)

    @property
    def _doubles(self) -> bool:
        """Whether guidance takes a second pass; in distilled models it is one more input."""
        return not self.driver.facts.guidance_style.startswith("embedded")

    def training_sft_step(
        self,
        clean_latents: Tensor,
        cond: DrivenCond,
        *,
        timestep: Tensor,
        noise: Tensor,  # pyright: ignore[reportIncompatibleMethodOverride]
        sample_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Flow-matching loss of a micro-batch as ``(sum over samples, weight)``, see ``PipelineModel``."""
        noised, noise, _ = self.add_noise(clean_latents, timestep=timestep, noise=noise)
        level = Level(self.timestep_map, self.sigma_map).rows(timestep.cpu())
        velocity = self.velocity(noised, level, cond)
        level_weight = loss_weight(level.sigma.to(clean_latents.device), self.config.weighting_scheme)
        weight = combine_weights(level_weight, sample_weight)
        return flow_matching_loss(velocity, clean_latents, noise, element_mask=cond.element_mask, weight_B=weight)

    # ---- media -------------------------------------------------------------------------------------------------

    def visual_embedding(self, visual_list: list[Tensor], height: int, width: int, device: torch.device) -> Tensor:
        """Images ``[3, H, W]`` or videos ``[3, T, H, W]`` in [-1, 1] -> clean states float32 (the posterior's mean)."""
        media = torch.stack(visual_list).to(device)
        if media.shape[-2:] != (height, width):
            raise UserError(
                f"the data set gives images of {tuple(media.shape[-2:])} pixels, policy.diffusers.inference_size is "
                f"({height}, {width})"
            )
        if self.config.is_video:
            if media.ndim != 5 or media.shape[2] != self.size.frames:
                raise UserError(
                    f"the data set gives {tuple(media.shape[1:])}, not videos [3, {self.size.frames}, H, W] "
                    "(policy.diffusers.train_frames)"
                )
            media = media.movedim(2, 1)
        return self.driver.encode_media(media, self.size._replace(height=height, width=width)).float()

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's noise as the pipeline draws it."""
        return self.driver.noise_shape(self.size._replace(height=height, width=width))

    def pack_noise(self, noise: Tensor) -> Tensor:
        """The same noise as the pipeline packs it, see ``PipelineModel``."""
        with torch.no_grad():
            return self.driver.pack(noise, self.size)

    def start_state(self, noise: Tensor) -> Tensor:
        """Noise ``[N, ...]`` as the pipeline draws it -> the state that its loop starts from."""
        return self._path.from_stock_state(self._stock_start(noise), self._start_sigma.expand(len(noise)))

    def _stock_start(self, noise: Tensor) -> Tensor:
        start, scale = self.driver.pack(noise, self.size), self.driver.facts.scale
        return start if scale == 1.0 else start * scale

    def decode(self, latents: Tensor) -> Tensor:
        """Clean states -> media ``[N, (T,) 3, H, W]`` float32 in [0, 1], by the end of the stock call."""
        return self.decode_conditioned(latents, None)

    def decode_conditioned(self, latents: Tensor, cond: DrivenCond | None) -> Tensor:
        """The same for samples with these conditions, see ``FlowModel``."""
        size, made = self.count_decoded_at_once(latents), []
        with torch.no_grad(), self.on_device(self.vae):
            for first in range(0, len(latents), size):
                which = slice(first, min(first + size, len(latents)))
                rows = None if cond is None else cond.rows(which)
                made.append(self.driver.decode(latents[which], self.size, rows).float())
        if len(made) == 1:  # a video is large: no copy
            return made[0]
        return torch.cat(made)

    def count_decoded_at_once(self, latents: Tensor) -> int:
        """See ``FlowModel``."""
        return max(DECODED_PIXELS // (self.size.height * self.size.width * self.size.frames), 1)

    def check_reward_latents(self, key: str) -> None:
        """See ``FlowModel``: the reward service has the VAE of Wan."""
        kind, channels = type(self.vae).__name__, getattr(self.vae.config, "z_dim", None)
        problem = latents_problem(key, self.model_str, kind, channels, is_video=self.config.is_video)
        if problem is not None:
            raise UserError(problem)
        if self.conditional_frames[1] > 0:  # the frames that the decoder is given are not in the state
            raise UserError(f'{key} = "latents": not with policy.diffusers.conditional_frames; set it to "pixels"')

    def reward_latents(self, latents: Tensor) -> Tensor:
        """What the pipeline would give its VAE, normalised by the VAE's own statistics, see ``FlowModel``."""
        decoded = self.driver.before_decoder(latents.to(self.device), self.size).float()
        mean, std = (
            torch.tensor(self.vae.config[name], device=decoded.device).view(1, -1, 1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        return ((decoded - mean) / std).to("cpu", torch.float16)

    # ---- sampling ----------------------------------------------------------------------------------------------

    def sample_latents(
        self,
        cond: DrivenCond,  # pyright: ignore[reportIncompatibleMethodOverride]
        noise: Tensor,
        *,
        num_steps: int,
        guidance: float,
        solver: str = STOCK,
    ) -> Tensor:
        """Noise ``[N, ...]`` -> clean states; stock: by the steps of the pipeline's own scheduler."""
        if solver == STOCK:
            return self._stock_states(cond, noise, num_steps, guidance)[-1]
        return super().sample_latents(cond, noise, num_steps=num_steps, guidance=guidance, solver=solver)  # pyright: ignore[reportArgumentType]

    def rollout(self, cond: DrivenCond, generator: Sequence[torch.Generator], **options: Any) -> Visuals:
        """See ``FlowModel``; with the solver ``stock`` the whole loop is the pipeline's own."""
        if options.get("solver") != STOCK:
            return super().rollout(cond, generator, **options)
        noise = options.get("latents")
        if noise is None:
            shape = self.latent_shape(options["height"], options["width"])
            noise = torch.stack([torch.randn(shape, generator=one) for one in generator])
        states = self._stock_states(cond, noise, options["num_inference_steps"], options["guidance_scale"])
        visuals = states[-1]
        if options.get("output_type") != "latent":
            visuals = self.decode_conditioned(visuals, cond)
        return visuals, states, None

    def sample_stock(
        self, pipeline: Any, prompt: str, generator: torch.Generator, *, num_steps: int, guidance: float
    ) -> Tensor:
        """The state that the public call of another pipeline of the same class ends with."""
        value = guidance if guidance > 1.0 else self.driver.guidance_off
        arguments = self.driver.arguments(1, value, self.size, [prompt], steps=num_steps)
        states: list[Tensor] = []
        stock_step = pipeline.scheduler.step

        def step(*args: Any, **kwargs: Any) -> Any:
            moved = stock_step(*args, **kwargs)
            states.append(moved[0] if isinstance(moved, tuple) else moved.prev_sample)
            return moved

        pipeline.scheduler.step = step
        pipeline(**arguments, generator=[generator], output_type="latent")
        return states[-1]

    def _stock_states(self, cond: DrivenCond, noise: Tensor, num_steps: int, guidance: float) -> list[Tensor]:
        value = guidance if guidance > 1.0 else None
        self.num_evaluations += len(noise) * num_steps * (2 if value is not None and self._doubles else 1)
        with self._autocast():
            start = self._stock_start(noise.to(self.device))
            found = self.driver.rollout(
                cond.to(self.device), [], num_steps, value, size=self.size, start=start, decode=False
            )
        sigmas = self._path.from_stock_level(stack_levels(found.levels)).sigma[:-1]
        earlier = zip(found.states, sigmas, strict=False)
        states = [self._path.from_stock_state(state, sigma.expand(len(state))) for state, sigma in earlier]
        return [*states, found.states[-1]]
