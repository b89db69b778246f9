"""Names of rewards and of their interpreters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar, TypeVar

from cosmos_rl_reward.handler.base import BaseRewardHandler

logger = logging.getLogger(__name__)
Handler = TypeVar("Handler", bound="type[BaseRewardHandler]")


class RewardRegistry:
    """Maps a reward's name to its handler class, and to the interpreter that runs it."""

    _classes: ClassVar[dict[str, type[BaseRewardHandler]]] = {}
    _interpreters: ClassVar[dict[str, str]] = {}

    @classmethod
    def register(cls, *, allow_override: bool = False) -> Callable[[Handler], Handler]:
        """Decorate a handler class; its key is the class attribute ``reward_name``.

        Raises:
            ValueError: the class has no name, or another class has it and ``allow_override`` is false.
        """

        def decorate(handler: Handler) -> Handler:
            known = cls._classes.get(handler.reward_name)
            # a module that is run by path and imported by name defines "the same" class twice
            if known is not None and known.__qualname__ != handler.__qualname__ and not allow_override:
                raise ValueError(
                    f"reward {handler.reward_name!r} is {known.__module__}.{known.__qualname__} already;"
                    " choose another reward_name or register(allow_override=True)"
                )
            cls.register_reward(handler)
            return handler

        return decorate

    @classmethod
    def register_reward(cls, handler: type[BaseRewardHandler]) -> None:
        """Store a class under its ``reward_name``, replacing an older one."""
        if not handler.reward_name:
            raise ValueError(f"{handler.__module__}.{handler.__qualname__} has no class attribute reward_name")
        cls._classes[handler.reward_name] = handler

    @classmethod
    def get_reward_class(cls, name: str) -> type[BaseRewardHandler]:
        """Look a class up.

        Raises:
            ValueError: no such reward; the message lists those that there are.
        """
        if name not in cls._classes:
            raise ValueError(f"unknown reward {name!r}; registered are: {', '.join(sorted(cls._classes)) or 'none'}")
        return cls._classes[name]

    @classmethod
    def register_reward_venv(cls, name: str, python: str) -> None:
        """Remember which interpreter runs a reward."""
        cls._interpreters[name] = python

    @classmethod
    def get_reward_venv(cls, name: str) -> str:
        """Interpreter of a reward; ``python`` with a warning when none is known."""
        if name not in cls._interpreters:
            logger.warning("no interpreter is registered for reward %s, using 'python'", name)
        return cls._interpreters.get(name, "python")

    @classmethod
    def check_reward_type_supported(cls, name: str) -> bool:
        """True when a class is registered under ``name``."""
        return name in cls._classes

    @classmethod
    def check_reward_venv_supported(cls, name: str) -> bool:
        """True when an interpreter is registered under ``name``."""
        return name in cls._interpreters

    @classmethod
    def list_registered_rewards(cls) -> list[str]:
        """Names of all registered classes, sorted."""
        return sorted(cls._classes)

    @classmethod
    def list_registered_reward_venvs(cls) -> list[str]:
        """Names that have an interpreter, sorted."""
        return sorted(cls._interpreters)
