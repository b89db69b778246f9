"""Several prompt sets in words: their steps and shares. No torch."""

from collections.abc import Iterator
from fractions import Fraction

from cosmos_rl.data.set_schedule import SetSchedule, Stage
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.plan import plan_online


def set_lines(config: Config) -> Iterator[str]:
    """A line for each stage; none where there is one set."""
    if not job_kind(config).online or not online_table(config).dataset.sets:
        return
    dataset, steps = online_table(config).dataset, config.train.max_num_steps
    schedule = SetSchedule(dataset.sets, plan_online(config).items, dataset.mix == "steps")
    for stage in schedule.stages:
        if steps is None or stage.first < steps:
            yield _describe_stage(stage, schedule, steps)
    never = [one.shown_name for one in dataset.sets if steps is not None and one.first_step >= steps]
    if never:
        yield f"never drawn, as the run ends before their first_step: {', '.join(never)}"


def _describe_stage(stage: Stage, schedule: SetSchedule, total: int | None) -> str:
    ends = [end for end in (stage.last, total) if end is not None]
    last = min(ends) - 1 if ends else "the end"
    parts = []
    for number, share in stage.shares:
        fraction = Fraction(share, stage.period)
        part = "all" if fraction == 1 else fraction
        of = "the steps" if schedule.whole_steps else "the prompts"
        mean = "" if schedule.whole_steps else f" ({float(fraction * schedule.per_step):.3g} a step)"
        parts.append(f"{schedule.sets[number].shown_name} {part} of {of}{mean}")
    steps = f"step {last}" if last == stage.first else f"steps {stage.first} to {last}"
    return f"{steps}: {', '.join(parts)}"
