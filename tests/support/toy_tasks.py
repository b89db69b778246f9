"""Tasks with a known optimum on the toy models: configuration, rewards, and what is measured."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_rl.data.given import text_of
from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.config.validation_sets import ValidationSet, list_validation_sets
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.trainer.diffusers_trainer.common import choose_prompts
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encode
from cosmos_rl.policy.trainer.loop import TrainLoop
from cosmos_rl.policy.trainer.rl.build import DataLoss, build_algorithm
from cosmos_rl.policy.trainer.rl.guard_probe import HeldOut
from cosmos_rl.policy.trainer.rl.online import OnlineTask, Parts, StartNoise
from cosmos_rl.policy.trainer.rl.validation import LoadedSet
from cosmos_rl.reward import batch_reward
from cosmos_rl.reward.build import make_rewards
from cosmos_rl.storage import run_folder
from tests.support.open_tasks import close_after_test
from tests.support.toy_models import FOUR_MODES, PlaneModel, ToyModel

TABLE = dict[str, Any]


TOY_TABLES = {
    "policy.diffusers.inference_size": [16, 16],
    "train.param_dtype": "float32",
    "train.device": "cpu",
    "train.epoch": 100_000,
    "train.optm_warmup_steps": 0,
    "train.optm_name": "Adam",
    "train.optm_weight_decay": 0.0,
    "train.optm_grad_norm_clip": 0.0,
}


def toy_config(tables: Mapping[str, Any] | None = None) -> Config:
    """A DiffusionNFT job without a pipeline; dotted keys in ``tables`` change it."""
    defaults = {
        "mode": "colocated",
        "policy.diffusers.sample": {
            "num_steps": 10,
            "guidance_scale": 1.0,
            "solver": "euler",
            "deterministic_sampling": True,
        },
        "train.train_policy.type": "grpo",
        "train.train_policy.trainer_type": "diffusion_nft",
        "train.train_policy.uncentralized_training": True,
        "train.train_policy.reward_hacking_guard.enable": False,
        "train.train_policy.local_reward.batch_size": 1024,
    }
    return _build_config({**defaults, **(tables or {})})


def toy_sft_config(tables: Mapping[str, Any] | None = None) -> Config:
    """A fine-tuning job without a pipeline; dotted keys in ``tables`` change it."""
    return _build_config({"train.train_policy.type": "sft", **(tables or {})})


def _build_config(tables: Mapping[str, Any]) -> Config:
    tree: TABLE = {"policy": {"model_name_or_path": "toy", "is_diffusers": True}}
    for key, value in {**TOY_TABLES, **tables}.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return Config.from_dict(tree)


def toy_trainer(
    config: Config,
    model: ToyModel,
    prompts: Sequence[PromptRecord],
    *,
    reward_fns: Mapping[str, Any] | None = None,
    held_out: HeldOut | None = None,
    data_loss: DataLoss | None = None,
) -> OnlineTask:
    """The shipped trainer on a toy model, validated on its own prompts; its export is the network's weights."""

    def choose_encode(config: Config) -> Encode:
        guided = config.policy.diffusers.sample.guidance_scale > 1.0
        return lambda texts, negatives: model.encode_prompts(list(map(text_of, texts)), negatives if guided else None)

    def load(one: ValidationSet) -> LoadedSet:
        rewards = make_rewards(one.config, reward_fns, validation=True, names=one.rewards) if one.label else None
        return LoadedSet(one, choose_prompts(prompts, one.config), choose_encode(one.config), rewards)

    def export() -> Callable[[Path], None]:
        weights = {name: value.detach().clone() for name, value in model.transformer.state_dict().items()}

        def write(folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(weights, folder / "model.safetensors")

        return write

    parts = Parts(
        model=model,
        prompts=prompts,
        rewards=make_rewards(config, reward_fns, validation=False),
        encode=choose_encode(config),
        validation=[load(one) for one in list_validation_sets(config)],
        held_out=held_out,
        data_loss=data_loss,
        export=export,
    )
    return close_after_test(OnlineTask(config, Context(torch.device("cpu")), build_algorithm(config), parts))


# ---- the plane -----------------------------------------------------------------------------------------------------

POINT = PromptRecord("a point")
BUMP = (1.6, 1.6)
"""Where the bounded reward has its top."""
TEMPERATURE = 0.25


def plane_tables(seed: int, steps: int) -> TABLE:
    """512 samples of one prompt per step, four optimiser steps on them at 4 of 10 levels, Adam 2e-3, beta 1, KL 0.3."""
    return {
        "train.seed": seed,
        "train.max_num_steps": steps,
        "train.train_batch_per_replica": 512,
        "train.optm_lr": 2e-3,
        "train.epsilon": 1e-8,
        "rollout.n_generation": 512,
        "train.train_policy.mini_batch": 128,
        "train.train_policy.batch_size_per_optimize": 128,
        "train.train_policy.kl_beta": 0.3,
        "policy.diffusers.timesteps_fraction": 0.4,
    }


@batch_reward
def bump(media: np.ndarray) -> np.ndarray:
    """``exp(-|x - mu|^2 / 2)``, between 0 and 1."""
    return np.exp(-((media.astype(np.float64) - BUMP) ** 2).sum(1) / 2)


@batch_reward
def rightwards(media: np.ndarray) -> np.ndarray:
    """The first coordinate: no bound."""
    return media[:, 0].astype(np.float64)


@functools.cache
def base_and_tilt(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Samples ``[count, 2]`` of the mixture, and of the mixture times ``exp(reward / TEMPERATURE)``."""
    generator = torch.Generator().manual_seed(seed)
    pool = FOUR_MODES.draw(400_000, generator)
    weight = torch.from_numpy(np.exp(bump(pool.numpy()) / TEMPERATURE))
    tilted = pool[torch.multinomial(weight, count, replacement=True, generator=generator)]
    return FOUR_MODES.draw(count, generator), tilted


def mmd2(first: Tensor, second: Tensor) -> float:
    """Squared maximum mean discrepancy: three Gaussian kernels of widths 0.3, 1 and 3, added."""

    def kernel(a: Tensor, b: Tensor) -> float:
        squared = torch.cdist(a.double(), b.double()) ** 2
        return float(sum(torch.exp(-squared / (2 * width**2)).mean() for width in (0.3, 1.0, 3.0)))

    return kernel(first, first) + kernel(second, second) - 2 * kernel(first, second)


def plane_samples(model: PlaneModel, count: int, seed: int = 1) -> Tensor:
    """``[count, 2]`` by 40 steps of the ODE."""
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    cond = model.encode_prompts([POINT.prompt] * count)
    return model.sample_latents(cond, noise, num_steps=40, guidance=1.0)


def plane_task(seed: int, steps: int, tables: Mapping[str, Any] | None = None) -> tuple[OnlineTask, PlaneModel]:
    """``steps`` steps on the bounded reward, and the model that they train; a data term is on the mixture itself."""
    model = PlaneModel(seed=seed)
    config = toy_config({**plane_tables(seed, steps), **(tables or {})})
    data_loss = functools.partial(plane_data_loss, model, seed, online_table(config).data_term.batch_size)
    return toy_trainer(config, model, [POINT], reward_fns={"bump": bump}, data_loss=data_loss), model


def plane_data_loss(
    model: PlaneModel, seed: int, count: int, step: int, number: int, levels: Level, start: StartNoise
) -> Iterator[Tensor]:
    """Flow matching on ``count`` points of the mixture, each at one of the levels; per element."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1_009 * step + number)
    clean, noise = FOUR_MODES.draw(count, generator), torch.randn(count, 2, generator=generator)
    level = levels.rows(torch.randint(len(levels.sigma), (count,), generator=generator))
    sigma = level.sigma[:, None]
    velocity = model.velocity((1 - sigma) * clean + sigma * noise, level, model.encode_prompts([POINT.prompt] * count))
    yield ((velocity - (noise - clean)) ** 2).mean()


@dataclass(frozen=True)
class PlaneResult:
    """Where a model's samples are: their mean bounded reward, and their distances to the tilt and to the mixture."""

    reward: float
    to_tilt: float
    to_base: float


def measure_plane(model: PlaneModel, count: int = 2000) -> PlaneResult:
    """Of ``count`` samples by 40 steps of the ODE."""
    base, tilt = base_and_tilt(count)
    samples = plane_samples(model, count)
    return PlaneResult(float(bump(samples.numpy()).mean()), mmd2(samples, tilt), mmd2(samples, base))


# ---- the loop ------------------------------------------------------------------------------------------------------


@dataclass
class Never:
    """A stop request that never comes."""

    requested: str | None = None


def run_loop(config: Config, trainer: OnlineTask, folder: Path) -> list[TABLE]:
    """Drive the trainer by the shipped loop in a new run folder; the lines of its metrics file.

    Raises whatever ends the loop.
    """
    run = run_folder.create_run(folder)
    TrainLoop(config, run, Context(torch.device("cpu")), trainer, (), {}, Never()).run(None)
    return metrics_of(folder)


def metrics_of(folder: Path) -> list[TABLE]:
    """What the newest run in ``folder`` logged, a table per step."""
    run = run_folder.find_newest_run(folder)
    assert run is not None
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]
