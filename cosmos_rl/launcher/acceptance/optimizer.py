"""Whether the optimiser is installed, and takes the arguments that it is given."""

import importlib.util

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.optimizers import explain_missing, find_kind, short_name

_PLAIN = ("AdamW", "Adam", "AdamW8bit", "Adam8bit")


def missing_optimizer(config: Config) -> list[str]:
    """The package of the optimiser, where it is not installed; it is only looked for."""
    name = config.train.optm_name
    package = find_kind(name).place.partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        return []
    return [explain_missing(name, package)]


def optimizer_problems(config: Config) -> list[str]:
    """What speaks against the optimiser's class and its arguments, where its package is installed.

    Only then torch is loaded: without further arguments the usual ones need no look.
    """
    train = config.train
    if (short_name(train.optm_name) in _PLAIN and not train.optm_kwargs) or missing_optimizer(config):
        return []
    from cosmos_rl.optim.classes import Hyperparameters, build_arguments, find_class

    try:
        build_arguments(find_class(train.optm_name), Hyperparameters.from_config(train))
    except UserError as error:
        return str(error).splitlines()
    return []
