"""Training from Python: `cosmos_rl.sft(...)` and `cosmos_rl.nft(...)`, in this process, on one rank."""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cosmos_rl.checkpoint.layout import list_committed_steps, step_dir
from cosmos_rl.data.folders import Folders, load_training_pairs
from cosmos_rl.data.local_pairs import LocalPairs, load_held_out_data
from cosmos_rl.data.prompt_sets import load_prompts
from cosmos_rl.errors import OutOfMemory, UserError
from cosmos_rl.launcher.acceptance.accept import accept
from cosmos_rl.launcher.geometry import find_geometry
from cosmos_rl.launcher.machine import gpus
from cosmos_rl.launcher.pipeline_files import Unknown, read_pipeline
from cosmos_rl.launcher.prepare import prepare_run
from cosmos_rl.launcher.ranks.signals import StopRequest, listen
from cosmos_rl.launcher.run_job import explain_out_of_memory, run_job
from cosmos_rl.policy.config import Config, PolicyConfig, config_from_tables, read_toml
from cosmos_rl.policy.config.jobs import DataForm
from cosmos_rl.reward import RewardFns
from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.tracking.metrics import read_metrics

_RECIPES = Path(__file__).parent / "recipes"
_MOST_PIXELS = 512
"""Edge of the images where no size is given; a smaller model has its own."""
_MICRO_BATCH = 8
_ARGUMENTS = {
    "policy.model_name_or_path": "pipeline",
    "policy.diffusers.inference_size": "size",
    "train.output_dir": "output_dir",
    "train.max_num_steps": "steps",
    "train.optm_lr": "learning_rate",
    "train.resume": "resume",
    "train.train_batch_per_replica": "batch_size (or prompts_per_step and samples_per_prompt)",
    "train.global_batch_size": "batch_size (or prompts_per_step and samples_per_prompt)",
    "rollout.n_generation": "samples_per_prompt",
    "train.train_policy.dataset.local_dir": "data_folder (or prompts)",
}
"""Keys that an argument sets -> that argument."""
Overrides = Mapping[str, object]
"""Dotted key of the configuration -> value; None: as if the key were not there."""


@dataclass(frozen=True)
class FinishedRun:
    """What a training run left."""

    folder: Path
    """Its folder: `config.toml`, `metrics.jsonl`, `media/`, `report.html`, checkpoints and exports."""
    stopped: bool
    """Ctrl-C or SIGTERM ended it early; it is saved, and `resume=True` continues it."""
    base: str
    """The pipeline that was trained."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary for each step, as in `metrics.jsonl`."""
        return read_metrics(RunFolder(self.folder).metrics)

    @property
    def result(self) -> Path:
        """The newest export: a whole pipeline, or a folder that holds `lora`.

        Raises:
            UserError: nothing was exported, as the run was stopped before.
        """
        exports = RunFolder(self.folder).safetensors
        steps = list_committed_steps(exports)
        if not steps:
            raise UserError(f"{self.folder}: nothing is exported yet; continue with resume=True")
        return step_dir(exports, steps[-1])

    def pipeline(self, **keywords: Any) -> Any:
        """The result as a plain diffusers pipeline; `keywords` go to `DiffusionPipeline.from_pretrained`.

        Raises:
            UserError: it has a part, such as the guardrail of Cosmos, that is hidden from diffusers in this process and
                that no keyword gives.
        """
        import cosmos_rl.policy.model.diffusers  # noqa: F401 (first: diffusers prints of torchao where it finds it)

        # isort: split
        from diffusers.pipelines.pipeline_utils import DiffusionPipeline

        from cosmos_rl.policy.model.driver.rows import find_row
        from cosmos_rl.policy.model.quiet import load_adapter

        adapter = self.result / "lora"
        base: Any = self.base if adapter.is_dir() else str(self.result)
        index: Any = DiffusionPipeline.load_config(base, **keywords)
        hidden = [name for name in find_row(index["_class_name"]).absent if name not in keywords]
        if hidden:
            raise UserError(
                f"{self.result}: a process that trains hides {hidden[0]} from diffusers. Give one, as in "
                f"run.pipeline({hidden[0]}=...), or load the result in another process"
            )
        pipe: Any = DiffusionPipeline.from_pretrained(base, **keywords)
        if adapter.is_dir():
            load_adapter(pipe, adapter)
        return pipe


