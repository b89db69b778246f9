"""`[train.train_policy]`: what is trained on what; supervised fine-tuning or reinforcement learning by `type`."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt

from cosmos_rl.policy.config.base import (
    AnyTable,
    FilledText,
    ForDpo,
    ForRl,
    ForVlm,
    Fraction,
    NoEffect,
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    Planned,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    RewardFunction,
    Table,
)
from cosmos_rl.policy.config.dpo import AutoBetaConfig
from cosmos_rl.policy.config.prompt_sets import PromptSetConfig
from cosmos_rl.policy.config.reward import FunctionName, LocalRewardConfig, RemoteRewardConfig
from cosmos_rl.policy.config.steps import StepsConfig

Preset = Literal[
    "flow_grpo",
    "flow_grpo_fast",
    "flow_grpo_fast_sde",
    "flow_cps",
    "grpo_guard",
    "flow_dppo",
    "flow_dppo_cps",
    "dance_grpo",
    "mix_grpo",
    "ddrl",
]
"""Names of `presets.PRESETS`."""


class FolderConfig(Table):
    """`[[train.train_policy.dataset.folders]]`: one of several folders of captioned images or videos."""

    local_dir: str
    """Folder of pairs, or of tars of them."""
    repeats: PositiveInt = 1
    """How often an epoch takes each of its samples."""
    weight: PositiveFloat = 1.0
    """Factor on the loss of its samples, as the prior loss weight of a regularisation folder in other trainers; the
    mean is over the number of samples, whatever their weights."""
    flip: StrictBool = False
    """Mirror each draw of a sample left to right or not, at random; captions stay."""


class DatasetConfig(Table):
    """`[train.train_policy.dataset]`: where the training data is."""

    local_dir: str = ""
    """Folder of pairs: `x.json` next to `x.jpg`, `x.jpeg`, `x.png` or `x.webp`; or of tars of them. Reinforcement
    learning: a file of prompts (`.txt`, `.jsonl`, `.json`, `.tsv`), a folder with one for each split, or the folders
    `metas` and `videos`, whose captions are the prompts. Preference optimisation: a folder of pairs, the chosen ones,
    or a `.jsonl` file with `prompt`, `chosen` and `rejected`."""
    folders: tuple[FolderConfig, ...] = ()
    """Several folders in place of local_dir, for supervised fine-tuning."""
    flip: StrictBool = False
    """Of local_dir in supervised fine-tuning: mirror each draw of a sample left to right or not, at random."""
    rejected_dir: ForDpo[str] = ""
    """Folder of the rejected images or videos, under the names of the chosen ones; none for a `.jsonl` file."""
    test_size: PositiveInt | OpenFraction | None = None
    """Training samples held out for validation when validation.dataset names none: a number, or with a decimal point
    a share."""
    name: ForRl[str] = ""
    """Named prompt set: one that `cosmos-rl prompts` lists, such as pickscore, ocr, geneval or dance_grpo_t2v; or mock:
    images of noise, to try a setup."""
    subset: Planned[str | None] = None
    """Subset of the data set on the hub."""
    revision: Planned[str | None] = None
    """Branch, tag or commit of the data set on the hub."""
    split: ForRl[str | Annotated[tuple[str, ...], Field(min_length=1)]] = ""
    """Split of the prompt set, of several the first; unset: "train", for validation "test"."""
    sets: ForRl[tuple[PromptSetConfig, ...]] = ()
    """Several prompt sets in place of name and local_dir, for reinforcement learning."""
    mix: ForRl[Literal["prompts", "steps"]] = "prompts"
    """What sets share by their weights: the prompts of each step, or whole steps, each with prompts of one set."""

    @property
    def first_split(self) -> str:
        """The split that is read; empty: the usual one."""
        splits = (self.split,) if isinstance(self.split, str) else self.split
        return next(iter(splits), "")

    @property
    def listed(self) -> tuple[FolderConfig, ...]:
        """The folders of supervised fine-tuning; empty: none is named."""
        if self.folders or not self.local_dir:
            return self.folders
        return (FolderConfig(local_dir=self.local_dir, flip=self.flip),)


class ValidationDatasetConfig(DatasetConfig):
    """`[validation.dataset]`: where the validation data is."""

    local_dir: str = ""
    """Folder of pairs as for training, or a file of prompts (`.txt`, `.jsonl`, `.json`, `.tsv`); reinforcement
    learning: as for training. Rows may have `negative_prompt` and `seed`."""
    limit: PositiveInt | None = None
    """Take so many of the prompts or pairs: the first ones, unless they are spread."""
    spread: StrictBool = False
    """Take them at even distances over the whole list."""
    test_size: NoEffect[PositiveInt | OpenFraction | None] = None
    """Counts in train.train_policy.dataset."""
    folders: NoEffect[tuple[FolderConfig, ...]] = ()
    """Counts in train.train_policy.dataset."""
    flip: NoEffect[StrictBool] = False
    """Counts in train.train_policy.dataset."""
    sets: NoEffect[tuple[PromptSetConfig, ...]] = ()
    """Counts in train.train_policy.dataset."""
    mix: NoEffect[Literal["prompts", "steps"]] = "prompts"
    """Counts in train.train_policy.dataset."""


class CacheConfig(Table):
    """`[train.train_policy.cache]`: what the frozen encoders give, kept on disk so that it is computed once."""

    latents: StrictBool = False
    """Keep the VAE's latents of the training images."""
    text: StrictBool = False
    """Keep the text encoders' output for the training prompts."""
    dir: FilledText | None = None
    """Folder, which runs may share; unset: $COSMOS_CACHE, and without that the folder `cache` in train.output_dir."""
    max_gb: PositiveFloat = 50.0
    """When the folder is larger, the entries that were not used for longest are deleted."""


