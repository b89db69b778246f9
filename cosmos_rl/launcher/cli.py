"""The `cosmos-rl` command. Imports no torch until workers are started."""

import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Sequence

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.arguments import DEFAULT_MODULE, Launch, parse_launch, worker_command
from cosmos_rl.launcher.environment import check_environment, with_absolute_paths
from cosmos_rl.launcher.output import output_to
from cosmos_rl.launcher.prepare import prepared_run, refuse_unbuilt
from cosmos_rl.launcher.signals import EXIT_USER_ERROR, StopRequest, listening
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.utils.logging import logger

# verb -> where its function is, and one line for the help text; imported only when it is used
VERBS: dict[str, tuple[str, str]] = {
    "export": ("cosmos_rl.launcher.verbs:export", "turn a checkpoint into a folder that diffusers loads"),
    "sample": ("cosmos_rl.launcher.verbs:sample", "make pictures from a pipeline or an exported adapter"),
    "tiny-model": ("cosmos_rl.launcher.verbs:tiny_model", "write a tiny model folder to try things with"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code (0, 1, 2, 75 or 130)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv and argv[0] in VERBS:
            return _verb(argv[0])(argv[1:])
        return launch(parse_launch(argv, _version(), _verb_help()), ["cosmos-rl", *argv])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except SystemExit as end:  # argparse ends the process itself for --help, --version and misuse
        return end.code if isinstance(end.code, int) else EXIT_USER_ERROR


def launch(asked: Launch, argv: Sequence[str]) -> int:
    """Check, prepare and run one training job; returns its exit code."""
    if asked.debug:
        logger.setLevel(logging.DEBUG)
    config = _sized(load_config(asked.config, asked.overrides), asked.nproc_per_node)
    refuse_unbuilt(config)
    check_environment(config, pairs=asked.script == DEFAULT_MODULE)
    config = with_absolute_paths(config)
    script = worker_command(asked.script)
    stop = StopRequest()
    with listening(stop), prepared_run(config, argv) as run:
        command = [sys.executable, *script, *asked.script_args, "--config", str(run.config)]
        environment = {"COSMOS_RUN_DIR": str(run.root)}
        if asked.debug:
            environment["COSMOS_LOG_LEVEL"] = "DEBUG"
        with output_to(asked.log_dir) as log:
            from cosmos_rl.launcher.agent import run_workers  # imports torch: seconds

            code, failure = run_workers(
                command,
                environment=environment,
                stop=stop,
                nproc=asked.nproc_per_node or 1,
                max_restarts=asked.max_restarts,
                debug=asked.debug,
            )
    if failure:
        where = f"its output is in {log.path}, the end of it:\n{log.tail()}" if log else "its output is above"
        print(f"error: {failure}; {where}", file=sys.stderr, flush=True)
    return code


def _sized(config: Config, nproc: int | None) -> Config:
    """The configuration for `nproc` ranks: dp_shard_size takes up the difference."""
    if nproc is None:
        return config
    parallelism = config.policy.parallelism
    rest = parallelism.tp_size * parallelism.cp_size * parallelism.pp_size * parallelism.dp_replicate_size
    if nproc % rest:
        raise UserError(
            f"--nproc-per-node {nproc} is not a multiple of {rest}, the product of the other parallel sizes"
        )
    if parallelism.dp_shard_size == nproc // rest:
        return config
    logger.info("--nproc-per-node %d: policy.parallelism.dp_shard_size = %d", nproc, nproc // rest)
    resized = parallelism.model_copy(update={"dp_shard_size": nproc // rest})
    return config.model_copy(update={"policy": config.policy.model_copy(update={"parallelism": resized})})


def _verb(name: str) -> Callable[[Sequence[str]], int]:
    module, _, function = VERBS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)


def _verb_help() -> str:
    width = max(map(len, VERBS))
    return "\n".join(["verbs:", *(f"  {name:{width}}  {text}" for name, (_, text) in VERBS.items())])


def _version() -> str:
    try:
        return importlib.metadata.version("cosmos-rl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


if __name__ == "__main__":
    sys.exit(main())
