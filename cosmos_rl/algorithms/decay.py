"""Decay schedules of weight averages."""


def ema_decay(step: int, bound: float) -> float:
    """Decay of the EMA at 0-based optimiser step ``step``: ``min((1 + step) / (10 + step), bound)``.

    The shadow follows ``ema += (1 - decay) * (weights - ema)``.
    """
    return min((1 + step) / (10 + step), bound)


def old_policy_decay(kind: int, k: int) -> float:
    """Share of itself that the sampling policy keeps after optimiser step ``k`` (1-based).

    ``old = decay * old + (1 - decay) * current`` (Zheng et al. 2025, arXiv 2509.16117).

    Args:
        kind: 0: always the current policy; 1: ``min(0.001 k, 0.5)``; 2: 0 up to step 75, then
            ``min(0.0075 (k - 75), 0.999)``.
        k: optimiser steps so far.
    """
    if kind == 0:
        return 0.0
    if kind == 1:
        return min(0.001 * k, 0.5)
    if kind == 2:
        return min(0.0075 * max(k - 75, 0), 0.999)
    raise ValueError(f"decay kind: found {kind}; allowed: 0, 1, 2")