class TrainPolicyConfig(Table):
    """What supervised fine-tuning and reinforcement learning have in common."""

    dataset: DatasetConfig = DatasetConfig()
    """Where the training data is."""
    mini_batch: PositiveInt = 1
    """Samples per forward pass; must divide the batch of one rank."""
    dataloader_shuffle: StrictBool = True
    """Take the samples in a new random order each epoch."""
    dataloader_seed: NonNegativeInt = 0
    """Seed of that order."""
    dataloader_num_workers: NonNegativeInt = 0
    """Processes that read data ahead; 0 reads in the training process."""
    dataloader_prefetch_factor: PositiveInt | None = None
    """Batches that each of these processes reads ahead; unset: 2."""
    dataloader_drop_last: StrictBool = True
    """Leave out the last, smaller batch of an epoch."""
    caption_dropout: Fraction = 0.0
    """Share of samples that are trained with an empty prompt."""
    max_skipped_frac: Fraction = 0.05
    """Share of the samples that may be unreadable; each is named and left out. One always may, unless this is 0."""
    enable_dataset_cache: StrictBool = False
    """Short for cache.latents = true and cache.text = true."""
    cache: CacheConfig = CacheConfig()
    """What the frozen encoders give, kept on disk."""
    dataloader_batch_size: NoEffect[StrictInt | None] = 1
    """Samples per message between upstream's processes."""
    data_dispatch_as_rank_in_mesh: NoEffect[StrictBool] = False
    """Upstream's way to split samples over ranks."""
    balance_dp_token: NoEffect[StrictBool] = True
    """Weigh samples by their tokens: losses are always divided by their global weight."""

    @property
    def cached_latents(self) -> bool:
        """Whether latents are kept on disk."""
        return self.enable_dataset_cache or self.cache.latents

    @property
    def cached_text(self) -> bool:
        """Whether text features are kept on disk."""
        return self.enable_dataset_cache or self.cache.text


