"""`[policy]`: which model is trained, which part of it, and over how many ranks."""

import math
import re
from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt

from cosmos_rl.policy.config.base import (
    Description,
    FilledText,
    FloatDtype,
    ForRl,
    ForVideo,
    ForVlm,
    HalfOpenFraction,
    NoEffect,
    NonNegativeFloat,
    NonNegativeInt,
    Pattern,
    Planned,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Table,
)
from cosmos_rl.policy.config.buckets import Sides, generate_sizes

LoraInit = Annotated[
    StrictBool | Annotated[str, Field(pattern=r"^(gaussian|eva|olora|pissa|pissa_niter_[0-9]+)$")],
    Description('true, false, "gaussian", "eva", "olora", "pissa" or "pissa_niter_<number>"'),
]
Quantisation = Literal["none", "int8", "nf4"]
Solver = Literal["flow", "flow_linear", "euler", "dance", "ddim", "cps", "dpm1", "dpm2", "1euler", "2ab"]


class LoraConfig(Table):
    """`[policy.lora]`: train low-rank adapters and leave the base weights alone."""

    r: PositiveInt = 8
    """Rank of the adapters."""
    lora_alpha: PositiveFloat = 8.0
    """Adapters are scaled by lora_alpha / r, or by lora_alpha / sqrt(r) with use_rslora."""
    lora_dropout: HalfOpenFraction = 0.0
    """Dropout on the adapters' input while training."""
    lora_names: Annotated[tuple[str, ...], Field(min_length=1)] = ("default",)
    """Adapters to create, all with the same settings. DiffusionNFT needs "default" and "old"."""
    primary_adapter: FilledText | None = None
    """The adapter that is trained; unset: the first of lora_names."""
    target_modules: Annotated[
        Literal["all-linear"] | tuple[str, ...], Description('a list of name endings of layers, or "all-linear"')
    ] = "all-linear"
    """Name endings of the layers that get adapters, or "all-linear"."""
    init_lora_weights: LoraInit = True
    """How adapters start: true (no change of the base model), false, "gaussian", "eva", "olora", "pissa" or
    "pissa_niter_<number>"."""
    lora_path: FilledText | None = None
    """Folder or file of an exported adapter to start from."""
    quantize_base: Quantisation = "none"
    """How the frozen base is held: "none" in train.param_dtype, "int8" the linear layers of its blocks in 8 bits, "nf4"
    in 4 bits (NF4). Both need torchao, and are whole on every rank."""
    use_rslora: StrictBool = False
    """Scale by lora_alpha / sqrt(r)."""
    alpha_pattern: dict[str, PositiveFloat] = Field(default_factory=dict)
    """lora_alpha for layers whose name matches the regular expression."""
    r_pattern: dict[str, PositiveInt] = Field(default_factory=dict)
    """r for layers whose name matches the regular expression."""
    modules_to_save: Planned[tuple[str, ...] | None] = None
    """Layers trained as a whole, in addition to the adapters."""

    @property
    def active_adapter(self) -> str:
        """Name of the adapter that is trained."""
        return self.primary_adapter or self.lora_names[0]

    @property
    def starts_as_base(self) -> bool:
        """Whether the adapter changes nothing at the start: it is fresh, with one of its two matrices zero."""
        return not self.lora_path and self.init_lora_weights is not False


class SampleConfig(Table):
    """`[policy.diffusers.sample]`: how images and videos are sampled."""

    num_steps: PositiveInt = 40
    """Sampling steps, in rollouts and in validation."""
    eval_num_steps: PositiveInt | None = None
    """Sampling steps for validation; unset: num_steps."""
    guidance_scale: NonNegativeFloat = 4.5
    """Classifier-free guidance; 1 or less switches it off."""
    solver: ForRl[Solver] = "dpm2"
    """Sampler of rollouts; "euler" is "flow" without noise."""
    deterministic_sampling: ForRl[StrictBool] = False
    """Sample without noise between the steps; "dpm1", "dpm2" and "euler" need it, "dance" cannot have it."""
    noise_level: ForRl[NonNegativeFloat] = 1.0
    """Strength of the noise between the steps; at most 1 with "ddim" and "cps", the churn of "1euler" and "2ab"."""
    noise_scale: ForRl[PositiveFloat] = 1.0
    """Factor of the noise that "1euler" and "2ab" add; 1.0 with other solvers."""
    noise_above: ForRl[NonNegativeFloat] = 0.0
    """"1euler" and "2ab" add noise only above this level of EDM, sigma / (1 - sigma) of a flow's; 0.0 with others."""
    noise_below: ForRl[PositiveFloat | None] = None
    """"1euler" and "2ab" add noise only below this level of EDM; unset: at all levels."""
    same_initial_noise: ForRl[StrictBool] = False
    """The samples of a prompt start from one noise, and differ by that between the steps."""
    global_std: ForRl[StrictBool] = True
    """Divide advantages by the standard deviation of all rewards of a step; false: by that of the prompt's own."""


