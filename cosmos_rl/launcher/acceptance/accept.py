"""Whether a valid configuration can run here: the only place that refuses one. No torch."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.environment import inspect_environment
from cosmos_rl.launcher.acceptance.families import unsupported_family
from cosmos_rl.launcher.acceptance.length import RunLength, run_length
from cosmos_rl.launcher.acceptance.media_size import media_problems
from cosmos_rl.launcher.acceptance.optimizer import optimizer_problems
from cosmos_rl.launcher.acceptance.paths import with_absolute_paths
from cosmos_rl.launcher.acceptance.selection import Selection, select
from cosmos_rl.launcher.acceptance.teachers import teacher_problems
from cosmos_rl.launcher.geometry import find_geometry, frames_of
from cosmos_rl.launcher.pipeline_files import PipelineFiles, Unknown, read_pipeline
from cosmos_rl.launcher.pipeline_source import call_defaults, supports_recomputing
from cosmos_rl.policy.config import Config, unsupported_settings
from cosmos_rl.policy.config.jobs import DataForm, job_kind, latents_keys, online_table
from cosmos_rl.policy.config.model_rules import latents_problem, offload_problem, switch_problems
from cosmos_rl.policy.config.recorded import recorded_problem
from cosmos_rl.policy.config.reward_names import reward_rules
from cosmos_rl.policy.model.context_plans import find_problem
from cosmos_rl.policy.model.single_file import find_single_file


@dataclass(frozen=True)
class ModelFiles:
    """The pipeline as its files describe it, and what of it is trained."""

    pipeline: PipelineFiles
    selection: Selection


def read_model(config: Config) -> ModelFiles:
    """What the files of the pipeline hold.

    Raises:
        Unknown: they are not there, or not in a form that can be read without loading them.
    """
    pipeline = read_pipeline(config.policy)
    return ModelFiles(pipeline, select(config, pipeline))


def accept(config: Config, data: DataForm | None, *, own_script: bool) -> Config:
    """The configuration as it will run, with absolute paths.

    Args:
        config: a valid one, for the ranks that will run.
        data: what its data folders hold; None: the caller brings the data.
        own_script: a script or program of the user's, which may register model classes and give reward functions.

    Raises:
        UserError: names everything that speaks against the run: parts that are not supported, else what is missing on
            this machine, else what the files of model and data show.
    """
    problems = unsupported_parts(config, own_script=own_script)
    if not problems:
        problems, _ = inspect_environment(config, data)
    if not problems:
        model = None
        with suppress(Unknown):
            model = read_model(config)
        length = run_length(config, own_data=data is None)
        problems = list(find_problems(config, data, model, length, own_script=own_script))
    if problems:
        raise UserError("\n".join(problems))
    return with_absolute_paths(_with_pipeline_folder(config))


def _with_pipeline_folder(config: Config) -> Config:
    """The configuration with the pipeline folder that is made of a transformer in one file and its base.

    Only then torch is loaded.
    """
    single = find_single_file(config.policy)
    if single is None:
        return config
    from cosmos_rl.policy.model.assembled import assemble

    folder = assemble(single, Path(config.train.output_dir).expanduser().absolute() / "single_files")
    used = {"model_name_or_path": str(folder), "single_file_base": None, "single_file_low_noise": None}
    policy = config.policy.model_copy(update=used)
    return config.model_copy(update={"policy": policy})


def unsupported_parts(config: Config, *, own_script: bool) -> list[str]:
    """What this version cannot run, one line each."""
    lines = unsupported_settings(config)
    if not own_script:
        lines += unsupported_family(config.policy)
    return [f"not supported yet: {line}" for line in lines]


def find_problems(
    config: Config, data: DataForm | None, model: ModelFiles | None, length: RunLength, *, own_script: bool
) -> Iterator[str]:
    """What speaks against a run in the files of model and data. `model`: None where they cannot be read."""
    if model is not None:
        yield from model.selection.problems
        yield from _denoiser_problems(config, model.pipeline)
        yield from media_problems(config, model.pipeline)
        yield from _switch_problems(config, model.pipeline.class_name)
        yield from _peer_problems(config, model.pipeline)
        yield from _offload_problems(config, model.pipeline)
        yield from _payload_problems(config, model.pipeline)
        yield from _recorded_problems(config, model.pipeline)
        yield from teacher_problems(config, model.pipeline)
    yield from optimizer_problems(config)
    if data is not None:
        yield from _data_problems(config, data)
    if job_kind(config).online and not own_script and not _has_rewards(config):
        yield (
            "no reward: set train.train_policy.use_remote_reward = true, name functions in "
            "train.train_policy.local_reward, or start a script that gives reward_fns"
        )
    elif job_kind(config).online and not own_script:
        yield from reward_rules(config)
    if length.steps_per_epoch == 0:
        fewer = "train.train_policy.dataset.test_size or " if length.held_out else ""
        yield (
            f"train.train_policy.dataset.local_dir: {length.samples} {job_kind(config).items}, {length.held_out} of "
            f"them held out, make no whole step of {length.batch} samples; lower {fewer}the batch or set "
            "train.train_policy.dataloader_drop_last = false"
        )


def _denoiser_problems(config: Config, pipeline: PipelineFiles) -> Iterator[str]:
    wanted, found = config.policy.diffusers.trained_denoiser, pipeline.experts
    if wanted not in ("all", *found):
        yield (
            f'policy.diffusers.trained_denoiser = "{wanted}": {config.policy.model_name_or_path} has '
            f'{" and ".join(found)}; set it to "all" or one of them'
        )


def _switch_problems(config: Config, pipeline_class: str) -> list[str]:
    arguments = call_defaults(pipeline_class)
    if not arguments:
        return []  # a class of the user's own
    return switch_problems(config.policy.diffusers, pipeline_class, arguments)


def _peer_problems(config: Config, pipeline: PipelineFiles) -> Iterator[str]:
    """Whether the tokens of the denoisers, and their attention heads, can be split over context-parallel ranks."""
    size, configs = config.policy.parallelism.cp_size, pipeline.configs
    found = (find_problem(pipeline.class_of(name), configs[name], size) for name in pipeline.experts if name in configs)
    yield from dict.fromkeys(problem for problem in found if problem is not None)


def _offload_problems(config: Config, pipeline: PipelineFiles) -> Iterator[str]:
    """Whether the frozen base can rest in host memory; of classes that are not in diffusers the names of the weights
    alone are known."""
    if not config.train.base_offload:
        return
    for name in pipeline.experts:
        kind = pipeline.class_of(name)
        recomputes = supports_recomputing(kind) is not False
        if problem := offload_problem(kind, pipeline.parts[name], recomputes=recomputes):
            yield problem
            return  # experts are alike


def _data_problems(config: Config, data: DataForm) -> Iterator[str]:
    dataset, key = config.train.train_policy.dataset, "train.train_policy.dataset.local_dir"
    if dataset.local_dir or dataset.folders or dataset.sets:
        return
    if data == "pairs":
        yield f"{key}: missing; give the folder of training images"
    elif data == "preferences":
        yield f"{key}: missing; give the folder of the chosen images, or a .jsonl file of preferences"
    elif not dataset.name:
        yield f"{key}: missing; give a file of prompts, or a prompt set as train.train_policy.dataset.name"


def _payload_problems(config: Config, pipeline: PipelineFiles) -> Iterator[str]:
    """Whether the reward service can decode what it is to get."""
    if not job_kind(config).online:
        return
    model, is_video = config.policy.model_name_or_path, config.policy.diffusers.is_video
    channels = pipeline.configs.get("vae", {}).get("z_dim")
    for key in latents_keys(config):
        problem = latents_problem(key, model, pipeline.class_of("vae"), channels, is_video=is_video)
        if problem is not None:
            yield problem


def _recorded_problems(config: Config, pipeline: PipelineFiles) -> Iterator[str]:
    """Whether the recorded sampling steps are too large; of sizes that are not known the trainer says so."""
    if not job_kind(config).online:
        return
    media = (*config.policy.diffusers.largest_size, frames_of(config))
    with suppress(Unknown):
        problem = recorded_problem(config, math.prod(find_geometry(pipeline).latent_shape(*media)))
        if problem is not None:
            yield problem


def _has_rewards(config: Config) -> bool:
    job = online_table(config)
    remote = job.use_remote_reward and job.remote_reward.reward_fns
    return bool(job.bypass_reward or remote or job.local_reward.reward_fns)
