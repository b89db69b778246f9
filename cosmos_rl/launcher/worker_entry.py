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
from cosmos_rl.launcher.acceptance.accept import accept
from cosmos_rl.launcher.arguments import split_overrides
from cosmos_rl.launcher.prepare import prepare_run
from cosmos_rl.launcher.ranks.signals import EXIT_FAILED, StopRequest
from cosmos_rl.launcher.ranks.worker_process import report_error, supervise
from cosmos_rl.launcher.run_job import explain_out_of_memory, run_job
from cosmos_rl.policy.config import Config, load_config, world_size
from cosmos_rl.policy.config.jobs import job_kind
from cosmos_rl.policy.config.ranks import describe_changes, has_unsupported_ranks, with_world_size
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
            rewards = {"reward_fns": reward_fns, "val_reward_fns": val_reward_fns}
            _check_rewards(config, rewards)
            try:
                return run_job(
                    config,
                    run,
                    stop=stop,
                    restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
                    dataset=dataset,
                    val_dataset=val_dataset,
                    custom_logger_fns=custom_logger_fns or (),
                    hook_fns=hook_fns,
                    **rewards,
                )
            except OutOfMemory as error:
                traceback.print_exc()
                report_error(explain_out_of_memory(config, error))
                return EXIT_FAILED

    supervise(train)


def _check_rewards(config: Config, rewards: Mapping[str, RewardFns | None]) -> None:
    given = [name for name, value in rewards.items() if value is not None]
    if given and not job_kind(config).online:
        raise UserError(f'worker_entry.main: {", ".join(given)}: only with train.train_policy.type = "grpo"')


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
            yield load_config(path), run
        return
    if os.environ.get("WORLD_SIZE", "1") != "1":  # each rank would make a run folder of its own
        raise UserError("several ranks are started with `cosmos-rl --nproc-per-node N --config X.toml SCRIPT`")
    os.environ.setdefault("COSMOS_ROLE", "Controller")
    config = load_config(path, split_overrides(rest)[0], fit=_one_rank)
    config = accept(config, None, own_script=True)
    with prepare_run(config, sys.argv, own_data=True) as run:
        yield config, run


def _one_rank(config: Config) -> Config:
    ranks = world_size(config.policy.parallelism)
    if ranks in (0, 1) or has_unsupported_ranks(config.policy.parallelism):  # errors that are named elsewhere
        return config
    alone = with_world_size(config, 1)
    changes = describe_changes(config.policy.parallelism, alone.policy.parallelism)
    logger.warning(f"started without cosmos-rl: 1 rank, {changes}; `cosmos-rl --nproc-per-node N` runs N ranks")
    return alone
