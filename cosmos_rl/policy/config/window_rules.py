"""Rules of a moving window of trained sampling steps."""

from collections.abc import Iterator

from cosmos_rl.policy.config.plan import moving_window
from cosmos_rl.policy.config.schema import Config

_STEPS = "train.train_policy.steps"


def window_rules(config: Config) -> Iterator[str]:
    """Every rule that a moving window breaks whose size is right, one line each."""
    window = moving_window(config)
    if window is None:
        return
    if window.order == "decay" and window.least_interval > window.interval:
        yield (
            f"{_STEPS}.least_interval: found {window.least_interval}; allowed: 1 to {_STEPS}.interval = "
            f'{window.interval} with order = "decay", whose window stays ever shorter'
        )
    begins = window.starts[-1]
    if window.order == "exp_decay" and begins == 0:
        yield (
            f'{_STEPS}.order: found "exp_decay" with a window that has one place; allowed: "progressive", or a smaller '
            f"{_STEPS}.size or {_STEPS}.stride"
        )
    elif window.order == "exp_decay" and begins <= window.decay_threshold:
        yield (
            f"{_STEPS}.decay_threshold: found {window.decay_threshold}; allowed: less than {begins}, where the last "
            'window begins, as otherwise none of them stays shorter; or order = "progressive"'
        )
