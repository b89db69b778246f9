"""Which sampling steps are trained, and what a recorder keeps of them."""

import pytest
import torch
from torch import Tensor

from cosmos_rl.diffusion.kernels import build_kernel, step_with_log_prob
from cosmos_rl.diffusion.sampling import run_sampling
from cosmos_rl.diffusion.steps import StepRecorder, StepSelection


def choices(selection: StepSelection, count: int = 200) -> list[tuple[int, ...]]:
    return [selection.choose(step, torch.Generator().manual_seed(step)) for step in range(count)]


def test_the_first_steps() -> None:
    assert set(choices(StepSelection(10, count=9))) == {tuple(range(9))}


def test_random_steps_are_distinct_ascending_and_reach_all_but_the_last() -> None:
    found = choices(StepSelection(10, "random", count=5))
    assert all(len(set(one)) == 5 and list(one) == sorted(one) for one in found)
    assert {index for one in found for index in one} == set(range(9))
    assert found == choices(StepSelection(10, "random", count=5))


def test_random_steps_may_lie_in_a_share_of_all() -> None:
    """Flow-DPPO: three steps of the first half."""
    found = choices(StepSelection(10, "random", count=3, end=5))
    assert {index for one in found for index in one} == set(range(5))


def test_a_list_is_filled_up_with_other_random_steps() -> None:
    found = choices(StepSelection(8, "list", indices=(0, 2, -1, -1)))
    assert all(len(set(one)) == 4 and {0, 2} <= set(one) and list(one) == sorted(one) for one in found)
    assert {index for one in found for index in one} == set(range(7))


def test_a_window_lies_in_its_share_of_the_steps() -> None:
    """Flow-GRPO-Fast: the start is uniform in 0 ... N / 2 - 3."""
    found = choices(StepSelection(10, "window", count=3, end=5))
    assert set(found) == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}
    assert all(found.count(one) > 40 for one in set(found))
    assert max(one[-1] for one in choices(StepSelection(10, "window", count=3))) == 8


def test_a_moving_window_moves_on_and_starts_again() -> None:
    """MixGRPO: it moves by the stride every so many training steps."""
    found = choices(StepSelection(7, "moving_window", count=2, stride=2, interval=3), 12)
    assert found == [(0, 1)] * 3 + [(2, 3)] * 3 + [(4, 5)] * 3 + [(0, 1)] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"count": 10},
        {"count": 0},
        {"choice": "list", "indices": (9,)},
        {"choice": "list", "indices": (2, 2)},
        {"choice": "list"},
        {"choice": "window", "count": 4, "end": 3},
    ],
)
def test_steps_that_there_are_not_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="trained steps: found .* allowed"):
        StepSelection(10, **options)


def noise_of(index: int) -> Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("noise_elsewhere", [True, False])
def test_a_recorder_keeps_what_a_step_was_made_of(noise_elsewhere: bool) -> None:
    recorder = StepRecorder((1, 3), keep_velocity=True, noise_elsewhere=noise_elsewhere)
    kernel = recorder.restrict(build_kernel("flow", noise_level=0.7, deterministic=False))

    def step(velocity, latents, index, sigmas, *, history, noise):
        return step_with_log_prob(kernel(index, sigmas), latents, velocity, history, noise)

    sampled = run_sampling(
        lambda x, sigma: 0.5 * x + sigma[:, None, None],
        noise_of(100),
        torch.linspace(1, 0, 6),
        kernel=kernel,
        step_fn=recorder.wrap(step),
        noise_fn=noise_of,
        keep_trajectory=True,
    )
    recorded = recorder.recorded()
    assert recorded["step"].tolist() == [[1, 3], [1, 3]]
    sigmas = torch.linspace(1, 0, 6).double().tolist()
    for column, index in enumerate((1, 3)):
        state, noise, velocity = (recorded[name][:, column] for name in ("state", "noise", "velocity"))
        transition = kernel(index, sigmas)
        assert torch.equal(state, sampled.trajectory[index])
        assert torch.equal(noise, noise_of(index))
        following = transition.mean(state, velocity) + transition.s * noise
        torch.testing.assert_close(following, sampled.trajectory[index + 1])
    assert [log_prob is not None for log_prob in sampled.log_probs] == (
        [True] * 4 + [False] if noise_elsewhere else [False, True, False, True, False]
    )


def test_a_step_without_noise_cannot_be_recorded() -> None:
    recorder = StepRecorder((4,), keep_velocity=False, noise_elsewhere=True)
    kernel = recorder.restrict(build_kernel("flow", noise_level=0.7, deterministic=False))

    def step(velocity, latents, index, sigmas, *, history, noise):
        return step_with_log_prob(kernel(index, sigmas), latents, velocity, history, noise)

    with pytest.raises(ValueError, match="step 4 is to be trained and has no noise"):
        run_sampling(
            lambda x, sigma: x,
            noise_of(0),
            torch.linspace(1, 0, 6),
            kernel=kernel,
            step_fn=recorder.wrap(step),
            noise_fn=noise_of,
        )
