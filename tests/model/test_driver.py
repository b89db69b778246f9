"""The contract of a flow model, kept by stock pipelines that are driven: the same tests for every family.

Families outside the ordinary suite have the marker ``zoo`` (``make test-zoo``).
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.diffusion.kernels import apply_transition, build_kernel, transition_log_prob
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.loading import load_pipeline
from cosmos_rl.policy.model.driver.probe import prove
from cosmos_rl.policy.model.tiny import build
from tests.support.driven import ORDINARY, PARAMS, PROMPTS, STEPS, ZOO, Family, Pair, generators, make_pair

_made: dict[str, Pair] = {}

MODES = pytest.mark.parametrize("mode", ["off", "on"])


@pytest.fixture(params=PARAMS, scope="session")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family: Family = request.param
    if family.name not in _made:
        _made[family.name] = make_pair(family, tmp_path_factory.mktemp("driven"))
    return _made[family.name]


def wide(level: Level, n: int) -> Level:
    return Level(level.t.expand(n), level.sigma.expand(n))


@pytest.mark.parametrize("prompts", [PROMPTS[1:2], PROMPTS], ids=["one", "three"])
@MODES
def test_states_velocities_and_media_are_those_of_the_stock_call(pair: Pair, mode: str, prompts: list[str]) -> None:
    guidance, n = pair.guidance(mode), len(prompts)
    seen, media = pair.stock_call(prompts, guidance, generators(n))
    cond = pair.driver.encode(prompts, guidance=guidance)
    loop = pair.driver.rollout(cond, generators(n), STEPS, guidance, keep_velocities=True)
    assert loop.velocities is not None
    assert loop.media is not None
    assert len(seen) == STEPS
    assert len(loop.states) == len(loop.levels) == STEPS + 1
    for (state, t, model_output), driven, level, velocity in zip(
        seen, loop.states, loop.levels, loop.velocities, strict=False
    ):
        assert torch.equal(driven, state)
        assert float(level.t) == float(t)
        assert torch.equal(pair.driver.convert_sign(velocity), model_output)
        # a velocity at a recorded step repeats the rollout's, whatever the scheduler rounds or remembers
        with torch.no_grad():
            assert torch.equal(pair.driver.velocity(driven, level, cond, guidance), velocity)
            assert torch.equal(pair.driver.velocity(driven, wide(level, n), cond, guidance), velocity)
    assert torch.equal(loop.media, media)
    assert 0 <= float(media.min()) < float(media.max()) <= 1
    assert float(loop.levels[-1].sigma) == pytest.approx(0.0 if pair.family.path == "flow" else 0.002)
    assert not torch.equal(loop.velocities[0], loop.velocities[1])


def test_facts_are_those_of_the_documentation(pair: Pair) -> None:
    facts, family = pair.driver.facts, pair.family
    assert (facts.guidance_name, facts.guidance_off, facts.path) == (family.guidance, family.off, family.path)
    assert pair.driver.frames_name == (family.frames and family.frames[0])
    parts = {name for name, part in pair.stock.components.items() if name.startswith("transformer") and part}
    assert set(pair.driver.denoisers) == parts
    assert [bool(facts.time_inputs[mode]) for mode in ("off", "on")] == 2 * [family.one_call]
    sigma = torch.tensor([0.0119, 0.3333, 0.99967])
    t = pair.driver.training_level(sigma).t
    if family.t == "float":
        torch.testing.assert_close(t, 1000 * sigma)
    if family.t == "whole":
        assert t.tolist() == [11, 333, 999]
    if family.name == "mochi":
        torch.testing.assert_close(t, 1000 * (1 - sigma))
    for level in pair.driver.levels(7)[:-1]:
        assert float(pair.driver.training_level(level.sigma).t) == pytest.approx(float(level.t), abs=1.0)


@MODES
def test_probability_ratio_is_exactly_one(pair: Pair, mode: str) -> None:
    guidance, driver, n = pair.guidance(mode), pair.driver, len(PROMPTS)
    kernel = build_kernel("flow", noise_level=0.7, deterministic=False)
    sigmas = [float(level.sigma) for level in driver.levels(STEPS)]
    if pair.family.path == "edm":
        sigmas = [sigma / (1 + sigma) for sigma in sigmas]
    sigmas[0] = min(sigmas[0], 0.999)  # this kernel has no transition from sigma 1
    recorded: list[tuple[Tensor, Tensor, Tensor]] = []

    def transition(index: int, velocity: Tensor, level: Level, next_sigma: Tensor, state: Tensor) -> Tensor:
        noise = torch.randn(state.shape, generator=torch.Generator().manual_seed(index))
        moved = apply_transition(kernel(index, sigmas), state, velocity, None, noise)
        recorded.append((state, velocity.clone(), moved))
        assert float(next_sigma) <= float(level.sigma)
        return moved

    cond = driver.encode(PROMPTS, guidance=guidance)
    loop = driver.rollout(cond, generators(n), STEPS, guidance, transition, decode=False)
    assert loop.media is None
    for index, (state, velocity, moved) in enumerate(recorded):
        with torch.no_grad():
            again = driver.velocity(loop.states[index], loop.levels[index], cond, guidance)
        assert torch.equal(loop.states[index], state)
        assert torch.equal(loop.states[index + 1], moved)
        step = kernel(index, sigmas)
        assert step is not None
        if step.s > 0:
            then, now = (transition_log_prob(moved, state, v, step) for v in (velocity, again))
            assert torch.equal(torch.exp(now - then), torch.ones(n))


@MODES
def test_rows_of_different_sigmas_get_what_they_get_alone(pair: Pair, mode: str) -> None:
    guidance, driver = pair.guidance(mode), pair.driver
    cond = driver.encode(PROMPTS, guidance=guidance)
    loop = driver.rollout(cond, generators(3), STEPS, guidance, decode=False)
    x, order = loop.states[1], [2, 0, 2]
    level = Level(*(torch.stack([loop.levels[k][part] for k in order]) for part in (0, 1)))
    with torch.no_grad():
        together = driver.velocity(x, level, cond, guidance)
        alone = [
            driver.velocity(x[[r]], loop.levels[k], cond.rows(torch.tensor([r])), guidance) for r, k in enumerate(order)
        ]
        at_once = driver.velocity(x, loop.levels[2], cond, guidance)
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert float((together[1] - at_once[1]).abs().max()) > 1e-4  # the level is felt


@MODES
def test_rows_can_be_picked_and_repeated(pair: Pair, mode: str) -> None:
    guidance, driver = pair.guidance(mode), pair.driver
    cond = driver.encode(PROMPTS, guidance=guidance)
    loop = driver.rollout(cond, generators(3), STEPS, guidance, decode=False)
    x, level, index = loop.states[1], loop.levels[1], torch.tensor([2, 1, 1, 0])
    with torch.no_grad():
        all_rows = driver.velocity(x, level, cond, guidance)
        picked = driver.velocity(x[index], level, cond.rows(index).to("cpu"), guidance)
    assert cond.rows(index).size == 4
    torch.testing.assert_close(picked, all_rows[index], rtol=1e-4, atol=1e-5)
    assert float((all_rows[2] - all_rows[1]).abs().max()) > 1e-4


def test_conditions_made_with_guidance_serve_without_it(pair: Pair) -> None:
    driver = pair.driver
    loop = driver.rollout(driver.encode(PROMPTS), generators(3), STEPS, decode=False)
    with torch.no_grad():
        plain = driver.velocity(loop.states[1], loop.levels[1], driver.encode(PROMPTS))
        of_guided = driver.velocity(loop.states[1], loop.levels[1], driver.encode(PROMPTS, guidance=3.0))
    torch.testing.assert_close(of_guided, plain, rtol=1e-4, atol=1e-5)  # prompts may be padded to other lengths


@MODES
def test_the_gradient_is_the_slope(pair: Pair, mode: str) -> None:
    """Along its own direction, by central differences of the driven velocity."""
    guidance, driver = pair.guidance(mode), pair.driver
    cond = driver.encode(PROMPTS[1:], guidance=guidance)
    loop = driver.rollout(cond, generators(2), STEPS, guidance, decode=False)
    levels = Level(*(torch.stack([loop.levels[k][part] for k in (1, 2)]) for part in (0, 1)))
    weights = [w for module in driver.denoisers.values() for w in module.parameters()]
    towards = torch.randn(loop.states[1].shape, generator=torch.Generator().manual_seed(0))

    def value() -> Tensor:
        return (driver.velocity(loop.states[1], levels, cond, guidance).double() * towards).sum()

    for weight in weights:
        weight.requires_grad_(True)
    gradients = torch.autograd.grad(value(), weights, allow_unused=True)
    length = float(torch.stack([g.double().square().sum() for g in gradients if g is not None]).sum().sqrt())
    assert length > 0
    kept = [w.detach().clone() for w in weights]
    step = 0.2 / length  # far above rounding, too small to bend

    def moved(by: float) -> float:
        with torch.no_grad():
            for weight, before, gradient in zip(weights, kept, gradients, strict=True):
                weight.copy_(before if gradient is None else before + by * gradient / length)
            return float(value())

    try:
        slope = (moved(step) - moved(-step)) / (2 * step)
    finally:
        moved(0.0)
    assert slope == pytest.approx(length, rel=0.02)


def test_decode_after_encode_is_the_autoencoder_alone(pair: Pair) -> None:
    driver, vae = pair.driver, pair.stock.vae
    frames = pair.family.frames[1] if pair.family.frames else None
    shape = (2, 3, 32, 32) if frames is None else (2, frames, 3, 32, 32)
    media = 2 * torch.rand(shape, generator=torch.Generator().manual_seed(5)) - 1
    takes = media if frames is None else media.movedim(2, 1)
    if driver.facts.latent_shape[1:2] == [1] and frames is None:
        takes = takes.unsqueeze(2)
    with torch.no_grad():
        made = vae.encode(takes)
        latents = made.latent_dist.mode() if hasattr(made, "latent_dist") else made.latent
        wanted = (vae.decode(latents, return_dict=False)[0] / 2 + 0.5).clamp(0, 1)
    if wanted.ndim == 5:
        wanted = wanted.movedim(1, 2) if frames else wanted[:, :, 0]
    state = driver.encode_media(media)
    assert list(state.shape[1:]) == driver.facts.state_shape
    assert state.dtype == driver.state_dtype
    torch.testing.assert_close(driver.decode(state), wanted, rtol=0, atol=pair.family.decoded)
    assert float((driver.decode(state) - driver.decode(state.flip(0))).abs().max()) > 1e-3


def test_global_random_states_stay_where_they_are(pair: Pair) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].tolist(), random.getstate()
    driver = pair.driver
    cond = driver.encode(PROMPTS, guidance=3.0)
    loop = driver.rollout(cond, generators(3), STEPS, 3.0)
    driver.velocity(loop.states[1], loop.levels[1], cond, 3.0)
    driver.decode(loop.states[-1])
    shape = (1, 3, 32, 32) if pair.family.frames is None else (1, pair.family.frames[1], 3, 32, 32)
    driver.encode_media(torch.zeros(shape))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state(legacy=False)["state"]["key"].tolist(), random.getstate())


def test_another_size_than_the_proved_one_is_as_stock(pair: Pair) -> None:
    size = pair.size._replace(height=64, width=32)
    cond = pair.driver.encode(PROMPTS[:2])
    loop = pair.driver.rollout(cond, generators(2), 2, size=size)
    assert loop.media is not None
    assert loop.media.shape[-2:] == (64, 32)
    with torch.no_grad():
        velocity = pair.driver.velocity(loop.states[1], loop.levels[1], cond, size=size)
    step = (loop.levels[2].sigma - loop.levels[1].sigma) * velocity
    if "FlowMatchEuler" in type(pair.stock.scheduler).__name__:
        torch.testing.assert_close(loop.states[1] + step, loop.states[2], rtol=1e-5, atol=1e-6)
    again = pair.driver.decode(loop.states[-1], size)
    assert torch.equal(again, loop.media)


def test_folder_samples_in_plain_diffusers(pair: Pair, tmp_path: Path) -> None:
    """What `tiny-model` writes is the same for a seed, and loading it twice gave the same weights."""
    assert type(pair.stock) is type(pair.driver.pipeline)
    for name, module in pair.driver.denoisers.items():
        for key, weight in getattr(pair.stock, name).state_dict().items():
            assert torch.equal(weight, module.state_dict()[key]), key
            assert torch.isfinite(weight).all(), key


@pytest.mark.zoo
@pytest.mark.parametrize("family", ORDINARY + ZOO, ids=lambda one: one.name)
def test_half_precision_repeats_the_loop_bit_for_bit(family: Family, tmp_path: Path) -> None:
    """In bfloat16. Some loops round their state at the first step; Mochi's converts it to float32 for each step."""
    path = build(family.name, tmp_path / family.name, "unit", seed=0)
    driver = Driver(load_pipeline(str(path), dtype=torch.bfloat16), call=family.call)
    prove(driver)
    cond = driver.encode(PROMPTS, guidance=3.0)
    loop = driver.rollout(cond, generators(3), STEPS, 3.0, decode=False, keep_velocities=True)
    assert loop.velocities is not None
    assert {state.dtype for state in loop.states[1:]} == {driver.state_dtype}
    for state, level, velocity in zip(loop.states, loop.levels, loop.velocities, strict=False):
        with torch.no_grad():
            assert torch.equal(driver.velocity(state, level, cond, 3.0), velocity)


@pytest.mark.zoo
@pytest.mark.parametrize("family", [one for one in ZOO if one.name == "ltx"], ids=lambda one: one.name)
def test_latents_that_are_rounded_for_a_decoder_in_float32_are_still_found(family: Family, tmp_path: Path) -> None:
    """LTX rounds them to the dtype of the text features; the decoder gets them in its own."""
    pipeline = load_pipeline(str(build(family.name, tmp_path / family.name, "unit", seed=0)), dtype=torch.bfloat16)
    pipeline.vae.float()
    driver = Driver(pipeline, call=family.call)
    prove(driver)
    state = driver.pack(torch.randn(1, *driver.noise_shape(driver.size), generator=generators(1)[0]), driver.size)
    given = driver.before_decoder(state, driver.size)
    assert given.dtype == torch.float32
    assert torch.equal(given, given.bfloat16().float())
    assert not torch.equal(state, state.bfloat16().float())
