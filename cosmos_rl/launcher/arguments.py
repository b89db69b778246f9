"""The command line of `cosmos-rl`: `[flags] [--a.b=v ...] [SCRIPT_OR_MODULE] [args]`."""

import argparse
import difflib
import filecmp
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.flags import OLDER_FLAGS, launch_parser
from cosmos_rl.launcher.ranks.nodes import Nodes, read_nodes
from cosmos_rl.policy.config import Config, is_older, load_config, read_toml
from cosmos_rl.policy.config.checks import place_problem
from cosmos_rl.policy.config.jobs import SCRIPTS, job_kind
from cosmos_rl.policy.config.keys import describe_allowed, find_field, list_tables
from cosmos_rl.policy.config.reward_names import reward_rules
from cosmos_rl.utils.logging import logger

_WITH_VALUE = (
    "--config",
    "--log-dir",
    "--nproc-per-node",
    "--max-restarts",
    "--num-workers",
    "--worker-idx",
    "--node-ip-list",
    "--rdzv-port",
)
_OLDER_SCRIPTS = ("wfm_rl", "diffusion_grpo")
"""Data scripts of older documents; the one of the job takes their place."""
_NEVER_A_SCRIPTS = frozenset(_WITH_VALUE) - {"--config", "--log-dir"}  # these two a script may well have itself


@dataclass(frozen=True)
class Launch:
    """What one command line sets."""

    config: str
    overrides: tuple[str, ...]
    script: str | None
    """None: the bundled one of the job, see `script_for`."""
    script_args: tuple[str, ...]
    log_dir: str | None
    nproc_per_node: int | None
    max_restarts: int
    debug: bool
    nodes: Nodes
    older: bool = False
    """The configuration is expected to be of the older form."""
    lenient: bool = False
    """Unknown keys of such a configuration are left out."""

    def load_config(self, fit: Callable[[Config], Config]) -> Config:
        """The configuration that it names; `fit` and errors as in `load_config`, which names
        wrong names of rewards too, unless a script may give rewards."""

        def check_rewards(config: Config) -> Iterable[str]:
            return reward_rules(config) if script_for(self.script, config) in SCRIPTS else ()

        config = load_config(self.config, self.overrides, fit=fit, lenient=self.lenient, rules=check_rewards)
        if self.older and not is_older(read_toml(self.config)):
            logger.warning(f"{self.config} is of the present form: {' and '.join(OLDER_FLAGS)} have no effect")
        return config


def parse_launch(argv: Sequence[str], version: str, subcommands: str) -> Launch:
    """The parsed command line; argparse ends the process for `--help`, `--version` and misuse."""
    return read_launch(launch_parser(version, subcommands), argv)[0]