class TokenizerConfig(Table):
    """`[policy.diffusers.tokenizer]`: the Wan2.1 VAE that packs videos for the reward service."""

    chunk_duration: PositiveInt = 81
    """Frames encoded at once."""
    load_mean_std: StrictBool = False
    """Normalise by the stored mean and standard deviation."""
    compile_encode: StrictBool = False
    """Compile the encoder."""
    temporal_window: PositiveInt = 16
    """Frames of the encoder's window."""


class BucketsConfig(Table):
    """`[policy.diffusers.buckets]`: several sizes to train at. An image or a video goes to the one of the nearest
    aspect ratio, and a step of reinforcement learning draws one, where prompts do not name it by `size`; a step has one
    size. Either sizes or area."""

    sizes: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    """[height, width] of each, in pixels."""
    area: PositiveInt | None = None
    """Most pixels of a size: makes the list of all sizes of about this area, by step and max_ratio."""
    step: PositiveInt = 64
    """Sides of these sizes are multiples of it."""
    max_ratio: Annotated[StrictFloat, Field(ge=1)] = 2.0
    """Of these sizes the longer side is at most this many times the shorter one."""

    @property
    def listed(self) -> tuple[Sides, ...]:
        """All sizes, (height, width); empty: none fits."""
        if self.area is None:
            return self.sizes
        return generate_sizes(self.area, self.step, self.max_ratio)


class DiffusersConfig(Table):
    """`[policy.diffusers]`: settings of diffusion and flow pipelines."""

    dtype: FloatDtype = "float32"
    """Type of the text encoders. Trained weights are held in float32, a frozen base in train.param_dtype, the VAE in
    float32."""
    is_video: StrictBool = False
    """Train on videos in place of images."""
    max_prompt_length: PositiveInt = 300
    """Longest prompt in tokens, for T5 and its like; CLIP always takes 77. Exports hold it: use it at inference too."""
    prompt_instruction: StrictBool = True
    """SANA: the pipeline's own instruction stands in front of every prompt, as in its stock call; false: none does."""
    resolution_binning: StrictBool = False
    """SANA, PRX: sizes are those of the pipeline's own list, as by default in its stock call; false: any size."""
    weighting_scheme: Literal["logit_normal", "mode", "sigma_sqrt", "cosmap", "none"] = "logit_normal"
    """Density of the training timesteps; "none" is uniform."""
    logit_mean: StrictFloat = 0.0
    """Mean of the logit-normal density."""
    logit_std: PositiveFloat = 1.0
    """Standard deviation of the logit-normal density."""
    mode_scale: StrictFloat = 1.29
    """Scale of the "mode" density: more than 0 favours the middle, less than 0 the ends."""
    train_flow_shift: NoEffect[StrictFloat] = 3.0
    """The shift of the pipeline's own scheduler applies."""
    offload: StrictBool = True
    """Keep VAE and text encoders on the CPU between uses."""
    offload_text_blocks: StrictBool = False
    """Never hold a whole text encoder on the device: each block of it comes from the CPU for its call, and leaves after
    it. The conditions are the same, and take longer."""
    inference_size: tuple[PositiveInt, PositiveInt] = (1024, 1024)
    """[height, width] of training, validation and rollout images, in pixels. With buckets: of those of validation."""
    buckets: BucketsConfig | None = None
    """Train at several sizes in place of inference_size."""
    train_frames: ForVideo[PositiveInt] = 41
    """Frames of a training video and of a rollout: for most models a multiple of 4, plus 1."""
    inference_frames: ForVideo[PositiveInt] = 41
    """Frames of a validation video; must be train_frames today."""
    conditional_frames: ForVideo[tuple[NonNegativeInt, NonNegativeInt] | None] = None
    """[least, most] latent frames of a video that are given and not generated: 0 from text, 1 from an image, 2 from a
    video. SFT takes them from the clip, RL and validation from the prompt's "image" or "video". Unset: the least that
    the model can do."""
    timesteps_fraction: ForRl[PositiveFraction] = 1.0
    """Share of the sample.num_steps sampling steps that are trained, rounded down."""
    even_levels: ForRl[StrictBool] = False
    """Trainers on finished samples: a sample's trained noise levels are far apart, and each level is as frequent in an
    optimiser step; false: those of each sample are drawn by themselves."""
    nft_beta: ForRl[PositiveFloat] = 1.0
    """How far DiffusionNFT's implicit policies lie from the old one."""
    weight_copy_decay_type: ForRl[Literal[0, 1, 2]] = 0
    """How slowly the old policy follows: 0 copies, 1 and 2 are schedules of DiffusionNFT."""
    trained_denoiser: Literal["all", "transformer", "transformer_2"] = "all"
    """Of a pipeline with two (Wan 2.2 14B: transformer for high noise, transformer_2 for low noise), which to train."""
    sample: SampleConfig = SampleConfig()
    """How images and videos are sampled."""
    tokenizer: Planned[TokenizerConfig] = TokenizerConfig()
    """The VAE that packs videos for the reward service."""

    @property
    def training_sizes(self) -> tuple[Sides, ...]:
        """(height, width) of all media that are trained on."""
        if self.buckets is None:
            return (self.inference_size,)
        return self.buckets.listed

    @property
    def largest_size(self) -> Sides:
        """The one with most pixels, which memory and time are estimated for."""
        return max(self.training_sizes, key=math.prod)

    @property
    def trained_levels(self) -> int:
        """Sampling steps that are trained. As decimal numbers: 0.58 of 50 are 29, although floats make 28.99… of it."""
        return math.floor(round(self.sample.num_steps * self.timesteps_fraction, 9))


