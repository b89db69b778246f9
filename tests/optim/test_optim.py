"""Schedules, averages, the optimiser step and keyed randomness against closed forms."""

from collections.abc import Sequence

import pytest
import torch

from cosmos_rl.algorithms.decay import ema_decay
from cosmos_rl.distributed import randomness
from cosmos_rl.optim.ema import Ema
from cosmos_rl.optim.optimizer import clip_by_whole_norms
from cosmos_rl.optim.schedule import LrSchedule
from tests.support.optimizers import optimizer


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [0, 0.3333, 0.6667, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0, 0.3333, 0.6667, 1, 1, 1, 1, 0.8682, 0.55, 0.2318, 0.1]),
    ],
)
def test_learning_rate_factors_are_the_golden_ones(kind: str, expected: list[float]) -> None:
    schedule = LrSchedule.build(10, 4, 0.4, kind, warmup_start_factor=0.0, min_factor=0.1)
    assert [schedule.factor(s) for s in range(11)] == pytest.approx(expected, abs=5e-5)  # golden has 4 digits


def test_a_warm_up_is_cut_to_a_shorter_run_and_a_longer_one_has_the_factors_of_the_page() -> None:
    def factors(total: int, warmup: int, steps: range) -> list[float]:
        schedule = LrSchedule.build(total, warmup, None, None, 0.0, 0.0)
        return [schedule.factor(step) for step in steps]

    assert factors(5, 20, range(5)) == [0, 0.25, 0.5, 0.75, 1]
    assert factors(40, 20, range(5, 40)) == pytest.approx([min(step / 19, 1) for step in range(5, 40)])
    assert factors(40, 5, range(40)) == factors(5, 20, range(5)) + [1.0] * 35  # the remedy that the page names


def test_warm_up_as_a_fraction_and_of_one_step() -> None:
    assert LrSchedule.build(100, 0.25, None, "linear", 0.0, 0.0).warmup_steps == 25
    assert LrSchedule.build(100, 1, None, "linear", 0.0, 0.0).factor(0) == 1.0
    assert LrSchedule.build(100, 500, None, None, 0.0, 0.0).warmup_steps == 100
    assert LrSchedule.build(10, 0, None, "sqrt", 0.0, 0.0).factor(9) == pytest.approx(1 - 0.9**0.5)
    constant = LrSchedule.build(10, 0, None, None, 0.0, 0.5)
    assert {constant.factor(s) for s in range(12)} == {1.0}


def test_ema_decay_is_the_golden_one() -> None:
    values = [ema_decay(k, 0.9) for k in (0, 1, 2, 10, 80, 100)]
    assert values == pytest.approx([0.1, 0.1818, 0.25, 0.55, 0.9, 0.9], abs=5e-5)


def test_ema_follows_the_weights_by_hand_and_gives_them_back() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    ema = Ema({"w": weight}, decay=0.9, interval=0)
    shadow = torch.tensor([1.0, 2.0])
    for step in range(3):
        with torch.no_grad():
            weight.add_(1.0)
        ema.update(step)
        keep = (1 + step) / (10 + step)
        shadow = keep * shadow + (1 - keep) * weight.detach()
    torch.testing.assert_close(ema.shadow["w"], shadow)
    live = weight.detach().clone()

    def fail_while_swapped() -> None:
        with ema.average_parameters():
            assert torch.equal(weight.detach(), ema.shadow["w"])
            raise RuntimeError("in validation")

    with pytest.raises(RuntimeError, match="in validation"):
        fail_while_swapped()
    assert torch.equal(weight.detach(), live)


def test_ema_interval_skips_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    ema = Ema({"w": weight}, decay=0.5, interval=3)
    with torch.no_grad():
        weight.zero_()
    moved = []
    for step in range(6):
        before = ema.shadow["w"].clone()
        ema.update(step)
        moved.append(not torch.equal(before, ema.shadow["w"]))
    assert moved == [False, False, True, False, False, True]


@pytest.mark.parametrize("impl", ["fused", "foreach", "for-loop"])
def test_one_adamw_step_is_the_closed_form(impl: str) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    weight.grad = torch.tensor([3.0, 4.0])
    result = optimizer(weight, impl=impl).step(0)
    assert result.grad_norm == pytest.approx(5.0)
    # clipped to norm 1; the bias-corrected first step is the sign of the gradient, after decay by lr * wd
    assert weight.tolist() == pytest.approx([1.0 * 0.99 - 0.1, -2.0 * 0.99 - 0.1], abs=1e-6)
    assert weight.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    opt = optimizer(weight)
    weight.grad = torch.tensor([bad])
    assert not opt.step(0).applied
    assert weight.tolist() == [1.0]
    assert not opt.torch_optimizer.state


def test_a_clip_of_zero_only_measures() -> None:
    weight = torch.nn.Parameter(torch.tensor([0.0]))
    weight.grad = torch.tensor([50.0])
    opt = optimizer(weight, max_grad_norm=0.0, weight_decay=0.0)
    assert opt.step(0).grad_norm == 50.0
    assert opt.torch_optimizer.state[weight]["exp_avg"].item() == pytest.approx(5.0)


