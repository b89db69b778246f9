"""From a reward's name to its handler class, in the environment that runs it."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry

GROUP = "cosmos_rl_reward.rewards"


def find_handler(name: str, reward_class: str, function: str) -> type[BaseRewardHandler]:
    """The class for ``name``: the configured one, else a built-in, else one that an installed package offers.

    Raises:
        NotReady: there is none, or its module cannot be imported.
    """
    if function:
        from cosmos_rl_reward.rewards.function_reward import function_handler

        return function_handler(_attribute(function, "function"), name)
    if reward_class:
        found = _attribute(reward_class, "reward_class")
        if not isinstance(found, type) or not issubclass(found, BaseRewardHandler):
            raise NotReady(f"reward_class = {reward_class!r} is not a subclass of BaseRewardHandler")
        return found
    from cosmos_rl_reward.rewards import MODULES

    modules = {"mock": "cosmos_rl_reward.mock", **{k: f"cosmos_rl_reward.rewards.{m}" for k, m in MODULES.items()}}
    if name in modules:
        _module(modules[name])
        return RewardRegistry.get_reward_class(name)
    offered = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if name in offered:
        return _attribute(offered[name].value, f"entry point {GROUP}")
    known = ", ".join(sorted([*modules, *offered]))
    raise NotReady(
        f"no reward is called {name!r}; known are {known}; others need reward_class, or a package with an entry point"
        " (sharpness, classifier and the like: pip install ./reward_service/examples/rewards)"
    )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotReady(f"{name} cannot be imported: {error}; is it installed in this environment?") from error


def _attribute(path: str, where: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(_module(module), name)
    except AttributeError as error:
        raise NotReady(f"{where} = {path!r}: module {module} has no {name}") from error
