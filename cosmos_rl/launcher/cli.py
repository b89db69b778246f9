"""The `cosmos-rl` command. Imports no torch until workers are started."""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from cosmos_rl import __version__
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.flags import launch_parser
from cosmos_rl.launcher.ranks.signals import EXIT_FAILED, EXIT_USER_ERROR
from cosmos_rl.utils.logging import print_anything

# subcommand -> where its function is, and one line for the help text; imported only when it is used
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "check": (
        "cosmos_rl.launcher.check.command:check",
        "validate a configuration and print batch, memory and disk estimates",
    ),
    "check-model": (
        "cosmos_rl.launcher.check.check_model:check_model",
        "test whether a pipeline trains without code",
    ),
    "create-prompts": (
        "cosmos_rl.launcher.commands:create_prompts",
        "write a caption file for every video of a folder",
    ),
    "doctor": (
        "cosmos_rl.launcher.doctor.command:doctor",
        "check the installation; with --config, whether the model trains",
    ),
    "export": ("cosmos_rl.launcher.commands:export", "turn a checkpoint into what diffusers or another tool loads"),
    "import": ("cosmos_rl.launcher.commands:import_weights", "make a pipeline folder of Cosmos-Predict2.5's .pt file"),
    "prompts": (
        "cosmos_rl.launcher.prompt_lists:prompts",
        "list the published prompt sets, their digests and whether they are here",
    ),
    "report": ("cosmos_rl.launcher.commands:report", "write report.html, one page about a run"),
    "sample": ("cosmos_rl.launcher.commands:sample", "make images or videos from a pipeline or an exported adapter"),
    "schema": ("cosmos_rl.launcher.commands:schema", "print all configuration keys (JSON schema, Markdown or TOML)"),
    "translate": ("cosmos_rl.launcher.commands:translate", "print the present form of an older configuration"),
    "watch": ("cosmos_rl.launcher.watching:watch", "show runs on a live page while they train"),
    "tiny-model": ("cosmos_rl.launcher.commands:tiny_model", "write a tiny model folder to try things with"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code (0, 1, 2, 75 or 130)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    print_anything()
    try:
        if argv and argv[0] in SUBCOMMANDS:
            return _run_subcommand(_load_subcommand(argv[0]), argv[1:])
        if argv and argv[0] in ("-h", "--help", "--version"):
            launch_parser(__version__, _subcommand_help()).parse_args(argv[:1])
        if argv and argv[0].isidentifier():
            raise UserError(_describe_unknown(argv[0]))
        return _launch(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except PermissionError as error:  # any path that a user names may lie where this user may not look
        if error.filename is None:  # of no path, as of a signal that may not be sent: a fault of ours
            raise
        hint = "look at its permissions and at those of the folders above it"
        print(f"error: {error.filename}: {error.strerror}; {hint}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except UnicodeEncodeError as error:
        hint = "set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
        print(f"error: {error.object!a} cannot be written in this locale ({error.encoding}); {hint}", file=sys.stderr)
        return EXIT_USER_ERROR
    except SystemExit as end:  # argparse ends the process itself for --help, --version and misuse
        return end.code if isinstance(end.code, int) else EXIT_USER_ERROR


def _run_subcommand(subcommand: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a subcommand whose reader may have seen enough, as with `| head`: that is no error of ours."""
    try:
        code = subcommand(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again at the end
        return EXIT_FAILED


def _launch(argv: Sequence[str]) -> int:
    from cosmos_rl.launcher.arguments import parse_launch  # the configuration's tables: half a second
    from cosmos_rl.launcher.launch import launch

    return launch(parse_launch(argv, __version__, _subcommand_help()), ["cosmos-rl", *argv])


def _describe_unknown(word: str) -> str:
    """Of a first word that is no subcommand: a script stands after --config."""
    near = difflib.get_close_matches(word, SUBCOMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SUBCOMMANDS)}."
    return f"{word}: no subcommand; {hint} Training has none: cosmos-rl --config X.toml"


def _load_subcommand(name: str) -> Callable[[Sequence[str]], int]:
    module, _, function = SUBCOMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)


def _subcommand_help() -> str:
    width = max(map(len, SUBCOMMANDS))
    return "\n".join(["subcommands:", *(f"  {name:{width}}  {text}" for name, (_, text) in SUBCOMMANDS.items())])


if __name__ == "__main__":
    sys.exit(main())
