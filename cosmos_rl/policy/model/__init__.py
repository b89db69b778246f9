"""Models by family. Each module in ``policy/model/diffusers/`` is imported on first use and registers its classes."""

import functools
import importlib
import pkgutil

from cosmos_rl.utils.logging import logger


@functools.cache
def discover() -> tuple[str, ...]:
    """Import every module of the ``diffusers`` folder, also one dropped there by a user.

    Returns:
        One line for each file that cannot be imported (also logged). Such a file does not hide the others.
    """
    package = importlib.import_module("cosmos_rl.policy.model.diffusers")
    broken = []
    for module in pkgutil.iter_modules(package.__path__):
        name = f"{package.__name__}.{module.name}"
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a user's file raises, the other families must stay usable
            broken.append(f"{name.replace('.', '/')}.py cannot be imported: {type(error).__name__}: {error}")
            logger.warning(broken[-1])
    return tuple(broken)