class SftPolicyConfig(TrainPolicyConfig):
    """`[train.train_policy]` with `type = "sft"`: supervised fine-tuning."""

    type: Literal["sft"] = "sft"
    """"sft", "dpo" or "grpo". Unset: "grpo" if temperature, epsilon_low, epsilon_high, kl_beta or use_remote_reward is
    given, else "sft"."""
    trainer_type: str = "sft"
    """Name of the trainer."""
    conversation_column_name: ForVlm[str] = "conversations"
    """Column of the data set that holds conversations."""
    system_prompt: ForVlm[str] = ""
    """Put before each conversation."""
    dataloader_broadcast: NoEffect[StrictBool] = False
    """One rank reads for its model parallel group."""
    enable_dp_load_balancing: ForVlm[StrictBool] = False
    """Batches of similar length in tokens."""
    load_balanced_pool_size: ForVlm[PositiveInt] = 32
    """Samples among which such a batch is looked for."""
    load_balanced_max_tokens_for_batch: ForVlm[PositiveInt | None] = None
    """Tokens of such a batch; unset: policy.model_max_length."""
    load_balanced_batching_strategy: ForVlm[Literal["prefer_closest", "prefer_first"]] = "prefer_closest"
    """Which sample is added to such a batch next."""
    load_balanced_batches_per_optimizer_step: ForVlm[PositiveInt] = 1
    """Such batches per optimiser step."""


class DpoPolicyConfig(TrainPolicyConfig):
    """`[train.train_policy]` with `type = "dpo"`: preference optimisation on chosen and rejected images or videos.

    It also has the keys of "sft" from mini_batch to balance_dp_token, and its tables. A sample is a preference: a
    prompt with a chosen and a rejected image or video.
    """

    type: Literal["dpo"] = "dpo"
    """Preference optimisation."""
    trainer_type: str = "dpo"
    """Name of the trainer."""
    dpo_beta: PositiveFloat = 2000.0
    """How much a difference between the errors of the two members counts, which are means over the latents' elements:
    higher values stay nearer to the model at the start. diffusers' script has half this number for the same."""
    dpo_auto_beta: AutoBetaConfig = AutoBetaConfig()
    """A beta that follows the margins."""


class DataTermConfig(Table):
    """`[train.train_policy.data_term]`: real samples that are fine-tuned on in addition to the reward."""

    beta: NonNegativeFloat = 0.0
    """Weight of their flow-matching loss; 0: none are read."""
    local_dir: str = ""
    """Folder of pairs, as for supervised fine-tuning: real ones, or samples of the model as it was."""
    batch_size: PositiveInt = 16
    """Samples per optimiser step over all ranks; a multiple of the number of data parallel ranks."""
    levels: Literal["training", "trained_steps"] = "training"
    """Noise levels: drawn as in supervised fine-tuning, or those of the sampling steps that are trained."""
    per_step: StrictBool = False
    """Each sample at as many noise levels as there are trained sampling steps; false: at one."""
    noise: Literal["fresh", "rollout"] = "fresh"
    """What they are mixed with: noise of their own, or the start noise of the step's rollouts, that of sample k for the
    k-th of them. "rollout" needs samples of one size (no policy.diffusers.buckets)."""


class KlGateConfig(Table):
    """`[train.train_policy.kl_gate]`: for which samples the distance to the reference counts (GARDO)."""

    rewards: tuple[str, ...] = ()
    """Names of rewards of weight 0. The distance then counts only for the samples of a step whose reward ranks most
    above these. None: it counts for all samples."""
    share: PositiveFraction = 0.1
    """Share of a step's samples at the start; it grows and shrinks with their uncertainty."""
    least_share: PositiveFraction = 0.02
    """Its lower bound."""
    most_share: PositiveFraction = 0.2
    """Its upper bound."""


