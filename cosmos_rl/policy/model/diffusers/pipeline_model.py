"""A loaded diffusers pipeline whose denoisers are trained: files, placement, adapters, sharding, token counts, the VAE.

What a velocity is, and how prompts become conditions, is left to who derives from it: ``DiffuserModel`` for families
that are written by hand, ``DrivenModel`` for the stock pipeline itself.
"""

import abc
import contextlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from cosmos_rl.data.text_lengths import Named, TextEncoder, describe_truncation
from cosmos_rl.diffusion.schedule import mix
from cosmos_rl.distributed.precision import compute_in_float32
from cosmos_rl.distributed.sharding import Sharding, check_names, find_weight_files, load_shards, materialise
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import DiffusersConfig, LoraConfig, PolicyConfig
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.policy.config.model_rules import switch_problems
from cosmos_rl.policy.model import lora
from cosmos_rl.policy.model.adapter_files import adapter_place
from cosmos_rl.policy.model.base_offload import Place, find_resting, read_resting
from cosmos_rl.policy.model.checkpointing import checkpoint_blocks
from cosmos_rl.policy.model.context_parallel import split_over_peers
from cosmos_rl.policy.model.diffusers.flow_model import FlowModel
from cosmos_rl.policy.model.driver.loading import build_empty, list_denoisers, read_pipeline
from cosmos_rl.policy.model.freezing import apply_patterns
from cosmos_rl.policy.model.placement import Placement
from cosmos_rl.policy.model.quantised import find_packed, quantise_base, read_packed
from cosmos_rl.policy.model.quiet import build_text_encoders, quiet_libraries
from cosmos_rl.utils.logging import logger

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PipelineModel(FlowModel):
    """A diffusers pipeline with its parts as attributes (``transformer``, ``vae``, ``scheduler``, ``text_encoder``, …).

    Attributes:
        pipeline: the stock pipeline object.
        base_folder: local folder of the pipeline's files.
        transformer: the denoiser, the only part that is ever trained; a ``ModuleDict`` of those that are trained where
            the pipeline has several.
        train_sampling_steps: number of noise levels that training draws from.
        timestep_map: ascending scheduler timesteps of training, float32 ``[train_sampling_steps]``.
        media_size: height and width of the media that it works on at the moment.
        sigma_map: the sigmas in [0, 1] of ``timestep_map``.
        text_encoders, tokenizers: lists that a family fills.
        warns_of_cuts: whether to say it once when a prompt is longer than the text encoders take.
    """

    media_size: Sides
    transformer: Any
    vae: Any
    scheduler: Any
    text_encoder: Any
    tokenizer: Any
    text_encoders: list[Any]
    tokenizers: list[Any]
    timestep_map: Tensor
    sigma_map: Tensor

    def __init__(
        self,
        config: DiffusersConfig,
        *,
        model_str: str,
        revision: str | None = None,
        lora_config: LoraConfig | None = None,
        param_dtype: str = "float32",
        device: torch.device | str = "cpu",
        gradient_checkpointing: bool = False,
        activation_offload: bool = False,
        base_offload: bool = False,
        seed: int = 0,
        sharding: Sharding | None = None,
        policy: PolicyConfig | None = None,
        rest_on_cpu: bool = False,
        texts_apart: bool = False,
    ) -> None:
        """Load the pipeline from a local folder or the hub.

        Args:
            config: the ``[policy.diffusers]`` table.
            model_str: folder or hub repository of the pipeline.
            revision: hub revision.
            lora_config: the ``[policy.lora]`` table; None trains the whole transformer.
            param_dtype: dtype of forward and backward, and of a frozen base under LoRA.
            device: where the transformer lives.
            gradient_checkpointing: recompute activations in the backward pass.
            activation_offload: what checkpointing keeps for that waits in host memory.
            base_offload: with ``lora_config``, the frozen weights of the denoisers' blocks rest in host memory.
            seed: seed of fresh adapters.
            sharding: how the transformer is spread over ranks; None keeps it whole on this one.
            policy: the ``[policy]`` table, for its patterns of frozen and trained parameters.
            rest_on_cpu: keep VAE and text encoders off the device between uses, as with ``offload``.
            texts_apart: with ``rest_on_cpu``, this rank's denoisers leave the device while texts are encoded.

        Raises:
            UserError: the pipeline does not fit the configuration.
        """
        self.config, self.media_size = config, config.inference_size
        self.lora_config, self._base_offload = lora_config, base_offload
        self.model_str, self.revision = model_str, revision
        self.device, self.param_dtype = torch.device(device), DTYPES[param_dtype]
        self.pipeline = self._load_pipeline(whole=sharding is None)
        for name, part in self.pipeline.components.items():
            setattr(self, name, part)
        self.init_output_process()
        self.transformer = self._join_denoisers()
        if sharding is None:
            self._require_all_weights()
        self._placement = Placement(self.device, at_rest=config.offload or rest_on_cpu)
        self._texts_apart = texts_apart and not config.offload_text_blocks
        self._freeze_and_place()
        self._prepare_denoisers(sharding, seed, policy or PolicyConfig())
        if gradient_checkpointing:
            checkpoint_blocks(self.denoisers.values(), offload=activation_offload)
        self.train_sampling_steps = int(self.scheduler.config.get("num_train_timesteps", 1000))
        self.text_encoders, self.tokenizers = [], []
        self._encoders_counted: list[TextEncoder] | None = None
        self.warns_of_cuts = True

    def _require_switches(self, kind: type) -> None:
        problems = switch_problems(self.config, kind.__name__, inspect.signature(kind.__call__).parameters)
        if problems:
            raise UserError("\n".join(problems))

    # ---- what a family gives -----------------------------------------------------------------------------------

    @staticmethod
    @abc.abstractmethod
    def supported_model_types() -> list[str]:
        """Pipeline class names (``_class_name`` of ``model_index.json``) that this class serves."""

    @abc.abstractmethod
    def visual_embedding(self, visual_list: list[Tensor], height: int, width: int, device: torch.device) -> Tensor:
        """Images ``[3, H, W]`` (videos ``[3, T, H, W]``) in [-1, 1] -> latents ``[B, C, (T',) h, w]`` float32."""

    @abc.abstractmethod
    def training_sft_step(
        self, clean_latents: Tensor, cond: Any, *, timestep: Tensor, noise: Tensor, sample_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Flow-matching loss of a micro-batch as ``(sum over samples, weight)``.

        Args:
            clean_latents: ``[B, C, ...]``.
            cond: conditions of the B samples.
            timestep: int64 ``[B]``, indices into the training grid.
            noise: like ``clean_latents``.
            sample_weight: ``[B]``, factors on the losses of the samples; given where one is not 1.
        """

    @abc.abstractmethod
    def sample_stock(
        self, pipeline: Any, prompt: str, generator: torch.Generator, *, num_steps: int, guidance: float
    ) -> Tensor:
        """Clean latents ``[1, C, ...]`` by the public call of another pipeline of the same class."""

    def find_trained(self) -> list[str]:
        """Names of the parts in ``base_folder`` that are trained, sorted.

        Raises:
            UserError: the configuration names another one.
        """
        if self.config.trained_denoiser not in ("all", "transformer"):
            raise UserError(
                f'policy.diffusers.trained_denoiser = "{self.config.trained_denoiser}": {self.model_str} has one '
                'denoiser; set it to "all"'
            )
        return ["transformer"]

    def set_scheduler_timestep(self, num_steps: int) -> None:
        """Set the scheduler to the training grid and cache ``timestep_map`` and ``sigma_map``, both ascending."""
        self.scheduler.set_timesteps(num_steps)
        self.timestep_map = self.scheduler.timesteps.flip(0).float()
        self.sigma_map = self.scheduler.sigmas[:num_steps].flip(0).float()

    def add_noise(
        self, clean_latents: Tensor, timestep: Tensor | None = None, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Move latents along the path to noise.

        Args:
            clean_latents: ``[B, C, ...]``.
            timestep: int64 ``[B]``, indices into the ascending training grid; drawn uniformly when not given.
            noise: like ``clean_latents``; drawn when not given.

        Returns:
            ``(noised, noise, timesteps)``; ``timesteps`` are float32 scheduler timesteps ``[B]``.
        """
        if timestep is None:
            timestep = torch.randint(0, len(self.timestep_map), (clean_latents.shape[0],))
        if noise is None:
            noise = torch.randn_like(clean_latents)
        index = timestep.to(self.sigma_map.device)
        sigma = self.sigma_map[index].to(clean_latents.device)
        return mix(clean_latents, noise, sigma), noise, self.timestep_map[index].to(clean_latents.device)

    def sampling_call(self) -> dict[str, Any]:
        """Arguments with which the pipeline's call samples as it was trained."""
        return {"max_sequence_length": self.config.max_prompt_length}

    def build_token_counters(self) -> list[TextEncoder]:
        """What counts the tokens of prompts, for each tokenizer that the family names."""
        if self._encoders_counted is None:
            self._encoders_counted = build_text_encoders(self.tokenizers, self.config.max_prompt_length)
        return self._encoders_counted

    def warn_about_truncation(self, texts: Sequence[Named], noun: str) -> None:
        """One line about the texts that are longer than the text encoders take; later ones are not named."""
        line = describe_truncation(texts, self.build_token_counters(), noun)
        if line:
            logger.warning(line)
            self.warns_of_cuts = False

    # ---- media -------------------------------------------------------------------------------------------------

    def pack_noise(self, noise: Tensor) -> Tensor:
        """Noise ``[N, ...]`` in the layout of ``latent_shape`` -> that of states ``[N, C, ...]``."""
        return self.start_state(noise)

    def encode_visuals(
        self, visuals: Sequence[Tensor], height: int, width: int, *, at_once: int | None = None
    ) -> Tensor:
        """Images in [-1, 1] -> latents float32 on the device (``visual_embedding`` with the VAE in place).

        ``at_once`` bounds how many are encoded in one pass.
        """
        size = at_once or len(visuals)
        keywords = filter_keywords(self.visual_embedding, {"height": height, "width": width, "device": self.device})
        with torch.no_grad(), self.on_device(self.vae):
            chunks = [list(visuals[first : first + size]) for first in range(0, len(visuals), size)]
            return torch.cat([self.visual_embedding(chunk, **keywords) for chunk in chunks])

    def decode_media(self, latents: Tensor, cond: Any) -> tuple[Tensor, Tensor]:
        """See ``FlowModel``; the VAE is moved to the device once for all."""
        with self.on_device(self.vae):
            return super().decode_media(latents, cond)

    # ---- inside ------------------------------------------------------------------------------------------------

    @property
    def _master_dtype(self) -> torch.dtype:
        """Dtype of the transformer's stored weights. What is trained is held in float32, whatever it computes in: a
        half-precision weight would not feel a small step. A frozen base is stored as it computes."""
        if self.lora_config is not None:
            return self.param_dtype
        return torch.float32

    @property
    def _packed_form(self) -> str | None:
        """How the weights of the frozen base are packed; None: not."""
        if self.lora_config is None or self.lora_config.quantize_base == "none":
            return None
        return self.lora_config.quantize_base

    def _load_pipeline(self, *, whole: bool) -> Any:
        """The pipeline from its files; with ``whole`` false its denoisers are shells without memory."""
        from diffusers.pipelines.pipeline_utils import DiffusionPipeline

        local = Path(self.model_str).expanduser()
        if not local.is_dir():
            local = Path(DiffusionPipeline.download(self.model_str, revision=self.revision))
        self.base_folder = local
        if not (local / "transformer").is_dir():
            raise UserError(f"{self.model_str}: the pipeline has no part named transformer to train")
        self._trained = self.find_trained()
        denoisers = dict.fromkeys(list_denoisers(local), self.param_dtype)
        denoisers |= dict.fromkeys(self._trained, self._master_dtype)
        dtypes = {"default": DTYPES[self.config.dtype], "vae": torch.float32, **denoisers}
        given = {} if whole else {name: build_empty(local / name, dtype) for name, dtype in denoisers.items()}
        try:
            with quiet_libraries():
                pipeline = read_pipeline(local, dtypes, **given)
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            raise UserError(
                f"policy.model_name_or_path: the pipeline in {local} cannot be loaded: {str(error).splitlines()[0]}"
            ) from error
        self._require_switches(type(pipeline))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _require_all_weights(self) -> None:
        """Diffusers leaves what is missing without values."""
        for name, module in self.denoisers.items():
            folder = self.base_folder / name
            check_names(folder, set(find_weight_files(folder)), set(module.state_dict()))

    def _join_denoisers(self) -> Any:
        parts = {name: getattr(self.pipeline, name) for name in self._trained}
        if list(parts) == ["transformer"]:
            return parts["transformer"]
        return torch.nn.ModuleDict(parts)

    def _prepare_denoisers(self, sharding: Sharding | None, seed: int, policy: PolicyConfig) -> None:
        """Adapters, sharding and weights, in the order that never holds a whole denoiser in a sharded run."""
        if self.lora_config is None:
            apply_patterns(self.transformer, policy)
        for name in list_denoisers(self.base_folder):  # frozen experts among them
            module = getattr(self.pipeline, name)
            compute_in_float32(module, self.device.type)
            if self.lora_config is not None and name in self._trained:
                lora.add_adapters(module, self.lora_config)
            if sharding is not None:
                self._load_sharded(name, module, sharding)
            elif self._packed_form is not None:
                quantise_base(module, self._packed_form, self.device, resting=self._find_resting(module))
            if self._base_offload:
                self._placement.bring_base_by_block(module)
            self._placement.bring(module)
            if sharding is not None and sharding.cp_group is not None:
                split_over_peers(module, sharding.cp_group)
        if self.lora_config is not None:
            lora.initialise(self.transformer, self.lora_config, seed)
            if self.lora_config.lora_path:
                for name, module in self.denoisers.items():
                    folder = adapter_place(self.lora_config.lora_path, name, self._trained)
                    lora.warm_start(module, self.primary_adapter, folder, convert=self._convert_adapter)

    def _load_sharded(self, name: str, module: Any, sharding: Sharding) -> None:
        """A denoiser without memory, spread over the ranks and filled; weights that are packed, or rest in host memory,
        are whole on each."""
        layers, resting = {}, self._find_resting(module)
        if self._packed_form is not None:
            layers = find_packed(module, self._packed_form)
        whole = [layer.weight for layer in layers.values()]
        whole += [place.weight for tensor, place in resting.items() if tensor not in layers]
        keep_root = name in self._trained  # its backward pass needs it again
        sharding.apply(module, self.param_dtype, keep_root=keep_root, whole=whole)
        materialise(module, self.device, but=whole)
        folder = self.base_folder / name
        load_shards(folder, lora.base_state(module), but={*layers, *resting})
        if self._packed_form is not None:
            read_packed(layers, folder, self._packed_form, self.device, resting=resting)
        read_resting({tensor: place for tensor, place in resting.items() if tensor not in layers}, folder)

    def _find_resting(self, module: Any) -> dict[str, Place]:
        return find_resting(module) if self._base_offload else {}

    def _convert_adapter(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The names of PEFT for the tensors of an adapter's file, by the pipeline's own loader."""
        converted = self.pipeline.lora_state_dict(tensors)
        if isinstance(converted, tuple):
            converted = converted[0]
        return converted

    def load_policy(self, place: str, key: str) -> None:
        """Fill the trained weights from an exported adapter of at most their ranks and layers, or where all weights are
        trained from a pipeline folder: with what is only run.

        Args:
            key: the setting that names ``place``, for messages.

        Raises:
            UserError: it holds other weights.
        """
        for name, module in self.denoisers.items():
            if self.lora_config is not None:
                own = adapter_place(place, name, self._trained)
                lora.warm_start(module, self.primary_adapter, own, key, self._convert_adapter, frozen=True)
                continue
            folder = Path(place).expanduser() / name
            if not folder.is_dir():
                raise UserError(f"{key} = {place!r}: no folder {name} there; without [policy.lora] give a pipeline")
            load_shards(folder, lora.base_state(module))

    def init_output_process(self) -> None:
        """Take the pipeline's processor of decoded samples, ``image_processor`` or ``video_processor``.

        Raises:
            UserError: the pipeline has none, or ``is_video`` asks for the other kind.
        """
        found = [name for name in ("image_processor", "video_processor") if hasattr(self.pipeline, name)]
        if not found:
            raise UserError(f"{type(self.pipeline).__name__} has neither an image_processor nor a video_processor")
        self.output_process = getattr(self.pipeline, found[0])
        is_video = self.makes_videos(found[0])
        if is_video != self.config.is_video:
            kind = "images"
            if is_video:
                kind = "videos"
            raise UserError(
                f"policy.diffusers.is_video = {str(self.config.is_video).lower()}, but {type(self.pipeline).__name__} "
                f"makes {kind}"
            )

    def makes_videos(self, processor: str) -> bool:
        """Whether the pipeline makes videos, by the name of its processor of decoded samples."""
        return processor == "video_processor"

    def _freeze_and_place(self) -> None:
        for name, part in self.pipeline.components.items():
            if isinstance(part, torch.nn.Module):
                part.eval()
                part.requires_grad_(False)
                if name.startswith("text_encoder") and self.config.offload_text_blocks:
                    self._placement.bring_by_block(part)
                elif not name.startswith("transformer"):
                    self._placement.send(part)
                elif self._packed_form is None and not self._base_offload and not next(part.parameters()).is_meta:
                    self._placement.bring(part)

    def _encoders(self) -> list[torch.nn.Module]:
        parts = self.pipeline.components.items()
        return [p for name, p in parts if name.startswith("text_encoder") and isinstance(p, torch.nn.Module)]

    def on_device(self, *parts: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Frozen parts on the device inside the block; with ``policy.diffusers.offload`` they rest on the CPU."""
        return self._placement.on_device(*parts)

    def encoding_texts(self) -> contextlib.AbstractContextManager[None]:
        """Text encoders come to the device inside the block when they are called, and rest after it.

        With ``texts_apart`` the denoisers leave for them, else each encoder for the next one. For encoders that come
        block by block nothing leaves.
        """
        encoders = self._encoders()
        if self._texts_apart:
            return self._placement.in_turns(encoders, self._all_denoisers())
        return self._placement.in_turns(*([encoder] for encoder in encoders))

    def _all_denoisers(self) -> list[torch.nn.Module]:
        """Frozen experts among them."""
        return [getattr(self.pipeline, name) for name in list_denoisers(self.base_folder)]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.param_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.param_dtype)


def filter_keywords(method: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords that an override takes: families differ in what they need, and a user's class may need less."""
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return keywords
    names = {p.name for p in parameters}
    return {k: v for k, v in keywords.items() if k in names}
