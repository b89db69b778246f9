"""DiffusionNFT jobs on a tiny pipeline: in this process, or in forked ones that cost no imports."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from cosmos_rl.checkpoint.layout import policy_dir
from cosmos_rl.diffusion.sampling import Sampled
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.policy.config.ranks import with_world_size
from cosmos_rl.policy.model.diffusers.diffuser_model import DiffuserModel
from cosmos_rl.policy.model.diffusers.flow_model import FlowModel
from cosmos_rl.policy.trainer import run
from cosmos_rl.policy.trainer.rl import batch as batches
from cosmos_rl.policy.trainer.rl.algorithm import Algorithm, Rows, Share
from cosmos_rl.policy.trainer.rl.build import build_online
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.policy.trainer.task import StepReport
from cosmos_rl.rollout.sampler import Rollouts, RolloutSampler, Sample
from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.tools.dataset.diffusion_nft import training_prompts, validation_prompts
from tests.support.open_tasks import close_after_test
from tests.support.patience import wait_until
from tests.support.ranks import free_port
from tests.support.trainer_runs import Stop, bundled_data, train, train_task

PROMPTS = ("a red square", "a lost cat", "a dog", "four birds", "a boat", "the sea", "a lost key", "blue paint")
SETS = "train.train_policy.dataset.sets"
PRELOADED = (  # what a job imports, much of it late
    "tests.support.nft_runs",
    "cosmos_rl.policy.trainer.loop",
    "cosmos_rl.policy.model.diffusers.sd3_model",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "transformers.models.clip.modeling_clip",
    "transformers.models.t5.modeling_t5",
    "torch.distributed.checkpoint",
)
LORA = """
[policy.lora]
r = 4
lora_alpha = 8
lora_names = ["default", "old"]
init_lora_weights = "gaussian"
target_modules = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
"""


def prompt_file(folder: Path, prompts: Sequence[str] = PROMPTS, name: str = "prompts.txt") -> Path:
    """A file with one prompt a line."""
    path = folder / name
    path.write_text("\n".join(prompts))
    return path


def set_options(folder: Path, *rows: dict[str, Any], steps: int | None = 6) -> tuple[str, ...]:
    """Options of two files of 5 and 3 prompts as sets, with further keys of each."""
    first = prompt_file(folder, [f"a {i}" for i in range(5)], "first.txt")
    second = prompt_file(folder, [f"b {i}" for i in range(3)], "second.txt")
    tables = [{"local_dir": str(file), **row} for file, row in zip((first, second), rows or ({}, {}), strict=True)]
    written = ", ".join("{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in row.items()) + "}" for row in tables)
    options = ('--train.train_policy.dataset.local_dir=""', f"--{SETS}=[{written}]")
    return (*options, f"--train.max_num_steps={'none' if steps is None else steps}")


def image_prompts(folder: Path, *, missing: bool = False) -> Path:
    """A file of two prompts that each start from an image next to it."""
    rows = []
    for number, text in enumerate(("a red square", "the sea")):
        pixels = np.random.default_rng(number).integers(0, 256, (48, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append({"prompt": text, "image": "gone.png" if missing else f"{number}.png"})
    path = folder / "conditioned.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def nft_job(folder: Path, reward: str = "smooth") -> str:
    """Lines of `[train.train_policy]`: prompts and a local reward."""
    return f"""type = "grpo"
trainer_type = "diffusion_nft"
uncentralized_training = true
mini_batch = 4
kl_beta = 1e-2
dataset.local_dir = "{prompt_file(folder)}"
local_reward.reward_fns = [{{ function = "tests.support.nft_rewards:{reward}" }}]
reward_hacking_guard.enable = false"""


def nft_toml(folder: Path, base: Path, *, lora: bool = True, reward: str = "smooth", extra: str = "") -> Path:
    """A small job: 4 prompts x 4 samples per step, 4 sampling steps of which 2 are trained, 3 training steps."""
    path = folder / f"{'lora' if lora else 'full'}.toml"
    path.write_text(f"""