class RewardHackingGuardConfig(Table):
    """`[train.train_policy.reward_hacking_guard]`: detects that the reward rises because the policy exploits it."""

    enable: StrictBool = True
    """Whether the policy is checked at all."""
    freq: PositiveInt = 5
    """Steps between two checks."""
    local_dir: str = ""
    """Folder of held-out pairs for the flow-matching loss; unset: samples of the model as it is at the start."""
    samples: PositiveInt = 32
    """Held-out samples whose loss is measured."""
    max_loss_ratio: Annotated[StrictFloat, Field(gt=1)] = 3.0
    """Alarm when their loss, as a multiple of the loss at the start, is larger."""
    min_diversity_ratio: Fraction = 0.5
    """Alarm when the diversity of the samples of one prompt, as a share of that at the start, is smaller. It is
    measured on half as many samples as `samples`, at least 4, made from the same noise at each check."""
    max_untrained_drop: NonNegativeFloat = 0.3
    """Alarm when a validation reward that is not trained on drops by more than so many standard deviations of its first
    scores, and also by more than untrained_sigmas."""
    untrained_sigmas: NonNegativeFloat = 4.0
    """That drop must also be so many standard errors of the change from sample to sample: chance gives no alarm."""
    action: Literal["warn", "stop", "rewind"] = "stop"
    """What an alarm does: warn, save and stop, or rewind to the last checkpoint that was found good."""
    max_rewinds: NonNegativeInt = 3
    """How often the run is rewound; the next alarm stops it."""
    rewind_lr_factor: Annotated[StrictFloat, Field(gt=0, le=1)] = 0.5
    """Factor on the learning rate at each rewind; the random draws change in any case."""
    rewind_kl_factor: Annotated[StrictFloat, Field(ge=1)] = 2.0
    """Factor on kl_beta at each rewind."""


