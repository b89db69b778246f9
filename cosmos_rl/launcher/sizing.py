"""How many ranks a job gets on the machines it runs on."""

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, world_size
from cosmos_rl.policy.config.ranks import described, has_unbuilt_ranks, resized
from cosmos_rl.utils.logging import logger


def sized(config: Config, nproc: int | None, gpus: int, nodes: int = 1) -> Config:
    """The configuration for the ranks that will run.

    Args:
        config: what is asked for.
        nproc: ranks on each machine; None: one on a CPU, else as many as the configuration asks for.
        gpus: GPUs of this machine.
        nodes: machines, each with as many ranks.

    Raises:
        UserError: a machine has fewer GPUs than that, or the sizes do not divide the ranks.
    """
    asked = config.policy.parallelism
    if asked.dp_shard_size == 0 or has_unbuilt_ranks(asked):  # errors that are named elsewhere
        return config
    on_cpu = gpus == 0 or config.train.device == "cpu"
    wanted = nodes if on_cpu else world_size(asked)
    if nproc:
        wanted = nproc * nodes
    if wanted == -1:
        wanted = gpus * nodes
    if wanted % nodes:
        raise UserError(
            f"[policy.parallelism] ({described(asked)} = {wanted} ranks) is not a multiple of --num-workers {nodes}; "
            "--nproc-per-node N takes N ranks on each"
        )
    if not on_cpu and wanted // nodes > gpus:
        has = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        why = f"--nproc-per-node {nproc}" if nproc else f"[policy.parallelism] ({described(asked)} = {wanted} ranks)"
        each = f"{wanted // nodes} GPUs on each of {nodes} machines" if nodes > 1 else f"{wanted} GPUs"
        raise UserError(f"{why} needs {each}, this machine has {has}; --nproc-per-node {gpus} runs on what is there")
    if wanted == world_size(asked):
        return config
    config = resized(config, wanted)
    reason = "on a CPU" if on_cpu else f"{gpus} GPUs"
    if nproc:
        reason = f"--nproc-per-node {nproc}"
    logger.info(
        "%s%s: %s, policy.parallelism.dp_shard_size = %d in place of %d",
        reason,
        f" on each of {nodes} machines" if nodes > 1 else "",
        "1 rank" if wanted == 1 else f"{wanted} ranks",
        config.policy.parallelism.dp_shard_size,
        asked.dp_shard_size,
    )
    return config
