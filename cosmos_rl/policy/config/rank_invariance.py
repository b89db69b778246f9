"""What `train.rank_invariant` asks of the rest of the configuration."""

from collections.abc import Iterator

from cosmos_rl.policy.config.jobs import job_kind
from cosmos_rl.policy.config.optimizers import short_name
from cosmos_rl.policy.config.problems import format_value
from cosmos_rl.policy.config.ranks import data_ranks
from cosmos_rl.policy.config.schema import Config

_OPTIMIZERS = ("AdamW", "Adam")
"""Those that step on each weight by itself."""


def rank_invariance_rules(config: Config) -> Iterator[str]:
    """Every setting with which the bits would depend on the number of ranks, one line each."""
    train, parallelism = config.train, config.policy.parallelism
    if not train.rank_invariant:
        return
    if job_kind(config).online:
        yield from _rollout_rules(config)
    elif train.global_batch_size is None:
        yield "train.global_batch_size: missing; with train.rank_invariant the samples of a step, however many ranks"
    ranks = data_ranks(parallelism)
    if ranks & (ranks - 1):
        yield (
            f"train.rank_invariant: found true on {ranks} data parallel ranks; allowed on 1, 2, 4, 8, …, as sums "
            "follow a binary tree"
        )
    if parallelism.cp_size > 1:
        yield f"train.rank_invariant: found true with policy.parallelism.cp_size = {parallelism.cp_size}; allowed: 1"
    yield from _batch_rules(config)
    yield from _type_rules(config)


def _batch_rules(config: Config) -> Iterator[str]:
    """Other samples would share a forward pass, which gives them other last bits."""
    mini_batch, validation = config.train.train_policy.mini_batch, config.validation
    if mini_batch != 1:
        yield f"train.train_policy.mini_batch: found {mini_batch}; allowed with train.rank_invariant: 1"
    if validation.enable and validation.batch_size not in (None, 1):
        yield f"validation.batch_size: found {validation.batch_size}; allowed with train.rank_invariant: 1"


def _rollout_rules(config: Config) -> Iterator[str]:
    """Samples are made, decoded and scored one at a time."""
    rollout = config.rollout
    if rollout.n_generation_mini_batch not in (None, 1):
        yield (
            f"rollout.n_generation_mini_batch: found {rollout.n_generation_mini_batch}; allowed with "
            "train.rank_invariant: 1, which is what it is where it is left out"
        )
    if rollout.batch_size is not None:
        yield (
            f"rollout.batch_size: found {rollout.batch_size}; with train.rank_invariant one sample is made at a time: "
            "leave it out (--rollout.batch_size=none)"
        )


def _type_rules(config: Config) -> Iterator[str]:
    train = config.train
    if train.fsdp_reduce_dtype != "float32":
        yield (
            f"train.fsdp_reduce_dtype: found {format_value(train.fsdp_reduce_dtype)}; allowed with "
            'train.rank_invariant: "float32", as forward passes of one rank are added up in float32'
        )
    if short_name(train.optm_name) not in _OPTIMIZERS:
        yield (
            f"train.optm_name: found {format_value(train.optm_name)}; allowed with train.rank_invariant: "
            f"{' or '.join(map(format_value, _OPTIMIZERS))}, which step on each weight by itself"
        )
    if train.optimizer_impl == "fused":
        yield (
            'train.optm_impl: found "fused"; allowed with train.rank_invariant: "foreach" or "for-loop", as the fused '
            "step rounds the last weights of a shard in another way"
        )