class GrpoPolicyConfig(TrainPolicyConfig):
    """`[train.train_policy]` with `type = "grpo"`: reinforcement learning.

    It also has the keys of "sft" from mini_batch to balance_dp_token, and its tables.
    """

    type: Literal["grpo"] = "grpo"
    """Reinforcement learning."""
    trainer_type: str = "grpo"
    """Name of the trainer: "diffusion_nft", "flow_grpo", "ddrl", "epg", "pepg", "par", "awm" or "online_dpo" for
    diffusers pipelines."""
    preset: Preset | None = None
    """Published settings, which hold wherever your file says nothing: trainer, sampler, trained steps and loss."""
    variant: Literal["grpo", "gspo", "dapo"] = "grpo"
    """Only "grpo" for diffusers pipelines."""
    uncentralized_training: StrictBool = False
    """Must be true: every rank runs the same loop."""
    use_remote_reward: StrictBool = False
    """Ask the reward service for scores; false: only local_reward, or the reward functions of your script."""
    remote_reward: RemoteRewardConfig = RemoteRewardConfig()
    """Scores from the reward service."""
    local_reward: LocalRewardConfig = LocalRewardConfig()
    """Scores from Python functions."""
    on_missing_reward: Literal["neutral", "drop_group", "raise"] = "neutral"
    """When a sample has no reward: "neutral" leaves it out of its group's statistics and trains with weight 0 on it,
    "drop_group" trains on no sample of its prompt, "raise" ends the run."""
    max_missing_frac: Fraction = 0.2
    """A larger share of samples without a reward in a step ends the run, and below 1 so does a prompt set whose samples
    have none at all."""
    bypass_reward: StrictBool = False
    """All rewards are 0, to try things; nothing is asked or called."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the distance to the reference model; 0: none is kept or run."""
    kl_gate: KlGateConfig = KlGateConfig()
    """For which samples that distance counts."""
    teacher: str = ""
    """On-policy distillation: an exported adapter that fits [policy.lora], or without that table a pipeline folder,
    which takes the place of the reference."""
    advantage_low: StrictFloat = -5.0
    """Smaller advantages count as this."""
    advantage_high: StrictFloat = 5.0
    """Larger advantages count as this; also the scale of DiffusionNFT's weights."""
    advantage_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """Which part of an advantage counts: all of it, above 0, below 0, 1 where it is above 0, its sign."""
    normalise_rewards: Literal["sum", "each", "gdpo"] = "sum"
    """"sum": advantages of the weighted sum of the rewards. "each": the sum of each reward's advantages times its
    table's scale and its weight. "gdpo": the same with each prompt's own deviations, over the deviation of the whole
    step. All know a score only within its clips."""
    diversity_features: FunctionName | None = None
    """A function of the media that gives features of each sample, "package.module:function" or "path/file.py:function".
    A good sample then counts the more, the further it is from the others of its prompt; advantages are not divided by a
    deviation (GARDO)."""
    drop_equal_groups: StrictBool = False
    """Leave out prompts whose samples all have the same advantage, so that they teach nothing."""
    learnt_share: PositiveFraction = 1.0
    """Share of a step's samples that are learnt from: those with the largest advantages of either sign, over all
    ranks."""
    mu_iterations: PositiveInt = 1
    """Passes over the samples of a step."""
    batch_size_per_optimize: PositiveInt | None = None
    """Samples per rank and optimiser step (online_dpo: pairs, as in mini_batch); unset: all of the step."""
    data_term: DataTermConfig = DataTermConfig()
    """Real samples that are fine-tuned on in addition to the reward."""
    reward_hacking_guard: RewardHackingGuardConfig = RewardHackingGuardConfig()
    """Detects that the policy exploits the reward."""
    steps: StepsConfig = StepsConfig()
    """Which sampling steps FlowGRPO and DDRL train."""
    epsilon_low: NonNegativeFloat | None = None
    """FlowGRPO, DDRL: how far the likelihood ratio may fall below 1; unset: 1e-4."""
    epsilon_high: NonNegativeFloat | None = None
    """FlowGRPO, DDRL: how far the likelihood ratio may rise above 1; unset: epsilon_low."""
    kl_mask_threshold: PositiveFloat | None = None
    """FlowGRPO, DDRL: in place of the clip, samples that move away from the policy that made them give no gradient
    beyond this KL divergence per element of the latents (Flow-DPPO: 1e-5, for long runs 1e-6). Unset: the clip."""
    kl_mask_direction: Literal["ratio", "first_order"] = "ratio"
    """What moving away means: by the ratio, or by the sign of the change of the KL divergence."""
    logprob_weight: Literal["normalised", "unit", "ve", "guard"] = "normalised"
    """FlowGRPO, DDRL: how the steps count against each other: by their log-probabilities, by squared distances of the
    latents, by those in coordinates of exploding variance, or by GRPO-Guard's ratio, whose spread no step changes."""
    advantage_transform: Literal["identity", "exp_reward", "centred_exp_reward"] = "identity"
    """FlowGRPO, DDRL: use of an advantage A: A, -exp(-A) or 1 - exp(-A), within its bounds before and after."""
    advantage_temperature: PositiveFloat | None = None
    """Advantages are rewards minus the mean of their group over this, in place of a standard deviation (EPG, PEPG, PAR:
    10)."""
    dpo_beta: PositiveFloat = 100.0
    """online_dpo: how much a difference between the errors of a prompt's best and worst sample counts, which are means
    over the latents' elements."""
    dpo_auto_beta: AutoBetaConfig = AutoBetaConfig()
    """online_dpo: a beta that follows the margins."""
    norm_penalty: NonNegativeFloat = 0.0
    """Weight of the square by which the velocities' root mean square exceeds that of the reference."""
    on_policy: StrictBool = False
    """FlowGRPO, DDRL: sample with the weights that are trained; false: with the old policy, which follows by
    policy.diffusers.weight_copy_decay_type (0: it is the trained one too)."""
    reference_reset_interval: PositiveInt | None = None
    """Steps after which the reference becomes the present model; unset: never."""
    reference_reset_kl: PositiveFloat | None = None
    """The reference also becomes the present model after a step in which the mean distance to it was larger (GARDO:
    3e-4 for FlowGRPO, 0.1 to 0.15 for DiffusionNFT); reference_reset_interval then counts from there. Unset: never."""
    reset_optimizer_with_reference: StrictBool = False
    """Forget the optimiser's moments then."""
    allowed_outdated_steps: NoEffect[NonNegativeInt] = 4
    """Samples are never outdated: rollout and training share the weights."""
    temperature: NoEffect[StrictFloat] = 1.0
    """Of language models, like all keys that follow."""
    prompt_column_name: NoEffect[str] = ""
    """Column of prompts."""
    response_column_name: NoEffect[str] = ""
    """Column of answers."""
    reward_function: NoEffect[RewardFunction] = ("single_choice",)
    """Built-in rewards for answers."""
    filter_reward_metric: NoEffect[str | tuple[str, ...]] = ""
    """Rewards by which groups are dropped."""
    group_reward_calculation: NoEffect[StrictBool] = False
    """Rewards are computed for whole groups."""
    positive_nll_coef: NoEffect[StrictFloat | None] = None
    """Weight of the likelihood of good answers."""
    lower_bound_ratio: NoEffect[StrictFloat] = 3.0
    """Dual clip of the ratio."""
    loss_type: NoEffect[str] = "token-mean"
    """Mean over tokens or answers."""
    unbiased_loss_max_tokens: NoEffect[StrictInt | None] = None
    """Fixed number of tokens in that mean."""
    unbiased_advantage: NoEffect[StrictBool] = False
    """Advantages are not divided by the standard deviation."""
    algo: NoEffect[str] = "grpo"
    """Name of upstream's algorithm."""
    overlong_reward: NoEffect[AnyTable] = Field(default_factory=dict)
    """Penalty for long answers."""
    unbiased_kl_estimate: NoEffect[StrictBool] = False
    """Estimator of the distance to the reference."""
    off_policy_masking_delta: NoEffect[StrictFloat | None] = None
    """Leave out answers far from the policy."""
    aipo_rho: NoEffect[StrictFloat | None] = None
    """Clip of the importance weight."""
    max_token_len_per_mini_batch: NoEffect[StrictInt | None] = None
    """Tokens per forward pass."""
    entropy_coeff: NoEffect[StrictFloat] = 0.0
    """Weight of the entropy."""
    outdated_rollout_fetch_batch_size: NoEffect[StrictInt] = 0
    """Size of asynchronous fetches."""
    max_inflight_steps: NoEffect[StrictInt | None] = None
    """Steps generated ahead."""
    min_filter_prefix_tokens: NoEffect[StrictInt | None] = None
    """Shared beginning of answers."""
    max_retry_for_on_policy: NoEffect[StrictInt] = -1
    """Attempts to fill a batch."""
    use_decoupled_loss: NoEffect[StrictBool] = False
    """Separate weights of behaviour and policy."""
    behav_imp_weight_cap: NoEffect[StrictFloat | None] = None
    """Largest such weight."""
    rollout_as_token_ids: NoEffect[StrictBool] = False
    """Answers travel as tokens."""
    collect_rollout_logprobs: NoEffect[StrictBool] = False
    """Keep log-probabilities of tokens."""
    use_rollout_logprobs_for_loss: NoEffect[StrictBool] = False
    """Train with them."""


_MEANS_GRPO = frozenset({"temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward"})


def _infer_type(value: object) -> object:
    if not isinstance(value, Mapping) or "type" in value:
        return value
    return {"type": "sft" if _MEANS_GRPO.isdisjoint(value) else "grpo", **value}


TrainPolicy = Annotated[
    SftPolicyConfig | ForDpo[DpoPolicyConfig] | ForRl[GrpoPolicyConfig],
    Field(discriminator="type"),
    BeforeValidator(_infer_type),
]