def sft(
    pipeline: str | Path,
    data_folder: str | Path,
    *,
    output_dir: str | Path = "outputs/sft",
    steps: int = 100,
    batch_size: int = 4,
    learning_rate: float = 1e-4,
    lora: bool = True,
    size: int | tuple[int, int] | None = None,
    resume: bool = False,
    overrides: Overrides | None = None,
) -> FinishedRun:
    """Fine-tune a pipeline on a folder of captioned images.

    Args:
        pipeline: folder or hub name of a diffusers pipeline.
        data_folder: pairs `x.json` (`{"prompt": "..."}`) and `x.jpg`, `.jpeg`, `.png` or `.webp`.
        output_dir: collects the runs.
        steps: optimiser steps.
        batch_size: images in each.
        learning_rate: of all trained weights.
        lora: train an adapter; False: all weights of the transformer.
        size: height and width in pixels; None: the model's own, at most 512.
        resume: continue the newest run of `output_dir`.
        overrides: any other keys of the configuration.

    Raises:
        UserError: the configuration, the data, the machine or its memory does not allow it; the message says what to
            change.
    """
    _check_arguments("sft", steps=steps, batch_size=batch_size)
    _check_lora("sft", lora)
    values = _common(pipeline, output_dir, steps, batch_size, learning_rate, size, resume)
    values["train.train_policy.dataset.local_dir"] = str(data_folder)
    config = _configure("sft", values, lora, overrides)
    return _train(config, "sft", "pairs", dataset=_pairs, val_dataset=load_held_out_data)


def nft(
    pipeline: str | Path,
    prompts: Sequence[Any] | str | Path,
    reward: RewardFns | Callable[..., Any],
    *,
    output_dir: str | Path = "outputs/nft",
    steps: int = 100,
    prompts_per_step: int = 4,
    samples_per_prompt: int = 8,
    learning_rate: float = 3e-4,
    lora: bool = True,
    size: int | tuple[int, int] | None = None,
    resume: bool = False,
    overrides: Overrides | None = None,
) -> FinishedRun:
    """Reinforcement learning with DiffusionNFT: samples of the prompts get better by the reward.

    Args:
        pipeline: folder or hub name of a diffusers pipeline.
        prompts: texts, mappings with `prompt`, or a file of prompts (`.txt`, `.jsonl`, `.json`, `.tsv`).
        reward: a function of an image uint8 `[H, W, 3]` that gives a number, several, pairs with their weights, or
            either of them by name (see the page on rewards).
        output_dir: collects the runs.
        steps: training steps.
        prompts_per_step, samples_per_prompt: their product is the number of samples of a step.
        learning_rate: of all trained weights.
        lora: train an adapter; False: all weights of the transformer.
        size: height and width in pixels; None: the model's own, at most 512.
        resume: continue the newest run of `output_dir`.
        overrides: any other keys of the configuration.

    Raises:
        UserError: the configuration, a reward, the machine or its memory does not allow it; the message says what to
            change.
        TrainingStoppedError: the guard against reward hacking stopped the run, which is saved.
    """
    _check_nft(prompts, reward, lora, steps, prompts_per_step, samples_per_prompt)
    samples = prompts_per_step * samples_per_prompt
    values = _common(pipeline, output_dir, steps, samples, learning_rate, size, resume)
    values["rollout.n_generation"] = samples_per_prompt
    data: DataForm | None = None
    given: dict[str, Any] = {"val_dataset": _val_prompts, "reward_fns": reward}
    if callable(reward):
        given["reward_fns"] = [reward]
    if isinstance(prompts, str | Path):
        data, given["dataset"] = "prompts", _prompts
        values["train.train_policy.dataset.local_dir"] = str(prompts)
    else:
        given["dataset"] = list(prompts)
    return _train(_configure("nft", values, lora, overrides), "nft", data, **given)


# ---- the configuration -------------------------------------------------------------------------------------------


def _common(
    pipeline: str | Path,
    output_dir: str | Path,
    steps: int,
    samples: int,
    learning_rate: float,
    size: int | tuple[int, int] | None,
    resume: bool,
) -> dict[str, object]:
    """Dotted key -> value of what the arguments of both jobs set."""
    if size is None:
        size = _own_size(str(pipeline))
    if isinstance(size, int):
        size = (size, size)
    dtype = "float32"
    if gpus():
        dtype = "bfloat16"
    return {
        "policy.model_name_or_path": str(pipeline),
        "policy.diffusers.inference_size": list(size),
        "train.output_dir": str(output_dir),
        "train.max_num_steps": steps,
        "train.optm_lr": learning_rate,
        "train.resume": resume,
        "train.train_batch_per_replica": samples,
        "train.param_dtype": dtype,
        "train.train_policy.mini_batch": _divisor(samples),
    }


