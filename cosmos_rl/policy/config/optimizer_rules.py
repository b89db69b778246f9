"""Rules and remarks on the optimiser and its rate."""

from collections.abc import Iterator

from cosmos_rl.policy.config.optimizers import OPTIMIZERS, find_kind, short_name
from cosmos_rl.policy.config.plan import STEP_TRAINERS
from cosmos_rl.policy.config.policy import ParallelismConfig
from cosmos_rl.policy.config.problems import format_value
from cosmos_rl.policy.config.ranks import weight_shards
from cosmos_rl.policy.config.schema import Config

_LOW_FOR_PRODIGY = 0.1
_LOW_FOR_ADAFACTOR = 5e-4
_HIGH_FOR_ADAM = 0.1


def optimizer_rules(config: Config) -> Iterator[str]:
    """Every rule that the optimiser of `config` breaks, one line each."""
    train = config.train
    name, short = train.optm_name, short_name(train.optm_name)
    if short == "Prodigy" and train.lr_patterns:
        yield "train.optm_lr: found a table; allowed with Prodigy: one number, as it estimates one rate for all weights"
    ranks = config.policy.parallelism
    shards = weight_shards(ranks)
    if shards > 1 and not find_kind(name).sharded:
        known = ", ".join(other for other, kind in OPTIMIZERS.items() if kind.sharded)
        yield (
            f"train.optm_name: found {format_value(name)} with policy.parallelism.{_shards_of(ranks)}, on whose parts "
            f"of the weights it may be wrong; allowed: {known}, or dp_shard_size = 1"
            f"{' and cp_size = 1' * (ranks.cp_size > 1)} with dp_replicate_size = {shards * ranks.dp_replicate_size}, "
            "where every rank has all weights"
        )
    slices = train.optm_kwargs.get("slice_p", 1)
    if shards > 1 and short == "Prodigy" and slices != 1:
        yield (
            f"train.optm_kwargs.slice_p: found {format_value(slices)} with policy.parallelism.{_shards_of(ranks)}; "
            "allowed: 1 there, as parts of a weight have other slices than the whole"
        )
    trainer = getattr(train.train_policy, "trainer_type", "")
    if find_kind(name).averages and trainer in STEP_TRAINERS:
        yield (
            f"train.optm_name: found {format_value(name)}; allowed with trainer_type = {format_value(trainer)}: "
            "others, as it takes the gradient at other weights than those that make the samples, so that the "
            "likelihood ratio is not 1 before the first step and the clip leaves samples out"
        )
    if train.optm_num_cycles > 1 and train.optm_decay_type != "cosine_with_restarts":
        yield (
            f"train.optm_num_cycles: found {train.optm_num_cycles}; allowed: 1, or with train.optm_decay_type = "
            '"cosine_with_restarts"'
        )


def _shards_of(ranks: ParallelismConfig) -> str:
    if ranks.cp_size > 1:
        return f"cp_size = {ranks.cp_size} (weights are sharded over these ranks too)"
    return f"dp_shard_size = {ranks.dp_shard_size}"


def optimizer_notes(config: Config) -> Iterator[str]:
    """What is worth knowing about rate and schedule."""
    train = config.train
    kind, rates = find_kind(train.optm_name), [train.global_lr, *train.lr_patterns.values()]
    if short_name(train.optm_name) == "Prodigy" and train.global_lr <= _LOW_FOR_PRODIGY:
        yield (
            f"warning: train.optm_lr = {train.global_lr} with Prodigy, which multiplies it by a rate of its own: 1.0 "
            "is meant, and a small one hardly trains (optim/effective_learning_rate is the product)"
        )
    if short_name(train.optm_name) == "Adafactor" and max(rates) <= _LOW_FOR_ADAFACTOR:
        yield (
            f"warning: train.optm_lr = {max(rates)} with Adafactor, of which a step is that share of each weight's own "
            "size: 1e-2 is usual, and a small one hardly trains"
        )
    if kind.like_adam and max(rates) >= _HIGH_FOR_ADAM:
        yield (
            f"warning: train.optm_lr = {max(rates)} with {train.optm_name}, which moves every weight by about as much "
            "in each step; usual are 1e-6 to 1e-3 (1.0 is meant for Prodigy)"
        )
    warmup, steps = train.optm_warmup_steps, train.max_num_steps
    if isinstance(warmup, int) and steps is not None and warmup > steps:
        yield (
            f"train.optm_warmup_steps = {warmup} is more than train.max_num_steps = {steps} and is cut to the run: the "
            "rate rises over all of it, and a resume with more steps would warm up again (docs/optimisers.md)"
        )
    if kind.averages and train.optm_decay_type not in (None, "none"):
        yield (
            f"train.optm_decay_type = {format_value(train.optm_decay_type)} with {train.optm_name}: its average is "
            'there in place of a falling rate; "none" is meant'
        )
