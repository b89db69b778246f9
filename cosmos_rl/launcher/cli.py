"""The `cosmos-rl` command. Imports no torch until workers are started."""

import importlib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.arguments import DEFAULT_MODULE, Launch, parse_launch, worker_command
from cosmos_rl.launcher.environment import check_environment, with_absolute_paths
from cosmos_rl.launcher.machine import gpus
from cosmos_rl.launcher.output import output_to
from cosmos_rl.launcher.prepare import prepared_run, refuse_unbuilt
from cosmos_rl.launcher.signals import EXIT_USER_ERROR, StopRequest, listening
from cosmos_rl.launcher.sizing import sized
from cosmos_rl.policy.config import Config, load_config, notes, world_size
from cosmos_rl.utils.logging import logger

# verb -> where its function is, and one line for the help text; imported only when it is used
VERBS: dict[str, tuple[str, str]] = {
    "check": ("cosmos_rl.launcher.check:check", "is a configuration right; its batches, memory and disk"),
    "doctor": ("cosmos_rl.launcher.doctor:doctor", "is everything installed; with --config: does the model train"),
    "export": ("cosmos_rl.launcher.verbs:export", "turn a checkpoint into a folder that diffusers loads"),
    "sample": ("cosmos_rl.launcher.verbs:sample", "make pictures from a pipeline or an exported adapter"),
    "schema": ("cosmos_rl.launcher.verbs:schema", "print all configuration keys (JSON schema, Markdown or TOML)"),
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
    config = load_config(
        asked.config, asked.overrides, sized=lambda config: sized(config, asked.nproc_per_node, gpus())
    )
    config = _of_named_run(config, Path(asked.config))
    refuse_unbuilt(config)
    for note in notes(config):
        logger.info(note)
    check_environment(config, pairs=asked.script == DEFAULT_MODULE)
    config = with_absolute_paths(config)
    script = worker_command(asked.script)
    stop = StopRequest()
    with listening(stop), prepared_run(config, argv) as run:
        command = [sys.executable, *script, *asked.script_args, "--config", str(run.next / run.config.name)]
        environment = {"COSMOS_RUN_DIR": str(run.root)}
        if asked.debug:
            environment["COSMOS_LOG_LEVEL"] = "DEBUG"
        with output_to(asked.log_dir) as log:
            from cosmos_rl.launcher.agent import run_workers  # imports torch: seconds

            code, failure = run_workers(
                command,
                environment=environment,
                stop=stop,
                nproc=world_size(config.policy.parallelism),
                max_restarts=asked.max_restarts,
                debug=asked.debug,
            )
    if failure:
        where = f"its output is in {log.path}, the end of it:\n{log.tail()}" if log else "its output is above"
        print(f"error: {failure}; {where}", file=sys.stderr, flush=True)
    return code


def _of_named_run(config: Config, place: Path) -> Config:
    """`--config <run folder>` with `train.resume = true` goes on in that run, not in the newest of its folder."""
    if not place.is_dir() or config.train.resume is not True or config.train.timestamp:
        return config
    if not re.fullmatch(r"\d{14}", place.resolve().name):
        return config
    train = config.train.model_copy(update={"timestamp": place.resolve().name})
    return config.model_copy(update={"train": train})


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
