"""Names of rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

from cosmos_rl_reward.handler.base import BaseRewardHandler

Handler = TypeVar("Handler", bound="type[BaseRewardHandler]")


class RewardRegistry:
    """Maps a reward's name to its handler class."""

    _classes: ClassVar[dict[str, type[BaseRewardHandler]]] = {}

    @classmethod
    def register(cls, *, allow_override: bool = False) -> Callable[[Handler], Handler]:
        """Decorate a handler class; its key is the class attribute ``reward_name``.

        Raises:
            ValueError: the class has no name, or another class has it and ``allow_override`` is false.
        """

        def decorate(handler: Handler) -> Handler:
            if not handler.reward_name:
                raise ValueError(f"{handler.__module__}.{handler.__qualname__} has no class attribute reward_name")
            known = cls._classes.get(handler.reward_name)
            # a module that is run by path and imported by name defines "the same" class twice
            if known is not None and known.__qualname__ != handler.__qualname__ and not allow_override:
                raise ValueError(
                    f"reward {handler.reward_name!r} is {known.__module__}.{known.__qualname__} already;"
                    " choose another reward_name or register(allow_override=True)"
                )
            cls._classes[handler.reward_name] = handler
            return handler

        return decorate

    @classmethod
    def get_reward_class(cls, name: str) -> type[BaseRewardHandler]:
        """Look a class up.

        Raises:
            ValueError: no such reward; the message lists the known ones.
        """
        if name not in cls._classes:
            raise ValueError(f"unknown reward {name!r}; registered are: {', '.join(sorted(cls._classes)) or 'none'}")
        return cls._classes[name]
