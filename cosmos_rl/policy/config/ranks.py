"""How many ranks a configuration sets, and the same configuration for another number of them."""

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.policy import ParallelismConfig
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.utils.logging import logger

_SIZES = ("dp_shard_size", "dp_replicate_size", "tp_size", "cp_size", "pp_size")


def world_size(parallelism: ParallelismConfig) -> int:
    """Ranks that the configuration sets; -1 when dp_shard_size leaves it open."""
    if parallelism.dp_shard_size == -1:
        return -1
    return parallelism.dp_shard_size * _other_sizes(parallelism)


def has_unsupported_ranks(parallelism: ParallelismConfig) -> bool:
    """Whether ranks are set that `unsupported_settings` refuses."""
    return any(getattr(parallelism, name) != 1 for name in ("tp_size", "pp_size", "ep_size"))


def data_ranks(parallelism: ParallelismConfig) -> int:
    """Ranks that see different samples, each of them with its context-parallel peers; with dp_shard_size = -1 those of
    one shard."""
    return max(parallelism.dp_shard_size, 1) * parallelism.dp_replicate_size


def weight_shards(parallelism: ParallelismConfig) -> int:
    """Over how many ranks each weight is sharded: those of one replica, context-parallel peers among them."""
    return max(parallelism.dp_shard_size, 1) * parallelism.cp_size


def with_world_size(config: Config, ranks: int) -> Config:
    """The configuration for so many ranks: dp_shard_size takes up the difference; one rank has neither replicas nor
    context-parallel peers.

    Raises:
        UserError: the other sizes do not divide `ranks`.
    """
    parallelism = config.policy.parallelism
    if ranks == 1:
        parallelism = parallelism.model_copy(update={"dp_replicate_size": 1, "cp_size": 1})
    rest = _other_sizes(parallelism)
    if ranks % rest:
        raise UserError(
            f"{ranks} ranks are not a multiple of {rest}, the product of the other sizes in [policy.parallelism]: "
            f"{describe_parallelism(parallelism)}"
        )
    parallelism = parallelism.model_copy(update={"dp_shard_size": ranks // rest})
    policy, rollout = config.policy.model_copy(update={"parallelism": parallelism}), config.rollout
    if rollout.parallelism is not None:
        rollout = rollout.model_copy(update={"parallelism": parallelism})
    return config.model_copy(update={"policy": policy, "rollout": rollout})


def resolve_world_size(config: Config, nproc: int | None, gpus: int, nodes: int = 1) -> Config:
    """The configuration for the ranks that will run.

    Args:
        config: as written.
        nproc: ranks on each node; None: one on a CPU, else as many as the configuration sets.
        gpus: GPUs of this node.
        nodes: how many there are, each with as many ranks.

    Raises:
        UserError: a node has fewer GPUs than that, or the sizes do not divide the ranks.
    """
    parallelism = config.policy.parallelism
    if parallelism.dp_shard_size == 0 or has_unsupported_ranks(parallelism):  # errors that are named elsewhere
        return config
    on_cpu = gpus == 0 or config.train.device == "cpu"
    ranks = world_size(parallelism)
    if nproc:
        ranks = nproc * nodes
    elif on_cpu:
        ranks = nodes
    elif ranks == -1:
        ranks = gpus * nodes
    if ranks % nodes:
        raise UserError(
            f"[policy.parallelism] ({describe_parallelism(parallelism)} = {ranks} ranks) is not a multiple of "
            f"--num-workers {nodes}; --nproc-per-node N takes N ranks on each"
        )
    if not on_cpu and ranks // nodes > gpus:
        raise UserError(_too_few_gpus(parallelism, ranks, nproc, gpus, nodes))
    if ranks == world_size(parallelism):
        return config
    resolved = with_world_size(config, ranks)
    _log_world_size(config, resolved, ranks, nproc, gpus, nodes)
    return resolved


def _too_few_gpus(parallelism: ParallelismConfig, ranks: int, nproc: int | None, gpus: int, nodes: int) -> str:
    who, need = f"[policy.parallelism] ({describe_parallelism(parallelism)} = {ranks} ranks)", f"{ranks} GPUs"
    if nproc:
        who = f"--nproc-per-node {nproc}"
    if nodes > 1:
        need = f"{ranks // nodes} GPUs on each of {nodes} nodes"
    has = f"{gpus} GPUs"
    if gpus == 1:
        has = "1 GPU"
    return f"{who} needs {need}, this machine has {has}; --nproc-per-node {gpus} runs on what is there"


def _log_world_size(config: Config, resolved: Config, ranks: int, nproc: int | None, gpus: int, nodes: int) -> None:
    reason, each, count = f"{gpus} GPUs", "", f"{ranks} ranks"
    if nproc:
        reason = f"--nproc-per-node {nproc}"
    elif gpus == 0 or config.train.device == "cpu":
        reason = "on a CPU"
    if nodes > 1:
        each = f" on each of {nodes} nodes"
    if ranks == 1:
        count = "1 rank"
    changes = describe_changes(config.policy.parallelism, resolved.policy.parallelism)
    logger.info(f"{reason}{each}: {count}, {changes}")


def describe_changes(before: ParallelismConfig, after: ParallelismConfig) -> str:
    """The sizes that `with_world_size` has changed."""
    sizes = ((name, getattr(before, name), getattr(after, name)) for name in _SIZES)
    changes = [f"policy.parallelism.{name} = {new} in place of {old}" for name, old, new in sizes if new != old]
    return ", ".join(changes)


def describe_parallelism(parallelism: ParallelismConfig) -> str:
    """The sizes that are not 1, as `dp_shard_size 4 x dp_replicate_size 2`."""
    sizes = [f"{name} {getattr(parallelism, name)}" for name in _SIZES if getattr(parallelism, name) != 1]
    return " x ".join(sizes) or "all 1"


def describe_peers(parallelism: ParallelismConfig) -> list[str]:
    """What context-parallel peers are, where there are some: one line."""
    size, ranks = parallelism.cp_size, data_ranks(parallelism)
    if size == 1:
        return []
    return [
        f"a data parallel rank is {size} ranks with the same samples, each with a part of their tokens "
        f"(policy.parallelism.cp_size): {ranks} x {size} = {ranks * size} ranks"
    ]


def _other_sizes(parallelism: ParallelismConfig) -> int:
    return parallelism.dp_replicate_size * parallelism.tp_size * parallelism.cp_size * parallelism.pp_size