def test_draws_depend_on_the_key_alone() -> None:
    together = randomness.normal((2, 3), 0, "noise", 4, [10, 11, 12])
    torch.manual_seed(99)
    alone = [randomness.normal((2, 3), 0, "noise", 4, [i]) for i in (10, 11, 12)]
    assert torch.equal(together, torch.cat(alone))
    others = [(1, "noise", 4, [10]), (0, "level", 4, [10]), (0, "noise", 5, [10]), (0, "noise", 4, [11])]
    assert not any(torch.equal(randomness.normal((2, 3), *other), together[:1]) for other in others)


def test_samples_of_one_step_never_share_their_noise() -> None:
    """torch's CPU generator keeps 32 bits of a seed: keys that differ above them are one key."""
    # samples of one step, and of two steps, that were equal when all ids were hashed to 63 bits
    for seed, purpose, places in (
        (42, "nft/noise/0", ((36, 419928), (36, 422687))),
        (0, "rollout", ((81, 81162), (103, 103263))),
    ):
        assert not torch.equal(*(randomness.normal((4,), seed, purpose, step, [i]) for step, i in places))
    same = [torch.randn(3, generator=torch.Generator().manual_seed(seed)) for seed in (12345, 12345 + 2**32)]
    assert torch.equal(*same)
    for ids in (range(2_000), range(2**32 - 10, 2**32 + 10)):
        starts = {randomness.normal((4,), 42, "rollout", 7, [i]).numpy().tobytes() for i in ids}
        assert len(starts) == len(ids)
    seeds = {randomness.torch_seed(42, "rollout", 0, i) for i in range(300_000)}
    assert len(seeds) == 300_000


def test_seeds_are_spread_over_their_range() -> None:
    for seeds in (
        [randomness.torch_seed(seed, "lora/a") for seed in range(2_000)],
        [randomness.torch_seed(0, "rollout", step, 5) for step in range(2_000)],
    ):
        assert len(set(seeds)) == 2_000
        assert all(0 <= seed < 2**32 for seed in seeds)
        assert sum(seeds) / 2_000 / 2**32 == pytest.approx(0.5, abs=4 * (1 / 12 / 2_000) ** 0.5)


def test_keys_are_spread_over_their_range() -> None:
    keys = [randomness.key(0, "noise", 0, i) for i in range(4096)]
    assert len(set(keys)) == 4096
    assert all(0 <= k < 2**63 for k in keys)
    draws = randomness.uniform(0, "u", 0, range(4096))
    assert float(draws.mean()) == pytest.approx(0.5, abs=4 * (1 / 12 / 4096) ** 0.5)
    normals = randomness.scalar_normal(0, "n", 0, range(4096))
    assert float(normals.std()) == pytest.approx(1.0, abs=4 / (2 * 4096) ** 0.5)
    assert float(normals.mean()) == pytest.approx(0.0, abs=4 / 4096**0.5)
    assert float(draws.min()) > 0.0
    assert float(draws.max()) < 1.0


def test_a_step_without_any_gradient_moves_nothing_and_measures_zero() -> None:
    """A frozen expert may have served all rows of the step."""
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    result = optimizer(weight).step(0, scale=0.25, loss=1.0)
    assert result.grad_norm == 0.0
    assert weight.item() == 2.0


@pytest.mark.parametrize("bound", [0.5, 12.0, 100.0])
def test_the_norm_of_whole_gradients_clips_like_torch(bound: float) -> None:
    grads = [torch.randn(7, 5, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(params, bound)
    assert clip_by_whole_norms(grads, bound) == pytest.approx(expected.item(), rel=1e-6)
    for param, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(grad, param.grad)


@pytest.mark.zoo  # the bits are those of this CPU's vector kernels
@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
@pytest.mark.parametrize("shape", [(24, 96), (20, 7), (40,)])
def test_a_step_and_the_average_have_the_same_bits_on_the_shards_of_a_weight(
    implementation: str, shape: tuple[int, ...]
) -> None:
    """What ``train.rank_invariant`` builds on; the fused step rounds the last elements of a tensor in another way."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for _ in range(6)]

    def train(parts: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        params = {str(k): torch.nn.Parameter(part.clone()) for k, part in enumerate(parts[0])}
        foreach = implementation == "foreach"
        steps = torch.optim.AdamW(params.values(), lr=1e-2, weight_decay=0.01, foreach=foreach, fused=False)
        ema = Ema(params, 0.9, 1)
        for step, grads in enumerate(parts[1:]):
            for param, grad in zip(params.values(), grads, strict=True):
                param.grad = grad.clone()
            steps.step()
            ema.update(step)
        return torch.cat([p.detach() for p in params.values()]), torch.cat(list(ema.shadow.values()))

    expected = train([[tensor] for tensor in whole])
    for ranks in (2, 4, 8):
        found = train([tensor.chunk(ranks) for tensor in whole])  # as FSDP2 shards it
        assert all(map(torch.equal, found, expected)), ranks
