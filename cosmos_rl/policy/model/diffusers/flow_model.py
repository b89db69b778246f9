"""What training and sampling ask of a model: a velocity, its sigmas, conditions, and the way to media.

Everything that samples is built here from these few. A diffusers pipeline is one such model; a closed-form mixture in a
test is another.
"""

import abc
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from cosmos_rl.data.images import are_finite, to_uint8
from cosmos_rl.diffusion.churn import PLAIN_CHURN, Churn, StepNoise, build_transitions
from cosmos_rl.diffusion.kernels import (
    STOCK,
    Kernel,
    StepFn,
    euler,
    read_sigmas,
    step_with_log_prob,
    stock_step,
)
from cosmos_rl.diffusion.sampling import Sampled, hold_given, run_sampling
from cosmos_rl.diffusion.step_recorder import StepRecorder
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import LoraConfig
from cosmos_rl.policy.model.diffusers.cond import Cond, Negative
from cosmos_rl.policy.model.diffusers.sized import Sized
from cosmos_rl.policy.model.driver.contract import Level, Medium
from cosmos_rl.policy.model.policies import Kept, Policies, build_policies, free_gathered

TEXT_KEYWORDS = {
    "prompt_embeds": "encoder_hidden_states",
    "prompt_attention_mask": "encoder_attention_mask",
    "pooled_prompt_embeds": "pooled_projections",
}
"""Names of the rollout call -> keywords of the transformer's forward."""

Visuals = tuple[Tensor, list[Tensor], list[Tensor] | None]
"""(media in [0, 1], the states of the sampling loop, log-probabilities per step or None)."""


