"""Which parameters of a transformer are trained, by patterns over their names."""

import re
from collections.abc import Iterable

from torch import nn

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import PolicyConfig


def apply_patterns(module: nn.Module, policy: PolicyConfig) -> None:
    """Set ``requires_grad`` of every parameter by ``freeze_pattern``, ``trainable_pattern`` or ``trainable_map``.

    Without any of them everything is trained. In ``trainable_map`` the last pattern that matches a name decides, and
    names that none matches are trained.

    Raises:
        UserError: a pattern matches nothing, or nothing is left to train.
    """
    names = [name for name, _ in module.named_parameters()]
    for key in ("freeze_pattern", "trainable_pattern", "trainable_map"):
        _check_matches(f"policy.{key}", getattr(policy, key) or (), names)
    for name, param in module.named_parameters():
        param.requires_grad_(policy.is_trained(name))
    if not any(param.requires_grad for param in module.parameters()):
        raise UserError("policy: the patterns freeze every parameter of the transformer; nothing is left to train")


def _check_matches(key: str, patterns: Iterable[str], names: list[str]) -> None:
    unmatched = [pattern for pattern in patterns if not any(re.search(pattern, name) for name in names)]
    if unmatched:
        raise UserError(
            f"{key}: {', '.join(map(repr, unmatched))} matches no parameter of the transformer; names look like "
            f"{names[0]}, {names[len(names) // 2]}"
        )
