"""`[policy]`: which model is trained, and which part of it."""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt

from cosmos_rl.policy.config.base import (
    FloatDtype,
    HalfOpenFraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Table,
)

LoraInit = StrictBool | Annotated[str, Field(pattern=r"^(gaussian|eva|olora|pissa|pissa_niter_[0-9]+)$")]


class LoraConfig(Table):
    """`[policy.lora]`: train low-rank adapters and leave the base weights alone."""

    r: PositiveInt = 8
    """Rank of the adapters."""
    lora_alpha: PositiveFloat = 8.0
    """Adapters are scaled by lora_alpha / r, or by lora_alpha / sqrt(r) with use_rslora."""
    lora_dropout: HalfOpenFraction = 0.0
    """Dropout on the adapters' input while training."""
    lora_names: Annotated[tuple[str, ...], Field(min_length=1)] = ("default",)
    """Adapters to create, all with the same settings."""
    primary_adapter: str | None = None
    """The adapter that is trained; unset: the first of lora_names."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Name endings of the layers that get adapters, or "all-linear"."""
    init_lora_weights: LoraInit = True
    """How adapters start: true (no change of the base model), false, "gaussian", "eva", "olora", "pissa" or
    "pissa_niter_<number>"."""
    lora_path: str | None = None
    """Folder or file of an exported adapter to start from."""
    use_rslora: StrictBool = False
    """Scale by lora_alpha / sqrt(r)."""
    alpha_pattern: dict[str, PositiveFloat] = Field(default_factory=dict)
    """lora_alpha for layers whose name matches the regular expression."""
    r_pattern: dict[str, PositiveInt] = Field(default_factory=dict)
    """r for layers whose name matches the regular expression."""

    @property
    def active_adapter(self) -> str:
        """Name of the adapter that is trained."""
        return self.primary_adapter or self.lora_names[0]


class SampleConfig(Table):
    """`[policy.diffusers.sample]`: how pictures are sampled."""

    num_steps: PositiveInt = 40
    """Sampling steps."""
    eval_num_steps: PositiveInt | None = None
    """Sampling steps for validation; unset: num_steps."""
    guidance_scale: NonNegativeFloat = 4.5
    """Classifier-free guidance; 1 or less switches it off."""


class DiffusersConfig(Table):
    """`[policy.diffusers]`: settings of diffusion and flow pipelines."""

    dtype: FloatDtype = "float32"
    """Type in which the transformer's weights are held and trained, and type of the text encoders."""
    is_video: StrictBool = False
    """Train on videos in place of pictures."""
    max_prompt_length: PositiveInt = 300
    """Longest prompt in tokens."""
    weighting_scheme: Literal["logit_normal", "none"] = "logit_normal"
    """Density of the training timesteps; "none" is uniform."""
    logit_mean: StrictFloat = 0.0
    """Mean of the logit-normal density."""
    logit_std: PositiveFloat = 1.0
    """Standard deviation of the logit-normal density."""
    offload: StrictBool = True
    """Keep VAE and text encoders on the CPU between uses."""
    inference_size: tuple[PositiveInt, PositiveInt] = (1024, 1024)
    """[height, width] of training and validation pictures, in pixels."""
    sample: SampleConfig = SampleConfig()
    """How pictures are sampled."""


class ParallelismConfig(Table):
    """`[policy.parallelism]`: how the ranks share the work."""

    n_init_replicas: PositiveInt = 1
    """Replicas of the whole set of ranks."""
    tp_size: PositiveInt = 1
    """Tensor parallel ranks."""
    cp_size: PositiveInt = 1
    """Context parallel ranks."""
    ep_size: PositiveInt = 1
    """Expert parallel ranks."""
    pp_size: PositiveInt = 1
    """Pipeline parallel ranks."""
    dp_shard_size: Annotated[StrictInt, Field(ge=-1)] = 1
    """Ranks over which parameters are sharded; -1: all that are left."""
    dp_replicate_size: PositiveInt = 1
    """Replicas of the sharded group."""


class PolicyConfig(Table):
    """`[policy]`: the model that is trained."""

    model_name_or_path: str = ""
    """Folder or hub name of the pipeline; required for a run."""
    model_revision: str | None = None
    """Branch, tag or commit on the hub."""
    is_diffusers: StrictBool = False
    """The model is a diffusers pipeline."""
    model_gradient_checkpointing: StrictBool = True
    """Recompute activations in the backward pass to save memory."""
    lora: LoraConfig | None = None
    """Train adapters; without this table all weights of the transformer are trained."""
    diffusers: DiffusersConfig = DiffusersConfig()
    """Settings of diffusion and flow pipelines."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """How the ranks share the work."""
