"""Decay schedules of weight averages."""


def ema_decay(step: int, bound: float) -> float:
    """Decay of the EMA at 0-based optimiser step ``step``: ``min((1 + step) / (10 + step), bound)``.

    The shadow follows ``ema += (1 - decay) * (weights - ema)``.
    """
    return min((1 + step) / (10 + step), bound)
