"""Windows that move in the course of a run: what is trained, what `check` says of them, and what is refused."""

from typing import Any

import pytest

from cosmos_rl.launcher.check.rl_lines import rl_lines
from cosmos_rl.policy.config import cross_check, notes
from cosmos_rl.policy.config.plan import moving_window
from tests.config.test_presets import job_of
from tests.support.flow_grpo_plane import JOB, Run, tables_of
from tests.support.toy_tasks import toy_config

STEPS = "train.train_policy.steps"
EXPONENTIAL: dict[str, Any] = {
    "choose": "window",
    "size": 2,
    "within": 0.5,  # of 10 sampling steps: the window begins at 0 ... 3
    "order": "exp_decay",
    "interval": 3,
    "decay_rate": 0.7,
    "decay_threshold": 1,
}


def problems_of(**steps: Any) -> list[str]:
    return cross_check(toy_config(tables_of(**{JOB + "steps": steps})))


@pytest.mark.parametrize(("roll_back", "then"), [(True, [0, 0]), (False, [3, 3])], ids=["rolls back", "stays"])
def test_a_run_trains_the_steps_of_the_schedule_wherever_it_begins(roll_back: bool, then: list[int]) -> None:
    """3 exp(-0.7 (l - 1)), rounded up: 3, 3, 2, 1 training steps."""
    tables = tables_of(**{JOB + "steps": {**EXPONENTIAL, "roll_back": roll_back}})
    begins = [0, 0, 0, 1, 1, 1, 2, 2, 3, *then]
    for first in (0, 7):
        run = Run(tables)
        for step in range(first, len(begins)):
            metrics = run.trainer.train_step(step).metrics
            trained = {name.rpartition("/")[2] for name in metrics if name.startswith("train/gradient_share/")}
            assert trained == {str(begins[step]), str(begins[step] + 1)}, step


def test_the_preset_is_the_published_schedule() -> None:
    window = moving_window(job_of("mix_grpo"))
    assert window is not None
    assert (window.order, window.starts, window.interval, window.roll_back) == ("progressive", (*range(21),), 25, True)
    exponential = moving_window(job_of("mix_grpo", steps={"order": "exp_decay"}))
    assert exponential is not None
    assert (exponential.decay_rate, exponential.decay_threshold) == (0.1, 13)
    assert sum(exponential.intervals) == 14 * 25 + 23 + 21 + 19 + 17 + 16 + 14 + 13
    assert moving_window(job_of("flow_grpo_fast")) is None


def test_check_says_where_the_window_is() -> None:
    lines = list(rl_lines(job_of("mix_grpo"), None))
    assert (
        'the window moves ("progressive") from steps 0 ... 3 to steps 20 ... 23: 21 places in 525 training steps, '
        "then it begins again" in lines
    )
    steps = {"order": "exp_decay", "roll_back": False}
    [line] = [line for line in rl_lines(job_of("mix_grpo", steps=steps), None) if "window" in line and "place" in line]
    assert line.endswith("21 places in 473 training steps, then it stays at the last one")
    assert not any("place" in line for line in rl_lines(job_of("flow_grpo_fast"), None))


@pytest.mark.parametrize(
    ("steps", "starts"),
    [
        ({"size": 4, "stride": 3}, [0, 3, 5]),  # of the 9 steps with noise of 10
        ({"size": 2, "stride": 3, "within": 0.6}, [0, 3, 4]),
    ],
    ids=["stride in the window", "stride beyond it"],
)
def test_a_stride_that_does_not_come_out_even_leaves_no_last_steps_untrained(
    steps: dict[str, Any], starts: list[int]
) -> None:
    tables = {"choose": "window", "order": "progressive", "interval": 1, **steps}
    run = Run(tables_of(**{JOB + "steps": tables}))
    for step, start in enumerate([*starts, 0]):
        metrics = run.trainer.train_step(step).metrics
        trained = {int(name.rpartition("/")[2]) for name in metrics if name.startswith("train/gradient_share/")}
        assert trained == set(range(start, start + steps["size"])), step


def test_steps_between_the_places_of_a_window_are_named() -> None:
    def warnings(**steps: Any) -> list[str]:
        config = toy_config(tables_of(**{JOB + "steps": {"choose": "window", "order": "progressive", **steps}}))
        return [line for line in notes(config) if "never trained" in line]

    assert warnings(size=2, stride=4) == [
        f"warning: {STEPS}.stride = 4 with {STEPS}.size = 2: the sampling steps [2, 3, 6] are never trained; a stride "
        "of at most 2 leaves none out"
    ]
    assert warnings(size=2, stride=4, within=0.4) == []
    assert warnings(size=3, stride=3) == warnings(size=3, stride=2) == warnings(size=1) == []
    assert warnings(size=2, stride=4, order="random") == []


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (
            {**EXPONENTIAL, "decay_threshold": 3},
            f"{STEPS}.decay_threshold: found 3; allowed: less than 3, where the last window begins, as otherwise none "
            'of them stays shorter; or order = "progressive"',
        ),
        (
            {"choose": "window", "size": 2, "order": "decay", "interval": 4, "least_interval": 5},
            f'{STEPS}.least_interval: found 5; allowed: 1 to {STEPS}.interval = 4 with order = "decay", whose window '
            "stays ever shorter",
        ),
    ],
    ids=["threshold", "least interval"],
)
def test_a_decay_that_is_none_is_refused(steps: dict[str, Any], problem: str) -> None:
    assert problems_of(**steps) == [problem]


def test_a_window_that_is_too_large_is_refused_for_that_alone() -> None:
    [problem] = problems_of(**{**EXPONENTIAL, "size": 6})
    assert problem.startswith(f"{STEPS}: found 6 trained steps; allowed: 1 to 5 of policy.diffusers.sample.num_steps")
