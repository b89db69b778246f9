"""The entry that training scripts call: `main(dataset=...)` runs the job that `--config` describes."""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_rl.errors import OutOfMemory, UserError
from cosmos_rl.launcher.arguments import split_overrides
from cosmos_rl.launcher.environment import check_environment, with_absolute_paths
from cosmos_rl.launcher.machine import gpus
from cosmos_rl.launcher.prepare import prepared_run, refuse_unbuilt
from cosmos_rl.launcher.resume import resume_from
from cosmos_rl.launcher.signals import EXIT_FAILED, StopRequest
from cosmos_rl.launcher.supervised import supervised, tell
from cosmos_rl.policy.config import Config, GrpoPolicyConfig, load_config, world_size
from cosmos_rl.policy.config.ranks import has_unbuilt_ranks, resized
from cosmos_rl.reward import RewardFns
from cosmos_rl.storage.disk import report_full_disk
from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.utils.logging import logger

_WITHOUT_EFFECT = (
    "dataloader",
    "data_packer",
    "val_data_packer",
    "sampler",
    "batch_sampler",
    "val_sampler",
    "val_batch_sampler",
    "filter_reward_fns",
)


def main(
    *,
    dataset: object | None = None,
    val_dataset: object | None = None,
    custom_logger_fns: Sequence[Callable[[dict[str, Any], int], None]] | None = None,
    hook_fns: Mapping[str, Callable[..., None]] | None = None,
    reward_fns: RewardFns | None = None,
    val_reward_fns: RewardFns | None = None,
    args: argparse.Namespace | None = None,
    **others: object,
) -> None:
    """Train as the configuration says; the process ends here when the code is not 0.

    Args:
        dataset: a dataset, or a function that makes it from the configuration.
        val_dataset: the same for validation.
        custom_logger_fns: called as `fn(metrics, step)` on rank 0.
        hook_fns: hook name to function, see the customisation page.
        reward_fns: functions that score samples for reinforcement learning, pairs `(function, weight)`, or either of
            them by name; they take the place of those in `train.train_policy.local_reward`. See the rewards page.
        val_reward_fns: the same for validation; without it as in training.
        args: the script's parsed arguments, when it has options of its own; `args.config` is used if present.
        others: further documented arguments have no effect yet and are refused; unknown ones are named in a warning.
    """

    def train(stop: StopRequest) -> int:
        _refuse(others)
        with _config_and_run(args) as (config, run):
            rewards = _reward_arguments(config, reward_fns, val_reward_fns)
            # The trainer pulls in torch and diffusers: seconds, so only once everything else is known to be right.
            from cosmos_rl.policy.trainer import run as run_trainer

            restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            try:
                return run_trainer(
                    config,
                    run,
                    dataset=dataset,
                    val_dataset=val_dataset,
                    custom_logger_fns=custom_logger_fns or (),
                    hook_fns=hook_fns,
                    resume_from=resume_from(config, run, restarts),
                    stop=stop,
                    **rewards,
                )
            except OutOfMemory as error:
                from cosmos_rl.launcher import out_of_memory  # with all of `check`, which no other run needs

                traceback.print_exc()
                on_cpu = config.train.device == "cpu" or gpus() == 0
                tell(out_of_memory.told(config, error.phase, on_cpu=on_cpu))
                return EXIT_FAILED

    supervised(train)


def _reward_arguments(config: Config, train: RewardFns | None, validation: RewardFns | None) -> dict[str, Any]:
    """The trainer's arguments for rewards; a job without rewards has none."""
    if isinstance(config.train.train_policy, GrpoPolicyConfig):
        return {"reward_fns": train, "val_reward_fns": validation}
    given = [name for name, value in {"reward_fns": train, "val_reward_fns": validation}.items() if value is not None]
    if given:
        raise UserError(f'worker_entry.main: {", ".join(given)}: only with train.train_policy.type = "grpo"')
    return {}


def _refuse(others: Mapping[str, object]) -> None:
    given = [name for name, value in others.items() if value is not None]
    unused = [name for name in given if name in _WITHOUT_EFFECT]
    if unused:
        raise UserError(f"worker_entry.main: not usable yet: {', '.join(unused)}; leave out what is named here")
    unknown = [name for name in given if name not in _WITHOUT_EFFECT]
    if unknown:
        logger.warning("worker_entry.main: unknown arguments are ignored: %s", ", ".join(unknown))


@contextlib.contextmanager
def _config_and_run(args: argparse.Namespace | None) -> Iterator[tuple[Config, RunFolder]]:
    """Started by the launcher, the run folder is given; a script started by hand is one rank and prepares its own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    own, rest = parser.parse_known_args()
    path = getattr(args, "config", None) or own.config
    if path is None:
        raise UserError("no configuration: start with `cosmos-rl --config X.toml SCRIPT` or add `--config X.toml`")
    run_dir = os.environ.get("COSMOS_RUN_DIR")
    if run_dir:
        run = RunFolder(Path(run_dir))
        with report_full_disk(run.root):
            yield named(load_config(path), run), run
        return
    if os.environ.get("WORLD_SIZE", "1") != "1":  # each rank would make a run folder of its own
        raise UserError("several ranks are started with `cosmos-rl --nproc-per-node N --config X.toml SCRIPT`")
    from cosmos_rl.launcher.check import refuse_what_cannot_run  # the launcher does it for all others

    os.environ.setdefault("COSMOS_ROLE", "Controller")
    config = load_config(path, split_overrides(rest)[0], sized=_one_rank)
    refuse_unbuilt(config)
    check_environment(config, None)
    refuse_what_cannot_run(config, on_cpu=config.train.device == "cpu" or gpus() == 0, own_data=True)
    config = with_absolute_paths(config)
    with prepared_run(config, sys.argv) as run:
        yield named(config, run), run


def _one_rank(config: Config) -> Config:
    asked = world_size(config.policy.parallelism)
    if asked in (0, 1) or has_unbuilt_ranks(config.policy.parallelism):  # errors that are named elsewhere
        return config
    logger.warning(
        "started without cosmos-rl: 1 rank, policy.parallelism.dp_shard_size = 1 in place of "
        f"{config.policy.parallelism.dp_shard_size}; `cosmos-rl --nproc-per-node N` runs N ranks"
    )
    return resized(config, 1)


def named(config: Config, run: RunFolder) -> Config:
    """Loggers and trackers name the run by its start time, also when the configuration left it open."""
    train = config.train.model_copy(update={"timestamp": run.name})
    return config.model_copy(update={"train": train})
