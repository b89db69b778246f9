"""The flags of `cosmos-rl` itself. Imports next to nothing, so that `--help` is there at once."""

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NoReturn

from cosmos_rl.launcher.ranks.nodes import DEFAULT_PORT

OLDER_FLAGS = ("--wfm-mode", "-dfg", "--diffusion-mode")
"""Names of one flag, which may also stand after the script."""


class FlagParser(argparse.ArgumentParser):
    """Takes no shortened flags, and says which one an unknown one is near."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        before, unknown, tokens = message.partition("unrecognized arguments: ")
        flags = [token.partition("=")[0] for token in tokens.split() if token.startswith("-")]
        near = [name for flag in flags for name in difflib.get_close_matches(flag, self._option_string_actions, n=1)]
        hint = f"; did you mean {' '.join(near)}?" if near else ""
        super().error(before + unknown + tokens + hint)


def _whole_number(minimum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a whole number >= {minimum}")
        return int(text)

    return read


def launch_parser(version: str, subcommands: str) -> argparse.ArgumentParser:
    """The parser of a training command's flags."""
    parser = FlagParser(
        prog="cosmos-rl",
        usage="cosmos-rl --config X.toml [flags] [--table.key=value ...] [SCRIPT_OR_MODULE] [arguments]\n"
        "       cosmos-rl SUBCOMMAND ...",
        description="Train as a TOML file says. SCRIPT_OR_MODULE gives the datasets; without it the folder of "
        "captioned images or, for reinforcement learning, the prompts that the TOML names.",
        epilog=subcommands,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_launch_flags(parser)
    parser.add_argument("--version", action="version", version=f"cosmos-rl {version}")
    return parser


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a training command."""
    parser.add_argument("--config", metavar="X.toml", help="the configuration, or the folder of an earlier run")
    parser.add_argument("--log-dir", metavar="D", help="write all output to D/logs_<time>/policy_0.log")
    parser.add_argument("--nproc-per-node", type=_whole_number(1), metavar="N", help="processes on this machine")
    parser.add_argument(
        "--max-restarts", type=_whole_number(0), default=0, metavar="N", help="restart failed workers so many times (0)"
    )
    parser.add_argument("--num-workers", type=_whole_number(1), default=1, metavar="N", help="nodes of the job (1)")
    parser.add_argument("--worker-idx", type=_whole_number(0), default=0, metavar="I", help="which one this is (0)")
    parser.add_argument("--node-ip-list", metavar="'A;B'", help="addresses of the nodes, that of 0 first")
    parser.add_argument(
        "--rdzv-port", type=_whole_number(1), default=DEFAULT_PORT, metavar="P", help=f"of node 0 ({DEFAULT_PORT})"
    )
    parser.add_argument(*OLDER_FLAGS, dest="older", action="store_true", help="the configuration is of the older form")
    add_lenient(parser)
    parser.add_argument("--debug", action="store_true", help="log more")


def add_lenient(parser: argparse.ArgumentParser) -> None:
    """The flag about unknown keys."""
    parser.add_argument("--lenient", action="store_true", help="leave out unknown keys of an older configuration")