class FlowModel(Sized, abc.ABC):
    """A trainable velocity field with conditions and a decoder.

    Attributes:
        transformer: the module whose parameters are trained; with several denoisers a ``ModuleDict`` of them.
        device: where it computes.
        lora_config: None when all weights are trained.
        fps: frames per second of the videos that it makes; None for images.
        num_evaluations: samples that went through the transformer so far, on this rank.
    """

    transformer: Any
    scheduler: Any
    device: torch.device
    lora_config: LoraConfig | None
    fps: float | None = None
    num_evaluations: int = 0

    @property
    def denoisers(self) -> dict[str, Any]:
        """The trained denoisers by their names in the pipeline, in a fixed order: ``transformer``, or experts."""
        if isinstance(self.transformer, torch.nn.ModuleDict):
            return dict(self.transformer.items())
        return {"transformer": self.transformer}

    # ---- what a model gives ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def encode_prompts(self, prompts: Sequence[str], negative: Negative = None, *, each: bool = False) -> Cond:
        """Prompts -> conditions.

        Args:
            prompts: B texts.
            negative: what guidance leads away from, one text for all or one each; None for no guidance.
            each: encode every text, as the stock pipeline does, instead of every distinct text once. The last bits of
                an embedding depend on the batch it was made in, so only this is bit-equal to the pipeline.
        """

    @abc.abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's latents for media of that size."""

    @abc.abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Latents ``[N, C, ...]`` -> media float32 in [0, 1]."""

    def decode_conditioned(self, latents: Tensor, cond: Any) -> Tensor:
        """``decode`` of samples with these conditions: some pipelines show the given frames of the media in them."""
        return self.decode(latents)

    conditional_frames: tuple[int, int] = (0, 0)
    """Least and most latent frames that media give to a sample; (0, 0): it is made of a text alone."""

    def count_given(self, clean: int) -> int:
        """Frames of a medium that make so many latent ones."""
        raise NotImplementedError(f"{type(self).__name__} takes no media as conditions")

    def condition(self, cond: Any, media: Sequence[Medium | None]) -> Any:
        """Conditions of B texts, with those of a medium each; None: of the text alone."""
        raise NotImplementedError(f"{type(self).__name__} takes no media as conditions")

    def timestep_from_sigma(self, sigma: Tensor) -> Tensor:
        """Sigma in [0, 1], float32 -> what the transformer takes as ``timestep``, float32.

        Rounded down where the scheduler's own timesteps are whole numbers.
        """
        if self.scheduler.timesteps.is_floating_point():
            return sigma.float() * self.scheduler.config.num_train_timesteps
        return (sigma.double() * self.scheduler.config.num_train_timesteps).floor().float()

    def training_level(self, sigma: Tensor) -> Level:
        """The level at any sigma in [0, 1], float32 ``[]`` or ``[B]``."""
        return Level(self.timestep_from_sigma(sigma), sigma)

    def sampling_scheduler(self) -> Any:
        """A scheduler of its own for each sampling: the one that training uses keeps its state."""
        return type(self.scheduler).from_config(self.scheduler.config)

    def sampling_sigmas(self, num_steps: int, scheduler: Any = None) -> Tensor:
        """Descending sigmas ``[num_steps + 1]`` float32, the last one 0, as the pipeline's scheduler has them."""
        return read_sigmas(scheduler or self.sampling_scheduler(), num_steps)

    def sampling_levels(self, num_steps: int, scheduler: Any = None) -> Level:
        """The ``[num_steps + 1]`` levels of sampling, descending, the last one clean.

        The timesteps are the scheduler's own, unless a class has a ``timestep_from_sigma`` or ``sampling_sigmas`` of
        its own: then they are what these two give.
        """
        scheduler = scheduler or self.sampling_scheduler()
        sigma = self.sampling_sigmas(num_steps, scheduler)
        if self._overrides("timestep_from_sigma") or self._overrides("sampling_sigmas"):
            return self.training_level(sigma)
        t = scheduler.timesteps.detach().to("cpu", torch.float32)
        return Level(torch.cat([t, torch.zeros(1)]), sigma)

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(FlowModel, method)

    def start_state(self, noise: Tensor) -> Tensor:
        """Noise ``[N, ...]`` of ``latent_shape`` -> where sampling starts; packed where a model packs its own."""
        return noise

    def to_media(self, visuals: Tensor) -> Tensor:
        """Media in [0, 1] as ``decode`` gives them -> what rewards get: uint8 ``[N, (T,) H, W, 3]``, CPU."""
        return to_uint8(visuals)

    def check_reward_latents(self, key: str) -> None:
        """Whether `reward_latents` can be asked for, as the setting ``key`` does.

        Raises:
            UserError: the reward service has no VAE for them.
        """
        raise UserError(
            f'{key} = "latents": {type(self).__name__} does not say how its latents become those of the reward '
            'service\'s VAE; set it to "pixels"'
        )

    def reward_latents(self, latents: Tensor) -> Tensor:
        """Clean latents as the reward service decodes them: ``[N, C, T', h, w]`` float16 on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} sends pixels to the reward service")

    def decode_media(self, latents: Tensor, cond: Any) -> tuple[Tensor, Tensor]:
        """``to_media`` of what ``decode_conditioned`` gives, and whether all of its numbers are finite, bool ``[N]``;
        both on the CPU. A few samples at a time: as float32 they take four times as much."""
        at_once = self.count_decoded_at_once(latents)
        if at_once >= len(latents):
            return self._to_host(self.decode_conditioned(latents, cond))
        media: Tensor | None = None
        finite = torch.empty(len(latents), dtype=torch.bool)
        for first in range(0, len(latents), at_once):
            rows = slice(first, min(first + at_once, len(latents)))
            part, finite[rows] = self._to_host(self.decode_conditioned(latents[rows], cond.rows(rows)))
            if media is None:
                media = part.new_empty(len(latents), *part.shape[1:])
            media[rows] = part
        assert media is not None
        return media, finite

    def count_decoded_at_once(self, latents: Tensor) -> int:
        """Samples of one call of the decoder."""
        return len(latents)

    def _to_host(self, visuals: Tensor) -> tuple[Tensor, Tensor]:
        return self.to_media(visuals), are_finite(visuals)

    # ---- velocity ----------------------------------------------------------------------------------------------

    def predict(self, latents: Tensor, timestep: Tensor, cond: Any) -> Tensor:
        """Velocity ``[B, C, ...]`` at the transformer's own ``timestep`` ``[B]``, in the dtype of ``latents``.

        What ``velocity`` is built on; a model that has its own ``velocity`` needs none.
        """
        raise NotImplementedError(f"{type(self).__name__} needs predict, or a velocity of its own")

    def velocity(self, latents: Tensor, level: Level, cond: Cond, *, guidance: float = 1.0) -> Tensor:
        """Predicted ``dx/dsigma``; what rollouts, sampling and the losses of RL call.

        Args:
            latents: ``[B, C, ...]``.
            level: ``[B]``, from ``sampling_levels`` or ``training_level``.
            cond: conditions of the B samples.
            guidance: above 1 mixes ``negative + guidance * (text - negative)``, both in one pass.
        """
        if guidance <= 1.0:
            self.num_evaluations += len(latents)
            return self.predict(latents, level.t, cond)
        if cond.negative is None:
            raise ValueError("guidance above 1 needs conditions of negative prompts")
        both = Cond({k: torch.cat([cond.negative[k], v]) for k, v in cond.text.items()}, shared=cond.shared)
        self.num_evaluations += 2 * len(latents)
        out = self.predict(torch.cat([latents, latents]), torch.cat([level.t, level.t]), both)
        negative, positive = out.chunk(2)
        return negative + guidance * (positive - negative)

    # ---- sampling ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample_latents(
        self, cond: Cond, noise: Tensor, *, num_steps: int, guidance: float, solver: str = "euler"
    ) -> Tensor:
        """Noise ``[N, C, ...]`` -> clean latents with the checkpoint's own sigmas.

        ``solver`` is one of the noise-free ones, or ``stock`` (the pipeline scheduler's own step).
        """
        scheduler = self.sampling_scheduler()
        levels = self.sampling_levels(num_steps, scheduler)
        levels, kernel, step = self._plan_steps(solver, levels, scheduler, noise_level=0.0, deterministic=True)
        cond, noise = cond.to(self.device), noise.to(self.device)
        return self._integrate(cond, self.start_state(noise), levels, kernel, step, guidance).latents

    def sample(
        self,
        prompts: Sequence[str],
        noise: Tensor,
        *,
        num_steps: int,
        guidance: float,
        negative: Negative = "",
        media: Sequence[Medium | None] | None = None,
    ) -> Tensor:
        """Prompts and their start noise ``[N, C, h, w]`` -> images ``[N, 3, H, W]`` in [0, 1] on the device.

        Args:
            negative: what guidance leads away from, one text for all or one each.
            media: what else each is conditioned on; None: on its text alone.
        """
        away = None
        if guidance > 1.0:
            away = negative
        cond = self.encode_prompts(prompts, away, each=True)
        if media is not None:
            cond = self.condition(cond, media)
        with self.eval_mode():
            latents = self.sample_latents(cond, noise, num_steps=num_steps, guidance=guidance)
            return self.decode_conditioned(latents, cond)

    @torch.no_grad()
    def pipeline_with_logprob(
        self,
        *,
        prompt_embeds: Tensor,
        height: int,
        width: int,
        generator: Sequence[torch.Generator],
        num_inference_steps: int = 28,
        guidance_scale: float = 1.0,
        noise_level: float = 0.7,
        deterministic: bool = False,
        solver: str = "flow",
        output_type: str = "pt",
        num_frames: int | None = None,
        prompt_attention_mask: Tensor | None = None,
        pooled_prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None,
        latents: Tensor | None = None,
        keep_trajectory: bool = True,
    ) -> Visuals:
        """One rollout: N conditions -> media and how they came about. Families may bring a sampler of their own.

        Args:
            prompt_embeds, ...: conditions of N samples as ``text_embedding`` gives them; negative ones for
                guidance above 1.
            height, width: size of the media in pixels.
            generator: N generators; each gives its sample's start noise, unless there are ``latents``, and then the
                noise of the steps.
            num_inference_steps: transformer calls per sample.
            guidance_scale: 1 or less switches guidance off.
            solver, noise_level, deterministic: the transition, see ``build_transitions``.
            output_type: ``pt`` for media ``[N, 3, H, W]`` in [0, 1], ``latent`` for the last state.
            num_frames: of videos.
            latents: start noise ``[N, C, ...]``.
            keep_trajectory: return all states; false: only the last one.

        Returns:
            Media; the ``num_inference_steps + 1`` states ``[N, C, ...]``; log-probabilities ``[N]`` of the stochastic
            steps, None without any.
        """
        positives = (prompt_embeds, prompt_attention_mask, pooled_prompt_embeds)
        negatives = (negative_prompt_embeds, negative_prompt_attention_mask, negative_pooled_prompt_embeds)
        return self.rollout(
            Cond(text=_keywords(positives), negative=_keywords(negatives) or None),
            generator,
            latents=latents,
            height=height,
            width=width,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            noise_level=noise_level,
            deterministic=deterministic,
            solver=solver,
            output_type=output_type,
            num_frames=num_frames,
            keep_trajectory=keep_trajectory,
        )

    @torch.no_grad()
    def rollout(
        self,
        cond: Any,
        generator: Sequence[torch.Generator],
        *,
        height: int,
        width: int,
        num_inference_steps: int = 28,
        guidance_scale: float = 1.0,
        noise_level: float = 0.7,
        deterministic: bool = False,
        solver: str = "flow",
        output_type: str = "pt",
        num_frames: int | None = None,
        latents: Tensor | None = None,
        keep_trajectory: bool = True,
        recorder: StepRecorder | None = None,
        churn: Churn = PLAIN_CHURN,
    ) -> Visuals:
        """``pipeline_with_logprob`` for conditions of any form, N samples each, as ``encode_prompts`` makes them.

        ``recorder``: what keeps some of the steps, and says which ones are without noise. ``churn``: more about
        the noise that EDM's solvers add.
        """
        if latents is None:
            shape = self.latent_shape(height, width)
            latents = torch.stack([torch.randn(shape, generator=g) for g in generator])
        start = self.start_state(latents.to(self.device))
        scheduler = self.sampling_scheduler()
        levels = self.sampling_levels(num_inference_steps, scheduler)
        noise: StepNoise = {"noise_level": noise_level, "deterministic": deterministic, "churn": churn}
        levels, kernel, step = self._plan_steps(solver, levels, scheduler, recorder, **noise)
        sampled = self._integrate(
            cond, start, levels, kernel, step, guidance_scale, generator, keep_trajectory=keep_trajectory
        )
        visuals = sampled.latents
        if output_type != "latent":
            visuals = self.decode_conditioned(sampled.latents, cond)
        log_probs = [log_prob for log_prob in sampled.log_probs if log_prob is not None]
        return visuals, list(sampled.trajectory) or [sampled.latents], log_probs or None

    def sde_step_with_logprob(
        self,
        velocity: Tensor,
        latents: Tensor,
        index: int,
        sigmas: Sequence[float],
        *,
        kernel: Kernel,
        history: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One transition and its log-probability ``[N]`` (mean over elements; None without noise).

        A family whose transition is its own overrides this.

        Args:
            velocity, latents: ``[N, C, ...]`` at ``sigmas[index]``.
            sigmas: of the whole run, descending.
            kernel: the configured one, ``(index, sigmas) -> Transition``.
            history: clean prediction of the step before, where ``kernel(index, sigmas).h`` is not 0.
            noise: standard normal like the latents, where ``kernel(index, sigmas).s`` is not 0.
        """
        return step_with_log_prob(kernel(index, sigmas), latents, velocity, history, noise)

    def transitions(self, solver: str, levels: Level, **noise: Unpack[StepNoise]) -> tuple[Level, Kernel]:
        """The transitions of a solver, and the levels of the states between which they are: those of sampling, or
        higher ones where a solver adds noise before its steps."""
        sigmas, kernel = build_transitions(solver, levels.sigma, **noise)
        (changed,) = torch.nonzero(sigmas != levels.sigma, as_tuple=True)
        if len(changed) == 0:
            return levels, kernel
        raised = self.training_level(sigmas[changed].float())
        t = levels.t.to(raised.t.dtype).index_copy(0, changed, raised.t)
        return Level(t, levels.sigma.index_copy(0, changed, raised.sigma)), kernel

    def _plan_steps(
        self,
        solver: str,
        levels: Level,
        scheduler: Any,
        recorder: StepRecorder | None = None,
        **noise: Unpack[StepNoise],
    ) -> tuple[Level, Kernel, StepFn]:
        """`transitions`, and what takes a step: the model's own method, or the scheduler for ``stock``."""
        if solver == STOCK:
            return levels, euler, stock_step(scheduler)
        levels, kernel = self.transitions(solver, levels, **noise)
        if recorder is None:
            return levels, kernel, functools.partial(self.sde_step_with_logprob, kernel=kernel)
        kernel = recorder.restrict(kernel)
        return levels, kernel, recorder.wrap(functools.partial(self.sde_step_with_logprob, kernel=kernel))

    def _integrate(
        self,
        cond: Cond,
        noise: Tensor,
        levels: Level,
        kernel: Kernel,
        step_fn: StepFn,
        guidance: float,
        generators: Sequence[torch.Generator] = (),
        *,
        keep_trajectory: bool = False,
    ) -> Sampled:
        """Noise at the first level -> latents at the last."""
        if cond.element_mask is not None:
            step_fn = hold_given(step_fn, kernel, cond.element_mask.to(noise.device))
        each = (levels.rows(index) for index in range(len(levels.sigma)))

        def velocity(latents: Tensor, _sigma: Tensor) -> Tensor:
            return self.velocity(latents, next(each).expand(len(latents)), cond, guidance=guidance)

        def step_noise(_index: int) -> Tensor:
            return torch.stack([torch.randn(noise.shape[1:], generator=g) for g in generators]).to(noise)

        return run_sampling(
            velocity,
            noise,
            levels.sigma,
            kernel=kernel,
            step_fn=step_fn,
            noise_fn=step_noise,
            keep_trajectory=keep_trajectory,
        )

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        """The transformer in eval mode (no dropout) inside the block."""
        was_training = self.transformer.training
        self.transformer.eval()
        try:
            yield
        finally:
            self.transformer.train(was_training)
            free_gathered(self.transformer)

    # ---- weights -----------------------------------------------------------------------------------------------

    def has_dropout(self) -> bool:
        """Whether the transformer in train mode gives other velocities than in eval mode: dropout of any kind."""
        return any(map(has_active_dropout, self.transformer.modules()))

    @property
    def primary_adapter(self) -> str:
        """Name of the adapter that is trained and exported."""
        assert self.lora_config is not None, "only with policy.lora"
        return self.lora_config.active_adapter

    def trainable_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by their full names in ``transformer``, in a fixed order."""
        return {name: p for name, p in self.transformer.named_parameters() if p.requires_grad}

    def policies(self, **kept: Unpack[Kept]) -> Policies:
        """See ``build_policies``."""
        return build_policies(self.transformer, self.trainable_parameters(), self.lora_config, **kept)

    def set_gradient_sync(self, wanted: bool) -> None:
        """Whether the next backward pass reduces gradients over the ranks: only a step's last micro-batch needs it."""
        for module in self.denoisers.values():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(wanted)


def has_active_dropout(module: torch.nn.Module) -> bool:
    """Whether it is dropout: a module with a probability ``p``, or a number that it hands to its attention and such."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p > 0.0
    return any("drop" in name and isinstance(value, float) and value > 0.0 for name, value in vars(module).items())


def _keywords(values: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {name: v for name, v in zip(TEXT_KEYWORDS.values(), values, strict=True) if v is not None}