class ParallelismConfig(Table):
    """`[policy.parallelism]` and `[rollout.parallelism]`: how the ranks share the work."""

    n_init_replicas: Planned[PositiveInt] = 1
    """Replicas of the whole set of ranks."""
    tp_size: Planned[PositiveInt] = 1
    """Tensor parallel ranks."""
    cp_size: PositiveInt = 1
    """Context parallel ranks: so many share each sample, with a part of its tokens each in the transformer."""
    ep_size: Planned[PositiveInt] = 1
    """Expert parallel ranks."""
    pp_size: Planned[PositiveInt] = 1
    """Pipeline parallel ranks."""
    dp_shard_size: Annotated[StrictInt, Field(ge=-1)] = 1
    """Ranks over which parameters are sharded, and over the cp_size ranks of each; -1: all that are left. Each has its
    own samples."""
    dp_replicate_size: PositiveInt = 1
    """Replicas of the sharded group."""
    pp_dynamic_shape: NoEffect[StrictBool] = False
    """Pipeline stages exchange tensors of any shape."""
    pp_micro_batch_size: NoEffect[PositiveInt] = 1
    """Samples per pipeline micro-batch."""
    pp_schedule: NoEffect[str] = "Interleaved1F1B"
    """Order of the pipeline's work."""
    pp_layers_per_stage: NoEffect[PositiveInt] = 2
    """Layers of one pipeline stage."""
    cp_rotate_method: NoEffect[str] = "allgather"
    """How context parallel ranks exchange keys and values."""


class PolicyConfig(Table):
    """`[policy]`: the model that is trained."""

    model_name_or_path: str = ""
    """Folder or hub name of the pipeline, or a .safetensors file of its transformer; required for a run."""
    single_file_base: FilledText | None = None
    """Of a .safetensors file: folder or hub name of the pipeline that has the other parts. Unset: the published one,
    where only one has the file's names of tensors."""
    single_file_low_noise: FilledText | None = None
    """Of a pipeline with two experts (Wan 2.2): the .safetensors file of the low-noise one, where
    `policy.model_name_or_path` is that of the high-noise one. Unset: the low-noise expert of the base."""
    model_revision: FilledText | None = None
    """Branch, tag or commit on the hub."""
    model_safetensor_path: ForVlm[str | None] = None
    """Folder of the weights, when they are not with the model."""
    model_max_length: ForVlm[PositiveInt] = 4096
    """Longest sample in tokens."""
    is_diffusers: StrictBool = False
    """The model is a diffusers pipeline. false (vision-language models) is not supported yet."""
    model_gradient_checkpointing: StrictBool = True
    """Recompute activations in the backward pass to save memory."""
    freeze_pattern: tuple[Pattern, ...] | None = None
    """Transformer parameters with a name that one of these regular expressions finds are not trained."""
    trainable_pattern: Annotated[tuple[Pattern, ...], Field(min_length=1)] | None = None
    """Only transformer parameters with a name that one of these regular expressions finds are trained."""
    trainable_map: dict[Pattern, StrictBool] | None = None
    """Whether transformer parameters with a matching name are trained; the last match counts, others are trained."""
    enable_liger_kernel: NoEffect[StrictBool] = False
    """Liger kernels of language models."""
    enable_liger_cross_entropy: NoEffect[StrictBool] = False
    """Liger's cross entropy."""
    enable_liger_fused_cross_entropy: NoEffect[StrictBool] = False
    """Liger's fused cross entropy."""
    aux_loss_coeff: NoEffect[StrictFloat] = 0.0
    """Weight of the balance loss of expert models."""
    lora: LoraConfig | None = None
    """Train adapters; without this table all weights of the transformer are trained."""
    diffusers: DiffusersConfig = DiffusersConfig()
    """Settings of diffusion and flow pipelines."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """How the ranks share the work."""

    def is_trained(self, name: str) -> bool:
        """Whether the patterns leave the parameter `name` trained; in trainable_map the last match counts."""
        if self.freeze_pattern:
            return not any(re.search(pattern, name) for pattern in self.freeze_pattern)
        if self.trainable_pattern:
            return any(re.search(pattern, name) for pattern in self.trainable_pattern)
        matches = [trained for pattern, trained in (self.trainable_map or {}).items() if re.search(pattern, name)]
        return matches[-1] if matches else True
