"""The nodes of one job: what `--num-workers`, `--worker-idx`, `--node-ip-list` and `--rdzv-port` mean."""

from dataclasses import dataclass

from cosmos_rl.errors import UserError

DEFAULT_PORT = 29345


@dataclass(frozen=True)
class Nodes:
    """All nodes of the job, and which of them this one is. Node 0 decides for all."""

    addresses: tuple[str, ...] = ("localhost",)
    """One for each node, in the order of their indices."""
    index: int = 0
    port: int = DEFAULT_PORT
    """Where node 0 listens."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.addresses)

    @property
    def address(self) -> str:
        """Of this node, as the others reach it."""
        return self.addresses[self.index]

    @property
    def endpoint(self) -> str:
        """`address:port` of node 0."""
        return f"{self.addresses[0]}:{self.port}"

    def describe(self, index: int) -> str:
        """`node 1 (10.0.0.2)`."""
        return f"node {index} ({self.addresses[index]})"


class JobEnded(Exception):
    """The job ends on this node too, with this exit code; `reason` is for the user, empty after a stop request."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True)
class JobPlan:
    """What node 0 has decided for all."""

    job_id: str
    run: str
    """The run folder, absolute; the resolved configuration waits in it."""
    nproc: int
    """Ranks on each node."""
    nodes: int


def read_nodes(num_workers: int, worker_idx: int, node_ip_list: str | None, rdzv_port: int) -> Nodes:
    """The nodes that the flags name.

    Raises:
        UserError: they contradict each other, or one is missing.
    """
    if worker_idx >= num_workers:
        raise UserError(
            f"--worker-idx {worker_idx}: --num-workers {num_workers} has the indices 0 to {num_workers - 1}"
        )
    if num_workers == 1:
        return Nodes()
    addresses = tuple(part.strip() for part in (node_ip_list or "").split(";") if part.strip())
    if len(addresses) != num_workers:
        found = "it is missing"
        if node_ip_list:
            found = f"found {len(addresses)} in {node_ip_list!r}"
        raise UserError(
            f"--node-ip-list: --num-workers {num_workers} needs {num_workers} addresses, that of node 0 first, as "
            f"'10.0.0.1;10.0.0.2' (in quotes: the shell takes ; for itself); {found}"
        )
    return Nodes(addresses, worker_idx, rdzv_port)
