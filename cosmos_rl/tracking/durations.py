"""Seconds as people read them."""


def format_duration(seconds: float, *, whole: bool = False) -> str:
    """``95.2s`` below two minutes, or ``95s`` if ``whole``, else ``1h02m`` or ``12m05s``."""
    if seconds < 120:
        return f"{seconds:.{0 if whole else 1}f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s"