mode = "colocated"
[policy]
model_name_or_path = "{base}"
is_diffusers = true
model_gradient_checkpointing = false
[policy.diffusers]
inference_size = [32, 32]
max_prompt_length = 12
timesteps_fraction = 0.5
weight_copy_decay_type = 1
[policy.diffusers.sample]
num_steps = 4
guidance_scale = 1.0
solver = "dpm2"
deterministic_sampling = true
{LORA if lora else ""}
[rollout]
n_generation = 4
[train]
output_dir = "{folder / "out"}"
epoch = 100
max_num_steps = 3
train_batch_per_replica = 16
param_dtype = "float32"
optm_lr = 1e-3
optm_warmup_steps = 0
ema_decay = 0.9
[train.ckpt]
save_freq = 1
max_keep = -1
export_safetensors = false
[train.train_policy]
{nft_job(folder, reward)}
{extra}
""")
    return path


def nft_train(config: Path, *overrides: str, **kwargs: Any) -> Path:
    """`train` with prompts."""
    return train(config, *overrides, **{"dataset": training_prompts, "val_dataset": validation_prompts, **kwargs})


def nft_train_task(
    config: Path, *overrides: str, prepare: Callable[[OnlineTask], None] | None = None, **kwargs: Any
) -> tuple[Path, OnlineTask]:
    """`train_task` with prompts; ``prepare`` may replace parts of the task before it starts."""
    data = {"dataset": training_prompts, "val_dataset": validation_prompts}

    def build(*args: Any, **options: Any) -> OnlineTask:
        task = close_after_test(build_online(*args, **options))
        if prepare is not None:
            prepare(task)
        return task

    return train_task(build, config, *overrides, **{**data, **kwargs})


def nft_trainer(config: Path, *overrides: str, start: bool = True, **kwargs: Any) -> OnlineTask:
    """A task of one rank at its first step."""
    given = {"dataset": training_prompts, "val_dataset": validation_prompts, **kwargs}
    trainer = close_after_test(
        build_online(load_config(config, list(overrides)), Context(torch.device("cpu")), **given)
    )
    if start:
        trainer.start(0)
    return trainer


class RecordingAlgorithm:
    """An algorithm that keeps the rows that it made."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.seen: list[Rows] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def rows(self, share: Share, **options: Any) -> Rows:
        self.seen.append(self._algorithm.rows(share, **options))
        return self.seen[-1]


def record_rows(task: OnlineTask) -> list[Rows]:
    """Fills with the rows of each optimiser step."""
    recording = RecordingAlgorithm(task.algorithm)
    task.algorithm = recording  # type: ignore[assignment]
    return recording.seen


# ---- what a job did ------------------------------------------------------------------------------------------------


