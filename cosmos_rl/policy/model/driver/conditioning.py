"""Media as conditions: an image or the first frames of a video, by whatever a pipeline itself makes of them.

Everything between the stock call's arguments and its loop is run once for each row and kept; which elements of the
states count is measured and not known.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.driver.calls import stop, stop_with_velocity
from cosmos_rl.policy.model.driver.conditions import DrivenCond, MediaCond, concat_all
from cosmos_rl.policy.model.driver.contract import Medium, Size
from cosmos_rl.policy.model.driver.inputs import Inputs, collect_leaves, scalar_levels
from cosmos_rl.policy.model.driver.seams import Run

if TYPE_CHECKING:
    from cosmos_rl.policy.model.driver.driver import Driver

_GUIDED = 2.0
"""Any value that switches guidance on."""


def condition(
    driver: "Driver",
    cond: DrivenCond,
    media: Sequence[Medium | None],
    size: Size,
    generators: Sequence[torch.Generator] | None = None,
) -> DrivenCond:
    """See `Driver.condition`."""
    rows = []
    for row, medium in enumerate(media):
        _check_medium(driver, medium, size)
        alone = cond.rows(torch.tensor([row]))
        generator = torch.Generator().manual_seed(0) if generators is None else generators[row]
        rows.append(_condition_row(driver, alone, medium, size, generator))
    if driver.row.text_sees_media:
        cond = _join_texts(driver, rows)
    return join_media(driver, cond, [row.media for row in rows if row.media is not None], size)


def join_media(driver: "Driver", cond: DrivenCond, media: Sequence[MediaCond], size: Size) -> DrivenCond:
    """See `Driver.join_media`."""
    made = functools.reduce(MediaCond.concat, media)
    masks = [driver.element_mask(kind, size) for kind in made.kinds]
    mask = None
    if any(one is not None for one in masks):
        full = next(torch.ones_like(one) for one in masks if one is not None)
        mask = torch.cat([full if one is None else one for one in masks])
    return replace(cond, media=made, element_mask=mask)


def _check_medium(driver: "Driver", medium: Medium | None, size: Size) -> None:
    least, most = driver.row.clean_frames
    kind = 0 if medium is None else medium.clean
    if driver.row.media is None or not least <= kind <= most:
        raise UserError(
            f"{driver.facts.pipeline} takes from {least} to {most} latent frames as conditions, found {kind}"
        )
    if medium is not None and tuple(medium.frames.shape[1:]) != (size.height, size.width, 3):
        raise UserError(
            f"a medium of {tuple(medium.frames.shape[1:3])} pixels conditions samples of {size.height} x {size.width}"
        )


def _join_texts(driver: "Driver", rows: Sequence[DrivenCond]) -> DrivenCond:
    joined = concat_all([replace(row, media=None) for row in rows])
    if joined is None:
        raise UserError(f"{driver.facts.pipeline} makes other lengths of these prompts and media: not supported")
    return joined


def _condition_row(
    driver: "Driver", alone: DrivenCond, medium: Medium | None, size: Size, generator: torch.Generator
) -> DrivenCond:
    """One row with what the stock call makes of its medium before its loop."""
    run, guidance = Run(driver.device, text=alone.values, on_denoiser=stop), driver.guidance_off
    texts: dict[str, Any] = {}
    if driver.row.text_sees_media:
        run.text = None
        prompt, away = alone.texts[0]
        texts = {"prompts": [prompt], "negatives": None if away is None else [away]}
        if alone.guided:
            guidance = _GUIDED
    driver.go(run, 1, guidance, size, medium=medium, generator=generator, **texts)
    if driver.row.text_sees_media:
        alone = replace(alone, values=run.recorded)
    values = list(run.prepared)
    if not driver.facts.partial:
        values[driver.facts.leaf] = None
    shared = tuple(not isinstance(value, Tensor) or value.ndim == 0 or len(value) != 1 for value in values)
    kind = 0 if medium is None else medium.clean
    found = MediaCond(tuple(values), shared, run.recorded_media, {}, (kind,))
    alone = replace(alone, media=found)
    if run.recorded_media:
        alone = replace(alone, media=replace(found, inputs=_find_inputs(driver, alone, size)))
    return alone


def _find_inputs(driver: "Driver", cond: DrivenCond, size: Size) -> dict[str, dict[str, Tensor]]:
    """The inputs of the denoiser that follow the encoded media, of one row ``[1, calls, ...]``, by the guidance.

    They have no axis for rows where the pipeline gets them, since it repeats them itself.
    """
    assert cond.media is not None
    other = tree.tree_map_only(Tensor, lambda value: value + 1, dict(cond.media.encoded))
    state = driver.pack(torch.zeros(1, *driver.noise_shape(size)), size)
    (level,) = scalar_levels(driver.training_level(torch.tensor(0.5), size), 1)
    found = {}
    modes = {"off": driver.guidance_off}
    if cond.guided:
        modes["on"] = _GUIDED
    for mode, guidance in modes.items():
        here = driver.first_inputs(state, level, cond, guidance, size).leaves
        there = driver.first_inputs(
            state, level, replace(cond, media=replace(cond.media, encoded=other)), guidance, size
        ).leaves
        moved = [key for key, value in here.items() if isinstance(value, Tensor) and not torch.equal(value, there[key])]
        found[mode] = {key: here[key].clone().unsqueeze(0) for key in moved}
    return found


def rows_of_inputs(cond: DrivenCond, mode: str) -> dict[str, Tensor]:
    """The denoiser's inputs that follow the media of a batch's rows; none where the pipeline has an axis for them."""
    if cond.media is None or not cond.media.inputs:
        return {}
    table: Mapping[str, Tensor] = cond.media.inputs[mode]
    # both sides of guidance in one call: all rows of one side come before those of the other
    return {key: value.transpose(0, 1).flatten(0, 1) for key, value in table.items()}


def make_black(driver: "Driver", kind: int, size: Size) -> Medium:
    """Black frames, as many as make ``kind`` latent ones."""
    return Medium(torch.zeros(driver.count_given(kind), size.height, size.width, 3, dtype=torch.uint8), kind)


# ---- which elements count -----------------------------------------------------------------------------------------


def measure_mask(driver: "Driver", kind: int, size: Size) -> Tensor | None:
    """Elements of a state that the denoiser's output moves, that it sees, and that stay as a step leaves them.

    Bool ``[1, ...]``; None: all of them. Takes one call of the denoiser.

    Raises:
        UserError: the network sees given frames in the state, and the pipeline puts them back after each step.
    """
    if driver.row.media is None:
        return None
    medium = None
    if kind:
        medium = make_black(driver, kind, size)
    cond = driver.blank_cond(1)
    generator = torch.Generator().manual_seed(0)
    cond = _condition_row(driver, cond, medium, size, generator)
    state = driver.pack(torch.randn(1, *driver.noise_shape(size), generator=generator), size)
    sees = _sees(driver, state, cond, size)
    counts = sees & _follows_output(driver, state, cond, size)
    kept = _is_kept(driver, state, cond, size)
    if bool((sees & ~kept).any()):
        raise UserError(
            f"{driver.facts.pipeline} puts given frames back into its state after each step: such states are not "
            "supported"
        )
    if bool((counts & kept).all()):
        return None
    return counts & kept


def _draw_like(value: Tensor, seed: int) -> Tensor:
    return torch.rand(value.shape, generator=torch.Generator().manual_seed(seed)).to(value) + 0.5


def _follows_output(driver: "Driver", state: Tensor, cond: DrivenCond, size: Size) -> Tensor:
    """Which elements of the velocity move with the denoiser's output."""
    first: list[Any] = []

    def keep(_run: Run, real: Any) -> Any:
        first.append(real())
        return first[-1]

    def change(_run: Run, _real: Any) -> Any:
        return tree.tree_map_only(Tensor, lambda value: value + _draw_like(value, 1), first.pop(0))

    (level,) = scalar_levels(driver.training_level(torch.tensor(0.5), size), 1)
    found = []
    with torch.no_grad():
        for on_output in (keep, change):
            run = driver.run_at(state, level, cond, driver.guidance_off, size, on_step=stop_with_velocity)
            run.on_output = on_output
            found.append(driver.step(run, 1, driver.guidance_off, size))
    return (found[0] - found[1]).abs() > 1e-6


