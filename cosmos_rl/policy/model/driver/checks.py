"""The checks of the gate. The first line of each docstring is the check's name, the rest what to do when it fails.

Each returns what it measured, in words, writes what it found into the facts, and raises `Failed` when it does not hold.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.policy.model.driver import media
from cosmos_rl.policy.model.driver.calls import FEW_STEPS
from cosmos_rl.policy.model.driver.conditioning import make_black
from cosmos_rl.policy.model.driver.conditions import DrivenCond
from cosmos_rl.policy.model.driver.contract import Level, Rollout
from cosmos_rl.policy.model.driver.gradients import can_get_gradients, compute_gradients, sample_weights
from cosmos_rl.policy.model.driver.inputs import Inputs, ScalarLevel
from cosmos_rl.policy.model.driver.positions import holds_state
from cosmos_rl.policy.model.driver.probing import Failed, Probing
from cosmos_rl.policy.model.driver.seams import Run
from cosmos_rl.policy.model.driver.stock import stock_run

GUIDANCE_ON = 2.0


def check_scheduler(probing: Probing) -> str:
    """The scheduler is a flow-matching one

    The driver needs a velocity; models that predict noise or samples have none.
    """
    scheduler = probing.driver.scheduler
    name, prediction = type(scheduler).__name__, scheduler.config.get("prediction_type")
    if "FlowMatch" not in name and prediction != "flow_prediction":
        raise Failed(f"{name}, prediction_type {prediction}")
    return name


def find_leaf(probing: Probing) -> str:
    """A state can be put into the loop

    The state must be one of the tensors that prepare_latents returns, and reach the first step unchanged.
    """
    driver, facts = probing.driver, probing.facts
    n = len(probing.prompts)

    def note(run: Run, index: int, _v: Tensor, t: Any, x: Tensor, stock: Callable[[], Any]) -> Any:
        if index == 0:
            seen.append(x.clone())
            return stock()
        facts.inverted = float(run.scheduler.sigmas[-1]) == 1.0
        facts.integer_time = not torch.as_tensor(t).is_floating_point()
        facts.state_dtype = _name(x.dtype)
        run.stop()

    seen: list[Tensor] = []
    guidance = None if driver.guidance_name is None else 1.0
    run = Run(driver.device, on_step=note)
    with torch.no_grad():
        driver.go(run, n, guidance, driver.size, prompts=probing.prompts)
    first = seen[0]
    same = [
        k for k, v in enumerate(run.prepared) if isinstance(v, Tensor) and v.shape == first.shape and v.equal(first)
    ]
    facts.partial = not same and driver.row.media is not None
    if facts.partial:
        same = [k for k, v in enumerate(run.prepared) if isinstance(v, Tensor) and holds_state(driver, driver.size, k)]
    if not same:
        shapes = [tuple(value.shape) for value in run.prepared if isinstance(value, Tensor)]
        raise Failed(f"the first step gets {tuple(first.shape)}, prepare_latents gives {shapes}")
    facts.leaf, facts.first_dtype = same[0], _name(first.dtype)
    kept = run.prepared[facts.leaf].dtype
    if not facts.partial and kept != first.dtype:  # the loop converts its state for the step alone
        facts.first_dtype = facts.state_dtype = _name(kept)
    facts.state_shape, facts.denoisers = list(first.shape[1:]), list(driver.denoisers)
    wanted = driver.to_loop_dtype(probing.noise_like(first))
    run = Run(driver.device, on_step=lambda run, _index, _v, _t, x, _stock: run.stop(x), state=wanted, leaf=facts.leaf)
    run.positions = driver.positions(driver.size)
    with torch.no_grad():
        got = driver.go(run, n, guidance, driver.size, prompts=probing.prompts)
    if not torch.equal(got.to(wanted.dtype), wanted):
        raise Failed("the first step gets another state than the one that was put in")
    return f"{tuple(first.shape)} {facts.state_dtype}"


def find_guidance(probing: Probing) -> str:
    """Guidance can be switched off

    A row in the table names the argument that is real classifier-free guidance, see docs/models.md.
    """
    driver, facts = probing.driver, probing.facts
    facts.guidance_name = driver.guidance_name
    work: dict[float | None, tuple[int, list[Inputs]]] = {}
    if driver.guidance_name is None:
        work[None] = _work(probing, None)
        facts.guidance_style = "no argument"
    else:
        for value in (1.0, 0.0):
            with contextlib.suppress(ValueError):
                work[value] = _work(probing, value)
        if not work:
            raise Failed(f"{driver.guidance_name} = 1 and = 0 are both refused by the pipeline")
    facts.guidance_off = min(work, key=lambda value: work[value][0])  # the first one of equals
    probing.guidance["off"] = facts.guidance_off
    if driver.guidance_name is not None:
        facts.guidance_style = _style(work[facts.guidance_off], _work(probing, GUIDANCE_ON))
        if facts.guidance_style != "without effect":
            probing.guidance["on"] = GUIDANCE_ON
    for mode, value in probing.guidance.items():
        probing.conds[mode] = driver.encode(probing.prompts, guidance=value)
        if driver.row.needs_media:
            black = [make_black(driver, driver.row.clean_frames[0], driver.size)] * len(probing.prompts)
            cond = driver.condition(probing.conds[mode], black, generators=probing.generators())
            probing.conds[mode] = replace(cond, values=probing.conds[mode].values)  # of all prompts at once, as stock
    return f"{facts.guidance_style}, off at {facts.guidance_off}"


def check_loop(probing: Probing) -> str:
    """The driven loop is the stock loop, bit for bit

    The pipeline's loop does something outside the seams; it needs a model class of its own.
    """
    driver = probing.driver
    for mode, guidance in probing.guidance.items():
        loop = driver.rollout(probing.conds[mode], probing.generators(), FEW_STEPS, guidance, keep_velocities=True)
        assert loop.velocities is not None
        assert loop.media is not None
        stock = stock_run(driver, probing.prompts, guidance, probing.generators())
        assert stock.velocities is not None
        if not all(torch.isfinite(v).all() for v in stock.velocities):
            raise Failed(f"guidance {mode}: the stock call gives numbers that are not finite")
        pairs = [
            *zip(stock.states, loop.states[:-1], strict=True),
            *zip(map(driver.convert_sign, stock.velocities), loop.velocities, strict=True),
            (stock.media, loop.media),
        ]
        if not all(torch.equal(a, b) for a, b in pairs):
            raise Failed(f"guidance {mode}: largest difference {max(largest_difference(a, b) for a, b in pairs):.1e}")
        probing.loops[mode] = loop
    return f"guidance {' and '.join(probing.guidance)}, {FEW_STEPS} steps, {len(probing.prompts)} prompts"


def check_velocity(probing: Probing) -> str:
    """velocity() repeats the loop's, bit for bit

    The state is not all that the pipeline carries from step to step: a second state, or a cache or guider with a
    memory. Switch caches off; what has a second state needs a model class of its own.
    """
    for mode, loop in probing.loops.items():
        _repeats(probing, mode, loop)
    return f"at {FEW_STEPS} recorded levels"


def check_transition(probing: Probing) -> str:
    """A transition of ours stays in the loop, and its probability ratio is exactly 1

    The pipeline changes states between its steps: it needs a model class of its own.
    """
    driver = probing.driver
    for mode, guidance in probing.guidance.items():
        made: list[Tensor] = []

        def transition(
            index: int, velocity: Tensor, level: Level, next_sigma: Tensor, state: Tensor, made: list[Tensor] = made
        ) -> Tensor:
            step = (next_sigma.float() - level.sigma) * velocity.float()
            made.append((state.float() + step + 0.1 * probing.noise_like(state, index).float()).to(state.dtype))
            return made[-1].clone()

        loop = driver.rollout(
            probing.conds[mode],
            probing.generators(),
            FEW_STEPS,
            guidance,
            transition,
            decode=False,
            keep_velocities=True,
        )
        if not all(torch.equal(a, b) for a, b in zip(made, loop.states[1:], strict=True)):
            raise Failed(f"guidance {mode}: a step does not get the state that the one before gave")
        _repeats(probing, mode, loop)
    return "velocities at its states are repeated bit for bit"


def check_path(probing: Probing) -> str:
    """The path is x = (1 - s) x0 + s e, or x0 + s e

    The losses know these two only.
    """
    driver, facts = probing.driver, probing.facts
    levels = driver.levels(FEW_STEPS)
    facts.timesteps, facts.sigmas = [float(level.t) for level in levels[:-1]], [float(level.sigma) for level in levels]
    facts.noise_shape = list(driver.noise_shape(driver.size))
    facts.scale = 1.0
    ends = [driver.pack(torch.full((1, *facts.noise_shape), value), driver.size).float() for value in (0.0, 1.0)]
    facts.scale = float((ends[1] - ends[0]).mean())  # a start state may have a little of a medium in it
    if abs(facts.scale - 1.0) < 2e-3 and facts.sigmas[0] <= 1.0 + 1e-6:
        facts.path = "flow"
    elif abs(facts.scale / facts.sigmas[0] - 1.0) < 1e-2:
        facts.path = "edm"
    else:
        raise Failed(f"the first state is {facts.scale:g} times the noise, the first sigma is {facts.sigmas[0]:g}")
    if facts.sigmas[-1] > (0.0 if facts.path == "flow" else 0.01):  # the other path ends at a smallest sigma
        raise Failed(f"the last sigma is {facts.sigmas[-1]:g}, not 0")
    return facts.path


def check_sign(probing: Probing) -> str:
    """What the pipeline hands to its scheduler is the change of the state per sigma

    The sign or the scale of the model's output differs: it needs a model class of its own.
    """
    loop = probing.loops["off"]
    assert loop.velocities is not None
    first, second = loop.states[0].double(), loop.states[1].double()
    step = (loop.levels[1].sigma - loop.levels[0].sigma).double() * loop.velocities[0].double()
    error = float((first + step - second).norm() / step.norm())
    if error > (1e-2 if probing.exact else 0.3):  # a small step of a rounded state
        raise Failed(
            f"the first stock step differs from state + change of sigma * velocity by {error:.1e} of its length"
        )
    return f"first stock step, relative error {error:.1e}"


def check_training_levels(probing: Probing) -> str:
    """A sigma gives the timestep that the scheduler has for it

    Training would ask the model at other times than sampling does.
    """
    driver, facts = probing.driver, probing.facts
    levels = driver.levels(FEW_STEPS)[:-1]

    def farthest() -> float:
        return max(abs(float(driver.training_level(level.sigma).t) - float(level.t)) for level in levels)

    error = farthest()
    if error > 1e-3:
        facts.time_rule = "grid"
        error = farthest()
        if error > 1e-3 * driver.scheduler.config.num_train_timesteps:
            raise Failed(f"t is {error:.3g} away at one of {FEW_STEPS} levels")
    return f"{facts.time_rule}, farthest {error:.1e}"


def check_order(probing: Probing) -> str:
    """Conditions can be re-ordered

    Rows of a batch influence each other, or the prompts have no axis of their own.
    """
    worst = 0.0
    backwards = torch.arange(len(probing.prompts)).flip(0)
    for mode, guidance in probing.guidance.items():
        loop, cond = probing.loops[mode], probing.conds[mode]
        x, level = loop.states[1], loop.levels[1]
        with torch.no_grad():
            plain = probing.driver.velocity(x, level, cond, guidance)
            turned = probing.driver.velocity(x[backwards], level, cond.rows(backwards), guidance)
        worst = max(worst, relative_difference(plain[backwards], turned))
    require_close(probing, worst)
    return f"relative difference {worst:.1e}"


def check_rows(probing: Probing) -> str:
    """Rows of different levels

    Rows of one batch get another velocity than alone.
    """
    driver, facts = probing.driver, probing.facts
    worst = 0.0
    for mode, guidance in probing.guidance.items():
        loop, cond = probing.loops[mode], probing.conds[mode]
        x, n = loop.states[1], len(probing.prompts)
        each = [loop.levels[row % FEW_STEPS] for row in range(n)]
        level = Level(torch.stack([one.t for one in each]), torch.stack([one.sigma for one in each]))
        with torch.no_grad():
            alone = [driver.velocity(x[[row]], each[row], cond.rows(torch.tensor([row])), guidance) for row in range(n)]
            facts.time_inputs[mode] = _time_inputs(probing, x, each, cond, guidance)
            error = relative_difference(torch.cat(alone), driver.velocity(x, level, cond, guidance))
            if facts.time_inputs[mode] and not _close(probing, error):  # their inputs are laid out in another way
                facts.time_inputs[mode] = []
                error = relative_difference(torch.cat(alone), driver.velocity(x, level, cond, guidance))
        worst = max(worst, error)
    require_close(probing, worst)
    return f"relative difference {worst:.1e}"


def check_gradients(probing: Probing) -> str:
    """Gradients arrive

    The pipeline's call cuts the graph.
    """
    driver, loop, cond = probing.driver, probing.loops["off"], probing.conds["off"]
    groups = {name: sample_weights(part) for name, part in driver.denoisers.items() if can_get_gradients(part)}
    weights = [weight for group in groups.values() for weight in group]
    wanted = [weight.requires_grad for weight in weights]
    reached: set[int] = set()
    try:
        for weight in weights:
            weight.requires_grad_(True)
        for x, level in zip(loop.states, loop.levels[:-1], strict=False):  # every expert has levels of its own
            with torch.enable_grad():
                v = driver.velocity(x, level, cond, probing.guidance["off"])
                if v.requires_grad:
                    gradients = compute_gradients(v.float().square().mean(), weights)
                    reached |= {k for k, gradient in enumerate(gradients) if gradient is not None and gradient.any()}
            for module in driver.denoisers.values():
                module.zero_grad(set_to_none=True)
    finally:
        for weight, before in zip(weights, wanted, strict=True):
            weight.requires_grad_(before)
    ids = {id(weights[k]) for k in reached}
    for name, group in groups.items():
        if not any(id(weight) in ids for weight in group):
            raise Failed(f"none of {len(group)} weights of {name} has one at any of {FEW_STEPS} levels")
    return f"{len(reached)} of {len(weights)} weights that were asked"


def find_tail(probing: Probing) -> str:
    """decode() is the end of the stock call, bit for bit

    The pipeline cannot be brought to decode a given state.
    """
    driver, loop, facts = probing.driver, probing.loops["off"], probing.facts
    assert loop.media is not None
    with contextlib.suppress(Exception):  # some look back at the last step, which then is not there
        if torch.equal(driver.decode(loop.states[-1], cond=probing.conds["off"]), loop.media):
            return f"media {tuple(loop.media.shape)} by {facts.tail}"
    facts.tail = "one step"  # or put given frames into the state after each step
    made = driver.decode(loop.states[-1], cond=probing.conds["off"])
    if not torch.equal(made, loop.media):
        raise Failed(f"largest difference {largest_difference(made, loop.media):.1e}")
    return f"media {tuple(made.shape)} by {facts.tail}"


def check_map(probing: Probing) -> str:
    """States are a rearrangement of what the decoder gets, with a factor and an offset per element

    Clean states cannot be made of media without code for the family.
    """
    found = probing.driver.decode_map(probing.driver.size)
    low, high = float(found.factor.min()), float(found.factor.max())
    probing.facts.latent_shape = list(found.latent_shape)
    probing.facts.affine = (
        f"factor {low:.3g}..{high:.3g}, offset {float(found.offset.min()):.3g}..{float(found.offset.max()):.3g}"
    )
    return probing.facts.affine


def check_round_trip(probing: Probing) -> str:
    """Encoded media come back at the decoder

    What the VAE encodes is not what the pipeline decodes.
    """
    driver, size = probing.driver, probing.driver.size
    shape = (1, size.frames, 3, size.height, size.width) if driver.frames_name else (1, 3, size.height, size.width)
    images = 2 * torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 1
    with torch.no_grad():
        latents = media.encode_latents(driver, images)
        back = driver.before_decoder(driver.encode_media(images), size)
        live = (driver.decode_map(size).factor != 0).reshape(latents.shape)  # the others a medium gives
        error = relative_difference(latents[live], back[live])
    if error > (1e-5 if probing.exact else 0.1):
        raise Failed(f"relative error {error:.1e}")
    return f"relative error {error:.1e}"


CHECKS: list[Callable[[Probing], str]] = [
    check_scheduler,
    find_leaf,
    find_guidance,
    check_loop,
    check_velocity,
    check_transition,
    check_path,
    check_sign,
    check_training_levels,
    check_order,
    check_rows,
    check_gradients,
    find_tail,
    check_map,
    check_round_trip,
]


# ---- helpers --------------------------------------------------------------------------------------------------------


def _work(probing: Probing, guidance: float | None) -> tuple[int, list[Inputs]]:
    """How many elements that follow the state go through the denoiser, and its inputs."""
    driver = probing.driver
    cond = driver.encode(probing.prompts, guidance=guidance)
    x = probing.noise()
    level = (500, 0.5)
    calls = driver.all_inputs(x, level, cond, guidance, driver.size)
    moved = driver.all_inputs(x + 1, level, cond, guidance, driver.size)
    total = 0
    for a, b in zip(calls, moved, strict=True):
        total += sum(a.leaves[key].numel() for key in _find_differences(a, b))
    return total, calls


def _style(off: tuple[int, list[Inputs]], on: tuple[int, list[Inputs]]) -> str:
    """How guidance is computed, by what it adds to the work."""
    if on[0] > off[0]:
        if len(on[1]) > len(off[1]):
            return f"{len(on[1])} calls"
        return "one batch"
    embedded = {key for a, b in zip(off[1], on[1], strict=True) for key in _find_differences(a, b)}
    if not embedded:
        return "without effect"
    return f"embedded in {', '.join(sorted(embedded))}"


def _find_differences(a: Inputs, b: Inputs) -> list[str]:
    def differ(x: Any, y: Any) -> bool:
        return isinstance(x, Tensor) and (not isinstance(y, Tensor) or x.shape != y.shape or not torch.equal(x, y))

    return [key for key, value in a.leaves.items() if differ(value, b.leaves.get(key))]


def _time_inputs(probing: Probing, x: Tensor, each: list[Level], cond: DrivenCond, guidance: float | None) -> list[str]:
    """Inputs that follow the level and not the state; none where one follows both or has no axis for rows."""
    driver, row = probing.driver, torch.tensor([0])
    first, other = each[0], next(level for level in each if not torch.equal(level.sigma, each[0].sigma))

    def inputs(state: Tensor, level: Level) -> Inputs:
        scalar: ScalarLevel = (level.t.item(), level.sigma.item())
        return driver.first_inputs(state[row], scalar, cond.rows(row), guidance, driver.size)

    here = inputs(x, first)
    with_level, with_state = _find_differences(here, inputs(x, other)), _find_differences(here, inputs(x + 1, first))
    if set(with_level) & set(with_state) or any(here.leaves[key].ndim == 0 for key in with_level):
        return []
    return sorted(with_level)


def _repeats(probing: Probing, mode: str, loop: Rollout) -> None:
    """Every recorded velocity is repeated bit for bit."""
    assert loop.velocities is not None
    for x, level, recorded in zip(loop.states, loop.levels, loop.velocities, strict=False):
        with torch.no_grad():
            again = probing.driver.velocity(x, level, probing.conds[mode], probing.guidance[mode])
        if not torch.equal(again, recorded):
            at = f"guidance {mode}, sigma {float(level.sigma):.3g}"
            raise Failed(f"{at}: largest difference {largest_difference(again, recorded):.1e}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def largest_difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).abs().max())


def relative_difference(wanted: Tensor, found: Tensor) -> float:
    return largest_difference(wanted, found) / max(float(wanted.abs().max()), 1e-30)


def _close(probing: Probing, error: float) -> bool:
    return error <= (1e-4 if probing.exact else 5e-2)


def require_close(probing: Probing, error: float) -> None:
    if not _close(probing, error):
        raise Failed(f"relative difference {error:.1e}")