def _configure(name: str, values: Mapping[str, object], lora: bool, overrides: Overrides | None) -> Config:
    """The recipe with the values of the arguments, and then with the overrides."""
    tree = read_toml(_RECIPES / f"{name}.toml")
    if not lora:
        cast(dict[str, object], tree["policy"]).pop("lora")
    for key, value in values.items():
        _set(tree, key, value)
    for key, value in (overrides or {}).items():
        if key in _ARGUMENTS:
            raise UserError(f"overrides: {key}: is set by the argument {_ARGUMENTS[key]}; give that")
        if isinstance(value, Mapping):
            inner = next(iter(value), "key")
            raise UserError(f'overrides: {key}: found a dictionary; write its keys as "{key}.{inner}": ...')
        if key.startswith("policy.lora.") and not lora:
            raise UserError(f"overrides: {key}: there is no adapter with lora=False")
        _set(tree, key, value)
    return config_from_tables(tree, f"cosmos_rl.{name}")


def _set(tree: dict[str, object], key: str, value: object) -> None:
    """Put a value under a dotted key; None takes the key out."""
    *tables, leaf = key.split(".")
    table: Any = tree
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise UserError(f"overrides: {key}: {name} is not a table")
    if value is None:
        table.pop(leaf, None)
    elif isinstance(value, Path):
        table[leaf] = str(value)
    else:
        table[leaf] = value


def _own_size(pipeline: str) -> int:
    """Edge in pixels of the images that the model was made for, at most 512; 512 where that is not known."""
    try:
        files = read_pipeline(PolicyConfig(model_name_or_path=pipeline, is_diffusers=True))
        return min(int(files.configs["transformer"]["sample_size"]) * find_geometry(files).stride, _MOST_PIXELS)
    except (Unknown, KeyError, TypeError, ValueError):
        return _MOST_PIXELS


def _divisor(samples: int) -> int:
    """The largest micro-batch of at most 8 that divides the samples of a step."""
    sizes = range(min(samples, _MICRO_BATCH), 0, -1)
    return next((size for size in sizes if samples % size == 0), 1)


def _check_arguments(name: str, **counts: object) -> None:
    for key, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"cosmos_rl.{name}: {key}: found {value!r}; allowed: a whole number >= 1")


def _check_nft(
    prompts: Any, reward: Any, lora: bool, steps: int, prompts_per_step: int, samples_per_prompt: int
) -> None:
    _check_arguments("nft", steps=steps, prompts_per_step=prompts_per_step, samples_per_prompt=samples_per_prompt)
    _check_lora("nft", lora)
    allowed = "a list of texts, or the name of a file of them"
    if not prompts:
        raise UserError(f"cosmos_rl.nft: prompts: none given; {allowed}")
    if isinstance(prompts, str | Path) and not Path(prompts).expanduser().exists():
        raise UserError(f"cosmos_rl.nft: prompts: found {str(prompts)!r}, which is not a file; {allowed}")
    if reward is None or isinstance(reward, str) or (not callable(reward) and not reward):
        raise UserError(f"cosmos_rl.nft: reward: found {reward!r}; a function of an image, or several in a list")


def _check_lora(name: str, lora: object) -> None:
    if not isinstance(lora, bool):
        rank = ', with its rank as overrides={"policy.lora.r": 8}'
        raise UserError(f"cosmos_rl.{name}: lora: found {lora!r}; allowed: True or False{rank}")


# ---- the run -----------------------------------------------------------------------------------------------------


def _train(config: Config, name: str, data: DataForm | None, **given: Any) -> FinishedRun:
    """Train in this process as `worker_entry.main` would."""
    config = accept(config, data, own_script=True)
    os.environ.setdefault("COSMOS_ROLE", "Controller")
    stop = StopRequest()
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():  # no other one may handle signals
            stack.enter_context(listen(stop))
        run = stack.enter_context(prepare_run(config, [f"cosmos_rl.{name}"], own_data=data is None))
        try:
            code = run_job(config, run, stop=stop, **given)
        except OutOfMemory as error:
            raise UserError(explain_out_of_memory(config, error)) from error
    return FinishedRun(run.root, code != 0, config.policy.model_name_or_path)


def _pairs(config: Config) -> LocalPairs | Folders:
    return load_training_pairs(config)


def _prompts(config: Config) -> Sequence[Any]:
    return load_prompts(config.train.train_policy.dataset, "train.train_policy.dataset", split="train")


def _val_prompts(config: Config) -> Sequence[Any]:
    return load_prompts(config.validation.dataset, "validation.dataset", split="test")
