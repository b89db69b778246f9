"""The kinds of jobs, one row for each (`type`, `trainer_type`) of `[train.train_policy]`. No torch.

Everything that depends on the kind of a job asks its row; a new kind is a row here, and what the row names.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from cosmos_rl.policy.config.plan import StepPlan, plan_online, plan_sft
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.train_policy import (
    DpoPolicyConfig,
    GrpoPolicyConfig,
    SftPolicyConfig,
    TrainPolicyConfig,
)

DataForm = Literal["pairs", "preferences", "prompts"]
"""Captioned images, captions each with a chosen and a rejected image, or a list of prompts."""
Part = str
"""`package.module:name`, imported when it is used: most of them need torch."""


@dataclass(frozen=True)
class JobKind:
    """What is particular to a kind of job."""

    table: type[TrainPolicyConfig]
    """Its `[train.train_policy]`."""
    plan: Callable[[Config], StepPlan]
    """What one step takes."""
    data: DataForm
    """What the data folders hold."""
    items: str
    """The noun for what the data is made of."""
    script: str
    """The module that reads the data which the configuration names."""
    task: Part
    """Called with configuration, context, data sets and, for online jobs, reward functions; makes the task."""
    algorithm: Part = ""
    """Of an online job: called with the configuration, makes the algorithm."""
    rows: int = 1
    """Of one forward pass, for each sample of its micro-batch."""
    adapters: tuple[str, ...] = ()
    """Names that `policy.lora.lora_names` must hold; the first is trained."""
    supported: bool = True

    @property
    def online(self) -> bool:
        """Whether it is reinforcement learning: samples of the model are scored and trained on."""
        return issubclass(self.table, GrpoPolicyConfig)


SFT = JobKind(
    table=SftPolicyConfig,
    plan=plan_sft,
    data="pairs",
    items="captions",
    script="cosmos_rl.tools.dataset.diffusers_dataset",
    task="cosmos_rl.policy.trainer.diffusers_trainer.build:build_sft",
)
DPO = replace(
    SFT,
    table=DpoPolicyConfig,
    data="preferences",
    items="preferences",
    script="cosmos_rl.tools.dataset.preferences",
    task="cosmos_rl.policy.trainer.diffusers_trainer.dpo_trainer:build_dpo",
    rows=2,
)
DIFFUSION_NFT = JobKind(
    table=GrpoPolicyConfig,
    plan=plan_online,
    data="prompts",
    items="prompts",
    script="cosmos_rl.tools.dataset.diffusion_nft",
    task="cosmos_rl.policy.trainer.rl.build:build_online",
    algorithm="cosmos_rl.policy.trainer.rl.nft:DiffusionNft.from_config",
    adapters=("default", "old"),
)
FLOW_GRPO = replace(
    DIFFUSION_NFT, algorithm="cosmos_rl.policy.trainer.rl.flow_grpo:FlowGrpo.from_config", adapters=("default",)
)
DDRL = replace(FLOW_GRPO, algorithm="cosmos_rl.policy.trainer.rl.flow_grpo:Ddrl.from_config")
FORWARD = replace(DIFFUSION_NFT, algorithm="cosmos_rl.policy.trainer.rl.forward:ForwardObjective.from_config")
ONLINE_DPO = replace(FLOW_GRPO, algorithm="cosmos_rl.policy.trainer.rl.online_dpo:OnlineDpo.from_config", rows=2)
JOBS: dict[tuple[str, str], JobKind] = {
    ("sft", "sft"): SFT,
    ("dpo", "dpo"): DPO,
    ("grpo", "diffusion_nft"): DIFFUSION_NFT,
    ("grpo", "flow_grpo"): FLOW_GRPO,
    ("grpo", "ddrl"): DDRL,
    ("grpo", "epg"): FORWARD,
    ("grpo", "pepg"): FORWARD,
    ("grpo", "par"): FORWARD,
    ("grpo", "awm"): FORWARD,
    ("grpo", "online_dpo"): ONLINE_DPO,
}
"""By `train.train_policy.type` and `train.train_policy.trainer_type`."""
SCRIPTS: Mapping[str, DataForm] = {kind.script: kind.data for kind in JOBS.values()}
"""Bundled scripts and the data that they read."""


def job_kind(config: Config) -> JobKind:
    """The kind of job that `config` describes; one that is not supported is described like the first of its type."""
    job = config.train.train_policy
    kind = JOBS.get((job.type, job.trainer_type))
    if kind is not None:
        return kind
    nearest = next(row for (type_, _), row in JOBS.items() if type_ == job.type)
    return replace(nearest, algorithm="", adapters=(), supported=False)


def online_table(config: Config) -> GrpoPolicyConfig:
    """The `[train.train_policy]` of an online job.

    Raises:
        TypeError: it is another job.
    """
    job = config.train.train_policy
    if not isinstance(job, GrpoPolicyConfig):
        raise TypeError(f"train.train_policy is of the type {job.type}, which has no rewards")
    return job


def latents_keys(config: Config) -> list[str]:
    """The settings by which samples of an online job go to the reward service as latents; empty: all go as pixels."""
    job, validation, tables = online_table(config), config.validation, {}
    if job.use_remote_reward:
        tables["train.train_policy.remote_reward.payload"] = job.remote_reward
    if validation.enable and validation.remote_reward is not None:
        tables["validation.remote_reward.payload"] = validation.remote_reward
    for number, one in enumerate(validation.sets if validation.enable else ()):
        if one.remote_reward is not None:
            tables[f"validation.sets.{number}.remote_reward.payload"] = one.remote_reward
    if job.bypass_reward:
        return []
    return [key for key, table in tables.items() if table.payload == "latents"]


def load_part(part: Part) -> Any:
    """The object that a row names."""
    module, _, names = part.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found
