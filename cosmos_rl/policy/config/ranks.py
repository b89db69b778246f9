"""How many ranks a configuration asks for, and the same configuration for another number of them."""

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.policy import ParallelismConfig
from cosmos_rl.policy.config.schema import Config


def world_size(parallelism: ParallelismConfig) -> int:
    """Ranks that the configuration asks for; -1 when dp_shard_size leaves it open."""
    if parallelism.dp_shard_size == -1:
        return -1
    return parallelism.dp_shard_size * _other_sizes(parallelism)


def has_unbuilt_ranks(parallelism: ParallelismConfig) -> bool:
    """Whether ranks are asked for that `not_runnable_yet` refuses: there is nothing to be sized then."""
    return any(getattr(parallelism, name) != 1 for name in ("tp_size", "cp_size", "pp_size", "ep_size"))


def data_ranks(parallelism: ParallelismConfig) -> int:
    """Ranks that see different samples; with dp_shard_size = -1 those of one shard."""
    return max(parallelism.dp_shard_size, 1) * parallelism.dp_replicate_size


def resized(config: Config, ranks: int) -> Config:
    """The configuration for so many ranks: dp_shard_size takes up the difference; one rank has no replicas either.

    Raises:
        UserError: the other sizes do not divide `ranks`.
    """
    parallelism = config.policy.parallelism
    if ranks == 1:
        parallelism = parallelism.model_copy(update={"dp_replicate_size": 1})
    rest = _other_sizes(parallelism)
    if ranks % rest:
        raise UserError(
            f"{ranks} ranks are not a multiple of {rest}, the product of the other sizes in [policy.parallelism]: "
            f"{described(parallelism)}"
        )
    sized = parallelism.model_copy(update={"dp_shard_size": ranks // rest})
    rollout = config.rollout.model_copy(update={"parallelism": sized if config.rollout.parallelism else None})
    policy = config.policy.model_copy(update={"parallelism": sized})
    return config.model_copy(update={"policy": policy, "rollout": rollout})


def described(parallelism: ParallelismConfig) -> str:
    """The sizes that are not 1, as `dp_shard_size 4 x dp_replicate_size 2`."""
    names = ("dp_shard_size", "dp_replicate_size", "tp_size", "cp_size", "pp_size")
    sizes = [f"{name} {getattr(parallelism, name)}" for name in names if getattr(parallelism, name) != 1]
    return " x ".join(sizes) or "all 1"


def _other_sizes(parallelism: ParallelismConfig) -> int:
    return parallelism.dp_replicate_size * parallelism.tp_size * parallelism.cp_size * parallelism.pp_size