def _sees(driver: "Driver", state: Tensor, cond: DrivenCond, size: Size) -> Tensor:
    """Which elements of the state reach the denoiser."""
    (level,) = scalar_levels(driver.training_level(torch.tensor(0.5), size), 1)
    state = state.detach().clone().requires_grad_()
    run = driver.run_at(state, level, cond, driver.guidance_off, size)
    run.on_denoiser = lambda run, name, args, kwargs: run.stop(Inputs(name, collect_leaves((args, kwargs))))
    with torch.enable_grad():
        inputs = driver.step(run, 1, driver.guidance_off, size)
        weighed = [
            (value.double() * _draw_like(value, 2)).sum()
            for value in inputs.leaves.values()
            if isinstance(value, Tensor) and value.requires_grad
        ]
        (gradient,) = torch.autograd.grad(torch.stack(weighed).sum(), state)
    return gradient != 0


def _is_kept(driver: "Driver", state: Tensor, cond: DrivenCond, size: Size) -> Tensor:
    """Which elements of a step's result the next step gets."""
    given = _draw_like(state, 3)

    def on_step(run: Run, index: int, _v: Tensor, _t: Any, x: Tensor, _stock: Any) -> Any:
        if index == 1:
            run.stop(x.clone())
        return given.clone()

    levels = [driver.training_level(torch.tensor(sigma), size) for sigma in (0.6, 0.5)]
    (first,) = scalar_levels(levels[0], 1)
    outputs: list[Any] = []

    def on_output(_run: Run, real: Any) -> Any:
        if not outputs:
            outputs.append(real())
        return tree.tree_map_only(Tensor, torch.clone, outputs[0])

    run = driver.run_at(state, first, cond, driver.guidance_off, size, on_step=on_step)
    run.on_output = on_output
    assert run.grid is not None
    dtype = run.grid[0].dtype
    timesteps = torch.stack([level.t for level in levels]).to(dtype)
    run.grid = timesteps, driver.to_scheduler_sigma(torch.tensor([0.6, 0.5, 0.0]))
    with torch.no_grad():
        seen = driver.step(run, 1, driver.guidance_off, size)
    return seen == given
