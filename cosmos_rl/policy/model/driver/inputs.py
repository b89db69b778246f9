"""Arguments of a denoiser's call by their path."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as tree

from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.driver.seams import OnDenoiser, Run

ScalarLevel = tuple[float, float]
"""(t, sigma)"""


def scalar_levels(level: Level, n: int) -> list[ScalarLevel]:
    """The level of each of n rows."""
    t, sigma = level.t.detach().expand(n).tolist(), level.sigma.detach().expand(n).tolist()
    return list(zip(t, sigma, strict=True))


class Inputs(NamedTuple):
    """One call of a denoiser: its name, and all its arguments by their path."""

    denoiser: str
    leaves: dict[str, Any]


def collect_leaves(value: Any) -> dict[str, Any]:
    """All leaves of a nesting by their path, as text."""
    return {tree.keystr(path): leaf for path, leaf in tree.tree_flatten_with_path(value)[0]}


def swap(table: dict[str, Tensor]) -> OnDenoiser:
    """Has the denoiser called with other tensors at the paths in the table."""

    def on_denoiser(_run: Run, _name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        found, spec = tree.tree_flatten_with_path((args, kwargs))
        return tree.tree_unflatten([table.get(tree.keystr(path), leaf) for path, leaf in found], spec)

    return on_denoiser
