"""Imports the libraries of a job without what they load and no job here uses: a third of a process's start."""

import contextlib
import functools
import gc
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_NEVER_USED = ("torchao", "boto3", "onnxruntime", "cosmos_guardrail")
"""The libraries import these where they are installed: for quantised or translated checkpoints, which are not trained
here, for a cloud's command line, and to check what Cosmos makes. Some print warnings; the last one turns off all
gradients when it is imported, and fails without further packages."""
_RARELY_USED = ("scipy", "scipy.optimize", "scipy.stats")
"""For losses of detection models, and for noise levels that are spaced as quantiles of a distribution."""


class _Late(types.ModuleType):
    """Stands for a module until one of its functions is called; only then it is imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            return functools.partial(_call, self.__name__, name)
        return getattr(importlib.import_module(self.__name__), name)


def _call(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found(*args, **kwargs)


@contextlib.contextmanager
def hide_extras() -> Iterator[None]:
    """Libraries that are imported within the block find none of `_NEVER_USED`, and get `_RARELY_USED` when they use it.

    After it others may import both. Where a script has imported diffusers before, nothing of `_NEVER_USED` is hidden.
    """
    hidden: dict[str, Any] = {}
    if "diffusers" not in sys.modules:  # else it has found them already, and fails where they are gone
        hidden = dict.fromkeys(name for name in _NEVER_USED if name not in sys.modules)  # None: not there
    if "scipy" not in sys.modules:
        hidden |= _build_late_modules()
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _build_late_modules() -> dict[str, types.ModuleType]:
    """Those of `_RARELY_USED` that are installed, by name."""
    found: dict[str, types.ModuleType] = {}
    spec = importlib.util.find_spec("scipy")
    if spec is None:
        return found
    for name in _RARELY_USED:
        found[name] = _Late(name)
        found[name].__spec__ = spec
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(found[parent], own, found[name])
    return found


@contextlib.contextmanager
def disable_gc() -> Iterator[None]:
    """No search for unused objects within the block: an import makes many and leaves none, so that it takes long and
    finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
