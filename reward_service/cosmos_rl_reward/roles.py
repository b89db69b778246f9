"""Entry point of the service's own processes: ``python -m cosmos_rl_reward.roles front|workers``, started by others."""

import gc
import os
import signal
import socket
import sys

from cosmos_rl_reward import logs
from cosmos_rl_reward.config import ServiceConfig
from cosmos_rl_reward.errors import UserError


def main() -> int:
    """Read the configuration from standard input and play the role named on the command line."""
    role, *arguments = sys.argv[1:]
    logs.set_up(role, above_table=True)
    config = ServiceConfig.model_validate_json(sys.stdin.buffer.read())
    broker = os.environ["COSMOS_RL_REWARD_INTERNAL_BROKER"]
    gc.set_threshold(5_000, 20, 20)  # many short-lived objects per request, none of them in cycles
    try:
        if role == "front":
            from cosmos_rl_reward.front.app import run_front

            run_front(config, broker, socket.socket(fileno=int(arguments[0])))
        else:
            import uvloop

            from cosmos_rl_reward.broker.embedded import die_with_parent
            from cosmos_rl_reward.worker.host import Host

            die_with_parent(signal.SIGHUP)  # not SIGKILL: what the rewards have started has to end too

            uvloop.run(Host(config, broker, arguments).run())
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
