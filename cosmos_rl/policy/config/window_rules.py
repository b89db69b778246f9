"""Rules of a moving window of trained sampling steps, and what is worth knowing about one."""

from collections.abc import Iterator

from cosmos_rl.policy.config.plan import STEP_TRAINERS, moving_window
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.train_policy import GrpoPolicyConfig

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
            f"{_STEPS}.size"
        )
    elif window.order == "exp_decay" and begins <= window.decay_threshold:
        yield (
            f"{_STEPS}.decay_threshold: found {window.decay_threshold}; allowed: less than {begins}, where the last "
            'window begins, as otherwise none of them stays shorter; or order = "progressive"'
        )


def window_notes(config: Config) -> Iterator[str]:
    """The sampling steps between the places of a window, which it never has."""
    job = config.train.train_policy
    if not isinstance(job, GrpoPolicyConfig) or job.trainer_type not in STEP_TRAINERS:
        return
    window, size = moving_window(config), job.steps.size
    if window is None:
        return
    trained = {start + k for start in window.starts for k in range(size)}
    if never := sorted(set(range(window.last + size)) - trained):
        yield (
            f"warning: {_STEPS}.stride = {window.stride} with {_STEPS}.size = {size}: the sampling steps {never} are "
            f"never trained; a stride of at most {size} leaves none out"
        )