@dataclass
class StepRecord:
    """One training step as one rank saw it."""

    prompts: list[str] = field(default_factory=list)
    """Of all samples of the step."""
    advantages: list[float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    noise: dict[str, str] = field(default_factory=dict)
    """Sample id -> digest of its start noise; of this rank's samples."""
    calls: int = 0
    """Forward passes of the transformer."""


@contextlib.contextmanager
def recorded() -> Iterator[list[StepRecord]]:
    """What the training steps inside the block do."""
    steps: list[StepRecord] = []
    noises: list[str] = []
    train_step, score, sample = OnlineTask.train_step, batches.score_batch, RolloutSampler.sample
    integrate, predict = FlowModel._integrate, DiffuserModel.predict

    def our_step(self: OnlineTask, step: int) -> StepReport:
        steps.append(StepRecord())
        return train_step(self, step)

    def our_score(samples: Sequence[Sample], *args: Any, **kwargs: Any) -> batches.ScoredBatch:
        found = score(samples, *args, **kwargs)
        steps[-1].prompts = [sample.prompt for sample in samples]
        steps[-1].advantages, steps[-1].kept = found.advantage_N.tolist(), found.kept_N.tolist()
        return found

    def our_sample(
        self: RolloutSampler, samples: Sequence[Sample], conditions: Any, purpose: str, *more: Any
    ) -> Rollouts:
        noises.clear()
        made = sample(self, samples, conditions, purpose, *more)
        if steps and purpose.startswith("rollout"):
            steps[-1].noise |= {str(sample.sample_id): noise for sample, noise in zip(samples, noises, strict=True)}
        return made

    def our_integrate(self: FlowModel, cond: Any, noise: torch.Tensor, *args: Any, **kwargs: Any) -> Sampled:
        noises.extend(hashlib.sha1(row.numpy().tobytes()).hexdigest() for row in noise)
        return integrate(self, cond, noise, *args, **kwargs)

    def our_predict(self: DiffuserModel, *args: Any) -> torch.Tensor:
        if steps:
            steps[-1].calls += 1
        return predict(self, *args)

    patched: list[tuple[Any, str, Any, Any]] = [
        (OnlineTask, "train_step", train_step, our_step),
        (batches, "score_batch", score, our_score),
        (RolloutSampler, "sample", sample, our_sample),
        (FlowModel, "_integrate", integrate, our_integrate),
        (DiffuserModel, "predict", predict, our_predict),
    ]
    for owner, name, _, ours in patched:
        setattr(owner, name, ours)
    try:
        yield steps
    finally:
        for owner, name, stock, _ in patched:
            setattr(owner, name, stock)


# ---- jobs in processes of their own --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A run of some ranks into ``folder``."""

    config: Path
    folder: Path
    overrides: tuple[str, ...] = ()
    resume_step: int = 0
    killed_after: int | None = None
    """Rank 0 kills itself after this step, before a save; None: never."""


def settings(job: Job, ranks: int) -> Config:
    """The job's configuration for so many ranks."""
    return load_config(job.config, list(job.overrides), fit=lambda config: with_world_size(config, ranks))


def run_here(job: Job, ranks: int = 1, rank: int = 0) -> None:
    """Run the job as one of its ranks and leave ``record_<rank>.json`` in its folder."""
    folder = RunFolder(job.folder)
    resume_from = policy_dir(folder.checkpoints, job.resume_step) if job.resume_step else None

    def kill_after_step(_: dict[str, Any], step: int) -> None:
        if step == job.killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    with recorded() as steps:
        config = settings(job, ranks)
        run(
            config,
            folder,
            **bundled_data(config),
            custom_logger_fns=[kill_after_step],
            resume_from=resume_from,
            stop=Stop(),
        )
    (job.folder / f"record_{rank}.json").write_text(json.dumps([asdict(step) for step in steps]))


def record_of(folder: Path, rank: int = 0) -> list[StepRecord]:
    """What a rank left."""
    return [StepRecord(**step) for step in json.loads((folder / f"record_{rank}.json").read_text())]


def _as_rank(jobs: Sequence[Job], rank: int, ranks: int, port: int, log: Path) -> None:
    """The life of a forked process: one rank of all ``jobs``, one after the other."""
    os.setsid()
    with log.open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()})
        torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    for job in jobs:
        run_here(job, ranks, rank)
    sys.stdout.flush()


def forked(jobs: Sequence[Job], ranks: int, logs: Path) -> list[BaseProcess]:
    """Start the jobs; each rank is forked from a server that has imported everything, in a process group of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    port = free_port()
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(ranks):
        arguments = (jobs, rank, ranks, port, logs / f"{ranks}_{rank}.log")
        processes.append(context.Process(target=_as_rank, args=arguments, daemon=True))
        processes[-1].start()
    return processes


def run_forked(jobs: Sequence[Job], ranks: int, logs: Path) -> None:
    """Run the jobs to their end; fails with the output of the ranks that failed."""
    processes = forked(jobs, ranks, logs)
    for process in processes:
        wait_until(lambda process=process: process.exitcode is not None, "the end of a rank")
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    failures = [
        f"rank {rank}: {code}\n{(logs / f'{ranks}_{rank}.log').read_text()[-3000:]}"
        for rank, code in enumerate(codes)
        if code != 0
    ]
    assert not failures, "\n".join(failures)


def moved_away(trainer: OnlineTask) -> OnlineTask:
    """Trained weights that differ from the old policy's, as after some steps."""
    with torch.no_grad():
        for name, param in trainer.params.items():
            noise = torch.randn(param.shape, generator=randomness.generator(0, name))
            param.add_(0.02 * noise)
    trainer.policies.old_equals_current = False
    return trainer
