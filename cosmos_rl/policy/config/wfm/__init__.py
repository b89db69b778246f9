"""The older configuration of Cosmos-Predict2.5's reinforcement learning: a TOML file with `[model]` and no `[policy]`.

This file holds `[model.rl]`, which FlowGRPO and DDRL read; `older.toml` holds the other tables with their defaults.
`cosmos-rl translate OLD.toml` makes a file of the present form of it, and a launch does so by itself (docs/legacy.md).
Defaults are those of the older format. Numbers may be written as text, as they could be there.
"""

from typing import Annotated

from pydantic import Field

from cosmos_rl.policy.config.base import Table

Count = Annotated[int, Field(gt=0)]
PositiveNumber = Annotated[float, Field(gt=0)]
Unbounded = Annotated[float, Field(allow_inf_nan=True)]


class AestheticRewardConfig(Table):
    """`[model.rl.reward_config.aesthetic]`: the aesthetic predictor, in the training process."""

    enabled: bool = False
    model_path: str | None = None


class ImageRewardConfig(Table):
    """`[model.rl.reward_config.image_reward]`: ImageReward, in the training process."""

    enabled: bool = False
    model_path: str = "ImageReward-v1.0"


class FakeRewardConfig(Table):
    """`[model.rl.reward_config.fake_reward]`: 0 for every sample."""

    enabled: bool = False
    reward_fn: str = "fake_reward"
    scale: float = 1.0


class RemoteRewardConfig(Table):
    """`[model.rl.reward_config.remote_reward]`: scores from the reward service."""

    enabled: bool = True
    score_key: str = "overall_reward"  # field of the answer that holds the score, or "a+b" for a sum
    scale: float = 1.0  # factor of the clipped score
    reward_fn: str = "dance_grpo"  # reward type at the service
    reward_clip_min: float = -5.0
    reward_clip_max: float = 5.0
    token: str = ""  # this and the addresses are taken from the environment; see docs/rewards.md
    enqueue_url: str = ""
    fetch_url: str = ""


class RewardConfig(Table):
    """`[model.rl.reward_config]`: which rewards are averaged."""

    ALL_REWARD_MODELS: tuple[str, ...] = ("aesthetic", "image_reward", "remote_reward", "fake_reward")  # order in logs
    adv_clip_max: float = 5.0
    adv_clip_min: float = -5.0
    aesthetic: AestheticRewardConfig = AestheticRewardConfig()
    image_reward: ImageRewardConfig = ImageRewardConfig()
    remote_reward: RemoteRewardConfig = RemoteRewardConfig()
    fake_reward: FakeRewardConfig = FakeRewardConfig()


class RLConfig(Table):
    """`[model.rl]`: rollouts, sampler, loss and rewards."""

    enabled: bool = True  # false: supervised fine-tuning

    # rollouts: a step has (number of ranks) / num_rollout / context_parallel_size prompts
    num_rollout: Count = 8  # samples per prompt
    on_policy: bool = True  # the trained policy makes the samples; false: the reference does
    sample_steps: Count = 10  # intervals between noise levels; one more call of the model makes the sample clean
    # latent frames of a video that are given, drawn for each group: 0 text to video, 1 image to video, 2 video to video
    min_num_conditional_frames: int = 1
    max_num_conditional_frames: int = 1
    use_same_seed: bool = True  # the samples of a prompt start from one noise

    # sampler
    solver_option: str = "2ab"  # or "1euler"
    s_churn: float = 1.0  # strength of the noise between the steps
    s_t_max: Unbounded = float("inf")  # noise is added only below this level; text such as "inf" is a number too
    s_t_min: Unbounded = 0.0  # noise is added only above this level
    s_noise: float = 1.0  # factor of that noise
    guidance: float = 0.0  # cond + guidance * (cond - uncond); 0: the unconditional call is not made

    # loss
    train_on: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)  # sampling steps that are trained; -1: another, random one
    update_ref_every_iter: int = 16  # training steps after which the reference becomes the present policy; 0: never
    clip_ratio: float = 1e-4  # how far the likelihood ratio may move away from 1
    kl_beta: float = 0.01  # weight of the distance to the reference
    data_beta: float = 0.0  # weight of the diffusion loss on real videos; more than 0 with kl_beta = 0 is DDRL
    use_rl_sigma_and_noise: bool = True  # that loss is taken at the noise levels of the trained steps
    data_on_first_only: bool = False  # that loss is taken once per sample, not once per trained step
    exp_reward: bool = False  # an advantage A counts as -exp(-A)
    reward_config: RewardConfig = RewardConfig()  # where rewards come from
