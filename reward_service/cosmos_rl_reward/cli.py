"""Commands: ``cosmos-rl-reward`` (serve, ``worker``), ``cosmos-rl-reward-redis``, ``cosmos-rl-reward-prepare``."""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cosmos_rl_reward import __version__, logs
from cosmos_rl_reward.config import ServiceConfig, for_rewards, load
from cosmos_rl_reward.errors import UserError

_PASSWORD = "COSMOS_RL_REWARD_REDIS_PASSWORD"


def _report_user_errors(action: Callable[[], int]) -> int:
    try:
        return action()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("cosmos-rl-reward", description="Serve rewards for images and videos over HTTP.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--config", type=Path, help="rewards.toml (default: the one that comes with the package)")
    parser.add_argument("--rewards", help="serve these built-in rewards without a file: mock,ocr,...")
    parser.add_argument("--host", help="address to listen on (overrides the file)")
    parser.add_argument("--port", type=int, help="port to listen on; 0 takes any free one")
    parser.add_argument("--state-dir", help="folder for jobs and results")
    parser.add_argument("--front-only", action="store_true", help="no workers on this machine")
    commands = parser.add_subparsers(dest="command", metavar="worker")
    worker = commands.add_parser("worker", help="score jobs of a service that runs elsewhere (needs broker_url)")
    worker.add_argument("--config", type=Path, dest="worker_config")
    worker.add_argument("--reward", action="append", default=[], help="only this reward; may be repeated")
    return parser


def _configuration(options: argparse.Namespace) -> ServiceConfig:
    overrides = {
        key: value
        for key, value in (("host", options.host), ("port", options.port), ("state_dir", options.state_dir))
        if value is not None
    }
    if options.rewards is not None:
        if options.config is not None:
            raise UserError("--rewards and --config: give one of them")
        return for_rewards([name.strip() for name in options.rewards.split(",") if name.strip()], **overrides)
    return load(getattr(options, "worker_config", None) or options.config, **overrides)


def main(argv: list[str] | None = None) -> int:
    """Serve, or work for a service elsewhere, until SIGTERM."""
    options = _parser().parse_args(argv)
    logs.set_up("service", above_table=True)

    def serve() -> int:
        config = _configuration(options)
        if not config.enabled:
            raise UserError("no reward is enabled: set enable = true in a [[reward_args]] table, or use --rewards mock")
        if options.command == "worker":
            return _work(config, options.reward)
        from cosmos_rl_reward.supervisor import Service

        return asyncio.run(Service(config, workers=not options.front_only).run())

    return _report_user_errors(serve)


def _work(config: ServiceConfig, rewards: list[str]) -> int:
    if not config.external_broker or not config.blob_store:
        raise UserError("worker: needs broker_url and blob_store in the configuration, shared with the service")
    import uvloop

    from cosmos_rl_reward.store import open_spool
    from cosmos_rl_reward.worker.host import Host

    open_spool(config).check()
    uvloop.run(Host(config, config.external_broker, rewards).run(report=True))
    return 0


def redis_main(argv: list[str] | None = None) -> int:
    """Start a broker for several machines and leave it running."""
    parser = argparse.ArgumentParser("cosmos-rl-reward-redis", description="Start a Redis or Valkey server.")
    parser.add_argument("--port", type=int, required=True, help="the first free port from here on is taken")
    parser.add_argument("--logfile", help="default: redis.log in a new folder that only you can enter")
    parser.add_argument("--bind", default="127.0.0.1", help=f"another address needs a password in ${_PASSWORD}")
    options = parser.parse_args(argv)
    return _report_user_errors(lambda: _redis(options))


def _redis(options: argparse.Namespace) -> int:
    from cosmos_rl_reward.broker.embedded import find_server

    if options.port <= 0:
        print("--port: must be above 0", file=sys.stderr)
        return 1
    password = os.environ.get(_PASSWORD, "")
    if options.bind not in ("127.0.0.1", "::1") and len(password) < 16:
        raise UserError(f"--bind {options.bind}: others can reach it, so set a password (16 or more) in {_PASSWORD}")
    port = _free_port(options.bind, options.port)
    # a name that others know beforehand could be a link of theirs, made to have one of our files overwritten
    logfile = options.logfile or str(Path(tempfile.mkdtemp(prefix="cosmos-rl-reward-redis-")) / "redis.log")
    lines = [
        f"bind {options.bind}",
        f"port {port}",
        "daemonize yes",
        'save ""',
        "maxmemory-policy noeviction",
        f'logfile "{logfile}"',
    ]
    if password:
        lines.append(f'requirepass "{password}"')
    done = subprocess.run(
        [find_server(), "-"],
        input="\n".join(lines),
        text=True,
        capture_output=True,
        timeout=30,
        encoding="utf-8",
        errors="surrogateescape",  # of paths
    )
    if done.returncode:
        raise UserError(f"the server did not start: {(done.stdout + done.stderr).strip()[-500:]}")
    print(f"log: {logfile}", file=sys.stderr)
    print(f"redis://{options.bind}:{port}")
    return 0


def _free_port(host: str, first: int) -> int:
    for port in range(first, min(first + 100, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return port
            except OSError:
                continue
    raise UserError(f"--port: no free port from {first} on")


def prepare_main(argv: list[str] | None = None) -> int:
    """Set up the environments of the enabled rewards, or check them."""
    parser = argparse.ArgumentParser("cosmos-rl-reward-prepare", description=prepare_main.__doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--reward", action="append", default=[], help="only this reward; may be repeated")
    parser.add_argument("--check", action="store_true", help="change nothing: start each reward once and report")
    parser.add_argument("--offline", action="store_true", help="download nothing: use --wheels and local weights")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install from")
    parser.add_argument("--locks", type=Path, help="folder of lock files: <reward>.txt is installed, or written")
    options = parser.parse_args(argv)
    logs.set_up("prepare")

    def run() -> int:
        from cosmos_rl_reward.prepare import prepare

        config = load(options.config)
        where = (options.wheels, options.locks)
        return asyncio.run(prepare(config, options.reward, options.check, options.offline, *where))

    return _report_user_errors(run)


if __name__ == "__main__":
    raise SystemExit(main())
