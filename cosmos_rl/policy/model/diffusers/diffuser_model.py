"""The base of families that are written by hand: prompts to embeddings, and the inputs of the transformer.

A family gives ``text_embedding`` and ``visual_embedding``, and where its scheduler or its transformer differ from
flow matching in the SD3 manner, ``set_scheduler_timestep``, ``add_noise`` and ``timestep_from_sigma``. Everything else
(``velocity``, the SFT step, sampling) is built from these.
"""

import abc
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_matching import combine_weights, flow_matching_loss
from cosmos_rl.data.text_lengths import find_refusal
from cosmos_rl.data.texts import printable
from cosmos_rl.diffusion.schedule import loss_weight
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.plan import DECODED_PIXELS
from cosmos_rl.policy.model.diffusers.cond import Cond, Negative, negatives
from cosmos_rl.policy.model.diffusers.flow_model import TEXT_KEYWORDS
from cosmos_rl.policy.model.diffusers.pipeline_model import PipelineModel, filter_keywords
from cosmos_rl.policy.model.quiet import quiet_warnings


class DiffuserModel(PipelineModel):
    """A family whose conditions and transformer calls are written out; what a user's own class derives from."""

    _known_further: frozenset[str] = frozenset()
    """Keywords beyond the usual three that ``text_embedding`` gave so far."""
    _shared: frozenset[str] = frozenset()
    """Those of them that have no row for each prompt."""

    # ---- what a family gives -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def text_embedding(self, prompt_list: list[str], device: torch.device, **kwargs: Any) -> dict[str, Any]:
        """Prompts -> keyword arguments of the transformer's forward, each ``[B, ...]`` (None entries are dropped).

        Of keywords beyond the usual three a tensor may be without a batch axis, and a value a constant: all samples
        share it, and it reaches the transformer as it is.

        ``max_sequence_length`` arrives as a keyword. Negative embeddings: call it with the negative prompts.
        """

    def nft_prepare_transformer_input(
        self,
        latents: Tensor,
        prompt_embeds: Tensor,
        prompt_attention_mask: Tensor | None,
        pooled_prompt_embeds: Tensor | None,
        timestep: Tensor,
        num_frames: int,
        height: int,
        width: int,
    ) -> dict[str, Any]:
        """Keyword arguments of one call of the transformer, for every forward pass: training, rollout and loss.

        Args:
            latents: ``[B, C, ...]``.
            prompt_embeds, prompt_attention_mask, pooled_prompt_embeds: what ``text_embedding`` gave under
                ``encoder_hidden_states``, ``encoder_attention_mask`` and ``pooled_projections``.
            timestep: ``[B]`` float32, from ``timestep_from_sigma``.
            num_frames, height, width: of the media, in pixels.
        """
        text = zip(TEXT_KEYWORDS.values(), (prompt_embeds, prompt_attention_mask, pooled_prompt_embeds), strict=True)
        given = {keyword: value for keyword, value in text if value is not None}
        return {"hidden_states": latents, "timestep": timestep, **given, "return_dict": False}

    def transformer_input(self, latents: Tensor, timestep: Tensor, text: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of one call of the transformer: those of ``nft_prepare_transformer_input``, and of ``text``
        what that is not given, under its own keyword.

        Args:
            latents, timestep: as there.
            text: what ``text_embedding`` gave, for these B samples.
        """
        usual = TEXT_KEYWORDS.values()
        further = {keyword: value for keyword, value in text.items() if keyword not in usual}
        height, width = self.media_size
        prepared = self.nft_prepare_transformer_input(
            latents,
            **{name: text.get(keyword) for name, keyword in TEXT_KEYWORDS.items()},  # pyright: ignore[reportArgumentType]
            timestep=timestep,
            num_frames=self.config.train_frames if self.config.is_video else 1,
            height=height,
            width=width,
        )
        return {**further, **prepared}

    def decode(self, latents: Tensor) -> Tensor:
        """Latents ``[N, C, h, w]`` -> images ``[N, 3, H, W]`` float32 in [0, 1]."""
        scale = self.vae.config.scaling_factor
        shift = getattr(self.vae.config, "shift_factor", None) or 0.0
        parts = (latents.to(self.vae.dtype) / scale + shift).split(self.count_decoded_at_once(latents))
        with torch.no_grad(), self.on_device(self.vae):
            images = torch.cat([self.vae.decode(part, return_dict=False)[0] for part in parts])
        images = images.masked_fill_(images.isinf(), torch.nan)  # else its pixel would be a plain white or black
        return self.output_process.postprocess(images, output_type="pt").float()

    def count_decoded_at_once(self, latents: Tensor) -> int:
        """See ``FlowModel``."""
        return max(DECODED_PIXELS // (latents[0, 0].numel() * self.pipeline.vae_scale_factor**2), 1)

    # ---- conditions and velocity -------------------------------------------------------------------------------

    def encode_prompts(self, prompts: Sequence[str], negative: Negative = None, *, each: bool = False) -> Cond:
        """See ``FlowModel``."""
        with torch.no_grad(), self.encoding_texts():
            text, shared = self._encode(list(prompts), each)
            away = negatives(negative, len(prompts))
            return Cond(text, None if away is None else self._encode(away, each)[0], shared=shared)

    def predict(self, latents: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
        """One call of the transformer at its own ``timestep``; the result has the dtype of ``latents``."""
        inputs = self.transformer_input(latents, timestep.to(latents.device), {**cond.text, **cond.shared})
        with self._autocast():
            return self.transformer(**inputs)[0].to(latents.dtype)

    def training_sft_step(
        self,
        clean_latents: Tensor,
        cond: Cond,
        *,
        timestep: Tensor,
        noise: Tensor,
        sample_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Flow-matching loss of a micro-batch, see ``PipelineModel``."""
        noised, noise, timesteps = self.add_noise(clean_latents, timestep=timestep, noise=noise)
        self.num_evaluations += len(clean_latents)
        velocity = self.predict(noised, timesteps, cond)
        sigma = timesteps.float().to(clean_latents.device) / self.scheduler.config.num_train_timesteps
        weight = combine_weights(loss_weight(sigma, self.config.weighting_scheme), sample_weight)
        return flow_matching_loss(velocity, clean_latents, noise, element_mask=cond.element_mask, weight_B=weight)

    # ---- sampling ----------------------------------------------------------------------------------------------

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's latents for an image of that size."""
        factor = self.pipeline.vae_scale_factor
        return (self.transformer.config.in_channels, height // factor, width // factor)

    def sample_stock(
        self, pipeline: Any, prompt: str, generator: torch.Generator, *, num_steps: int, guidance: float
    ) -> Tensor:
        """See ``PipelineModel``."""
        height, width = self.media_size
        return pipeline(
            prompt,
            height=height,
            width=width,
            num_inference_steps=num_steps,
            guidance_scale=guidance,
            max_sequence_length=self.config.max_prompt_length,
            generator=[generator],
            output_type="latent",
        ).images

    # ---- inside ------------------------------------------------------------------------------------------------

    def _encode(self, prompts: list[str], each: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Keyword -> what has a row for each prompt, and what all share."""
        distinct = prompts
        if not each:
            distinct = list(dict.fromkeys(prompts))
        if self.warns_of_cuts:
            self.warn_about_truncation(
                [(repr(printable(prompt[:40])), prompt) for prompt in distinct], "prompts (so far)"
            )
        try:
            encoded = self._embed(distinct)
        except Exception:
            self._check_readable(distinct)
            raise
        names = self._find_shared(encoded, distinct)
        shared = {k: v for k, v in encoded.items() if k in names}
        compute = self.param_dtype
        rows = {k: v.to(compute) if v.is_floating_point() else v for k, v in encoded.items() if k not in names}
        if len(distinct) == len(prompts):
            return rows, shared
        which = torch.tensor([distinct.index(prompt) for prompt in prompts], device=self.device)
        return {k: v[which] for k, v in rows.items()}, shared

    def _embed(self, prompts: list[str]) -> dict[str, Any]:
        keywords = {"device": self.device, "max_sequence_length": self.config.max_prompt_length}
        with quiet_warnings():
            encoded = self.text_embedding(prompts, **filter_keywords(self.text_embedding, keywords))
        return {keyword: value for keyword, value in encoded.items() if value is not None}

    def _find_shared(self, encoded: Mapping[str, Any], prompts: list[str]) -> frozenset[str]:
        """The keywords beyond the usual three whose values have no row for each prompt.

        The first time, one prompt more is encoded: a tensor of L rows for any prompts would look like one of L prompts.

        Raises:
            UserError: a value is neither such a tensor nor a constant.
        """
        further = encoded.keys() - set(TEXT_KEYWORDS.values())
        if not further <= self._known_further:
            more = self._embed([*prompts, prompts[-1]])
            by_rows = {
                k for k in further if _has_rows(encoded[k], len(prompts)) and _has_rows(more[k], len(prompts) + 1)
            }
            for keyword in sorted(further - by_rows):
                self._require_constant(keyword, encoded[keyword], more[keyword])
            self._known_further, self._shared = frozenset(further), frozenset(further - by_rows)
        return self._shared

    def _require_constant(self, keyword: str, value: Any, other: Any) -> None:
        what = f"{type(self).__name__}.text_embedding: {keyword}"
        if isinstance(value, Tensor):
            if not isinstance(other, Tensor) or value.shape != other.shape:
                raise UserError(f"{what} changes its shape with the number of prompts, but not that of its first axis")
            return
        with contextlib.suppress(TypeError, ValueError):
            if json.loads(json.dumps(value)) == value:
                return
        raise UserError(
            f"{what} is {type(value).__name__}, neither a tensor nor a constant of numbers, texts, lists and tables; "
            "give each tensor under a keyword of its own, and put them together in transformer_input"
        )

    def _check_readable(self, prompts: Sequence[str]) -> None:
        """Raise `UserError` for the first prompt that a tokenizer does not take."""
        for prompt in prompts:
            why = find_refusal(prompt, self.build_token_counters())
            if why is not None:
                raise UserError(f"prompt {printable(prompt[:80])!r}: {why}")


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == count
