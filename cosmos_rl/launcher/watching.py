"""`cosmos-rl watch`: runs on a page of this machine that keeps itself up to date."""

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.flags import FlagParser
from cosmos_rl.storage.run_folder import RunFolder, find_run
from cosmos_rl.tracking.watch.page import Watch
from cosmos_rl.tracking.watch.server import WatchServer

_DEFAULT_PORT = 8765
_MOST_RUNS = 8
"""As many as there are colours."""


def watch(argv: Sequence[str]) -> int:
    """Show one or several runs on a page at http://127.0.0.1 that keeps itself up to date, until Ctrl-C."""
    parser = FlagParser(prog="cosmos-rl watch", description=watch.__doc__)
    runs = "run folders, or output folders (their newest run)"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=runs)
    parser.add_argument(
        "--port", type=_port, help=f"0: any free one (default: {_DEFAULT_PORT}, or any free one where that is in use)"
    )
    given = parser.parse_args(argv)
    server = open_server(given.runs, given.port)
    with server, suppress(KeyboardInterrupt):
        print(f"{server.url} shows {_count(len(server.watch.runs))}; Ctrl-C ends it", flush=True)
        server.serve_forever()
    return 0


def open_server(places: Sequence[Path], port: int | None) -> WatchServer:
    """The server of these runs, each once; ``port`` None: the usual one, or any where that is in use.

    Raises:
        UserError: there is no run at a place, there are too many, or the port cannot be had.
    """
    found = {run.root.resolve(): run for run in map(_find, places)}
    if len(found) > _MOST_RUNS:
        raise UserError(f"{len(found)} runs: give at most {_MOST_RUNS}, as more cannot be distinguished in one chart")
    runs = Watch(list(found.values()))
    if port is not None:
        return WatchServer(runs, port)
    try:
        return WatchServer(runs, _DEFAULT_PORT)
    except UserError:  # another watch
        return WatchServer(runs, 0)


def _find(place: Path) -> RunFolder:
    """A run; also one of which nothing but the folder is there."""
    place = place.expanduser().absolute()
    if place.is_dir() and re.fullmatch(r"\d{14}", place.name):
        return RunFolder(place)
    return find_run(place)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: 0 to 65535")
    return int(text)


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"
