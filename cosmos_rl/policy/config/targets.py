"""The rule of `policy.lora.target_modules`, the same for a check that knows names alone and for the model itself."""

import difflib
from collections.abc import Iterable, Sequence


def target_problems(targets: Sequence[str], layers: Iterable[str]) -> list[str]:
    """A line for each target that is neither the name nor the end of the name of one of the layers."""
    names = list(layers)
    endings = {".".join(parts[-n:]) for parts in (name.split(".") for name in names) for n in (1, 2, 3)}
    lines = []
    for target in targets:
        if any(name == target or name.endswith(f".{target}") for name in names):
            continue
        near = difflib.get_close_matches(target, endings, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        lines.append(f"policy.lora.target_modules: {target!r} matches no layer of the transformer{hint}")
    return lines