def read_launch(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[Launch, argparse.Namespace]:
    """What a parser with `add_launch_flags` makes of a command line; its own further flags are in the namespace.

    Raises:
        UserError: flags contradict each other, or a word after the script was meant for us.
    """
    flags, overrides, script, rest = _split(argv)
    given = parser.parse_args(flags)
    if given.config is None:
        late = ""
        if "--config" in rest:
            late = " (flags of cosmos-rl go before the script)"
        if script and script.endswith(".toml"):
            late = f"; did you mean --config {script}?"
        parser.error(f"--config X.toml is required{late}")
    if given.log_dir is not None:
        problem = place_problem(given.log_dir, needed=True)
        if problem is not None:
            raise UserError(f"--log-dir: {problem}")
    older, rest = _take_older_flags(rest)
    late_overrides, script_args = split_overrides(rest)
    launch = Launch(
        config=given.config,
        overrides=(*overrides, *late_overrides),
        script=script,
        script_args=tuple(script_args),
        log_dir=given.log_dir,
        nproc_per_node=given.nproc_per_node,
        max_restarts=given.max_restarts,
        debug=given.debug,
        nodes=read_nodes(given.num_workers, given.worker_idx, given.node_ip_list, given.rdzv_port),
        older=given.older or older,
        lenient=given.lenient,
    )
    return launch, given


def _take_older_flags(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether one stands after the script, and the arguments without them; what follows a `--` is the script's."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = [token for token in arguments[:end] if token not in OLDER_FLAGS]
    return len(own) < end, [*own, *arguments[end:]]


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The configuration overrides among a script's arguments, and the rest as it was.

    What follows a `--` is the script's in any case.

    Raises:
        UserError: an argument is almost an override, or a flag of the launcher.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    overrides: list[str] = []
    own: list[str] = []
    at = 0
    while at < end:
        token = arguments[at]
        if _names_our_table(token):
            at, override = _override_at(arguments[:end], at)
            overrides.append(override)
        else:
            _refuse_own_flags(token)
            own.append(token)
        at += 1
    return overrides, [*own, *arguments[end:]]


def script_for(script: str | None, config: Config) -> str:
    """The script that gives the data: the one of the command line, else the bundled one of the job."""
    if script is None or _is_older_script(script):
        return job_kind(config).script
    return script


def _is_older_script(script: str) -> bool:
    """Whether it is a bundled one of older documents, by module or by path, and not a changed copy of it."""
    module = script.removesuffix(".py").removeprefix("./").replace("/", ".")
    name = next((name for name in _OLDER_SCRIPTS if module.endswith(f"cosmos_rl.tools.dataset.{name}")), None)
    if name is None:
        return False
    bundled = Path(__file__).parents[1] / "tools" / "dataset" / f"{name}.py"
    return not Path(script).is_file() or filecmp.cmp(script, bundled, shallow=False)


def worker_command(script: str) -> list[str]:
    """What python is called with for a script file or a module.

    Raises:
        UserError: there is no such file or module.
    """
    if script.endswith(".py"):
        path = Path(script).expanduser().absolute()
        if not path.is_file():
            raise UserError(f"{path}: no such script")
        return [str(path)]
    if not all(part.isidentifier() for part in script.split(".")):
        hint = ""
        if Path(f"{script}.py").is_file():
            hint = f"; did you mean the file {script}.py?"
        elif _names_our_table(f"--{script}"):
            hint = f"; did you mean --{script}?"
        raise UserError(f"{script}: neither a .py file nor the name of a module (package.module){hint}")
    if not _module_exists(script):
        raise UserError(
            f"{script}: no such module in {os.getcwd()} or among the installed packages; give a .py file or a module"
        )
    return ["-m", script]


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], str | None, list[str]]:
    flags: list[str] = []
    overrides: list[str] = []
    at = 0
    while at < len(argv):
        token = argv[at]
        if not token.startswith("-"):
            return flags, overrides, token, list(argv[at + 1 :])
        if "." in token.partition("=")[0] or _names_our_table(token):
            at, override = _override_at(argv, at)
            overrides.append(override)
        else:
            flags.append(token)
            if token in _WITH_VALUE and at + 1 < len(argv):
                at += 1
                flags.append(argv[at])
        at += 1
    return flags, overrides, None, []


def _names_our_table(token: str) -> bool:
    """`--train.epoch=2`, `--train.epoch` and `--train={...}`; `--train` alone may be an option of a script."""
    key, equals, _ = token.partition("=")
    table, dot, _ = key.removeprefix("--").partition(".")
    return token.startswith("--") and bool(equals or dot) and table in Config.model_fields


def _override_at(argv: Sequence[str], at: int) -> tuple[int, str]:
    """The override at a place, and the place of its last word: `--train.epoch 2` is one as well, where it is clear."""
    token, following = argv[at], argv[at + 1 : at + 2]
    if "=" in token or not following or following[0].startswith("--"):
        return at, token
    field = find_field(Config, token.removeprefix("--").split("."))
    if field is None or list_tables(field.annotation):
        return at, token
    switch = "true or false" in describe_allowed(
        field.annotation, field.metadata
    )  # the next word may well be the script
    if switch and following[0].lower() not in ("true", "false", "none"):
        return at, token
    return at + 1, f"{token}={following[0]}"


def _refuse_own_flags(token: str) -> None:
    """After the script: a misspelt override or a flag of the launcher would silently have no effect."""
    if not token.startswith("-"):
        return
    key, equals, value = token.partition("=")
    if key in _NEVER_A_SCRIPTS:
        raise UserError(f"{token}: a flag of cosmos-rl; put it before the script")
    table, dot, rest = key.lstrip("-").partition(".")
    # with one dash, as in -model.ckpt=3, many scripts have options of their own
    cutoff = 0.8 if token.startswith("--") else 1.0
    near = difflib.get_close_matches(table, Config.model_fields, n=1, cutoff=cutoff)
    if dot and near:
        raise UserError(
            f"{token}: did you mean --{near[0]}.{rest}{equals}{value}? An option of the script that looks like one of "
            "the configuration must stand after a --"
        )


def _module_exists(name: str) -> bool:
    # `python -m` looks into the current folder first, the console script does not.
    added = os.getcwd() not in sys.path
    if added:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    finally:
        if added:
            sys.path.remove(os.getcwd())
