"""What a recorder keeps of a sampling run."""

import pytest
import torch
from torch import Tensor

from cosmos_rl.diffusion.kernels import Kernel, build_kernel, dpm2, euler, step_with_log_prob
from cosmos_rl.diffusion.sampling import run_sampling
from cosmos_rl.diffusion.step_recorder import StepRecorder


def noise_of(index: int) -> Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(index))


NOISY = build_kernel("flow", noise_level=0.7, deterministic=False)


@pytest.mark.parametrize("elsewhere", [None, euler, dpm2])
def test_a_recorder_keeps_what_a_step_was_made_of(elsewhere: Kernel | None) -> None:
    recorder = StepRecorder((1, 3), keep_velocity=True, elsewhere=elsewhere)
    kernel = recorder.restrict(NOISY)

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
        for name, value in {"g": transition.g, "s": transition.s, "next": sigmas[index + 1]}.items():
            assert recorded[name][:, column].tolist() == [value] * 2
    for index in range(5):
        other = elsewhere or NOISY
        assert kernel(index, sigmas) == (NOISY if index in (1, 3) else other)(index, sigmas)
    noisy = [True] * 4 + [False] if elsewhere is None else [False, True, False, True, False]
    assert [log_prob is not None for log_prob in sampled.log_probs] == noisy


def test_a_step_without_noise_cannot_be_recorded() -> None:
    recorder = StepRecorder((4,), keep_velocity=False)
    kernel = recorder.restrict(NOISY)

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
