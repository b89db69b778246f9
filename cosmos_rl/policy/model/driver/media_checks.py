"""Checks of the gate for pipelines that are conditioned on media: after `checks`, in the same form."""

from collections.abc import Callable

import torch
from torch import Tensor

from cosmos_rl.policy.model.driver.calls import FEW_STEPS
from cosmos_rl.policy.model.driver.checks import largest_difference, relative_difference, require_close
from cosmos_rl.policy.model.driver.conditions import DrivenCond
from cosmos_rl.policy.model.driver.contract import Level, Medium, Rollout, stack_levels
from cosmos_rl.policy.model.driver.probing import Failed, Probing
from cosmos_rl.policy.model.driver.stock import stock_run


def clean_kinds(probing: Probing) -> range:
    """Numbers of latent frames that media may give, without none at all."""
    least, most = probing.driver.row.clean_frames
    return range(max(least, 1), most + 1)


def make_medium(probing: Probing, kind: int, seed: int) -> Medium:
    """Frames of noise: as many as make ``kind`` latent ones."""
    size = probing.driver.size
    shape = probing.driver.count_given(kind), size.height, size.width, 3
    pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Medium(pixels, kind)


def check_media_loop(probing: Probing) -> str:
    """A sample with a medium is the stock call's, bit for bit

    The pipeline takes its medium in at another place than before its loop; it needs a model class of its own.
    """
    driver = probing.driver
    for kind in clean_kinds(probing):
        for row, prompt in enumerate(probing.prompts):
            medium = make_medium(probing, kind, seed=row)
            for mode, guidance in probing.guidance.items():
                cond = _condition(probing, mode, row, medium)
                stock = stock_run(driver, [prompt], guidance, [_generator(row)], medium)
                assert stock.velocities is not None
                start = stock.states[0]
                loop = driver.rollout(cond, [], FEW_STEPS, guidance, start=start, keep_velocities=True)
                assert loop.velocities is not None
                pairs = [
                    *zip(stock.states, loop.states[:-1], strict=True),
                    *zip(map(driver.convert_sign, stock.velocities), loop.velocities, strict=True),
                    (stock.media, loop.media),
                    (stock.media, driver.decode(loop.states[-1], cond=cond)),
                ]
                if not all(torch.equal(a, b) for a, b in pairs):
                    worst = max(largest_difference(a, b) for a, b in pairs)
                    raise Failed(f"{kind} given, guidance {mode}: largest difference {worst:.1e}")
                _repeats_on_free(probing, loop, cond, guidance)
    return f"{_name_kinds(probing)} given latent frames, each row with another medium"


def check_mask(probing: Probing) -> str:
    """Some elements of a state are generated

    The media leave nothing to learn.
    """
    said = []
    for kind in clean_kinds(probing):
        mask = probing.driver.element_mask(kind)
        share = 1.0 if mask is None else float(mask.float().mean())
        if share == 0.0:
            raise Failed(f"{kind} given latent frames: no element is left")
        said.append(f"{kind} given: {share:.0%}")
    return ", ".join(said)


def check_media_rows(probing: Probing) -> str:
    """Rows of different media, numbers of given frames and levels share a batch

    Rows of one batch get another velocity than alone.
    """
    driver, worst = probing.driver, 0.0
    least, _ = driver.row.clean_frames
    kinds = [*range(least, 1), *clean_kinds(probing)]
    media = [make_medium(probing, kind, seed=row) if kind else None for row, kind in enumerate([*kinds, *kinds])]
    texts = torch.arange(len(media)) % len(probing.prompts)
    for mode, guidance in probing.guidance.items():
        cond = driver.condition(probing.conds[mode].rows(texts), media)
        x = probing.noise_rows(len(media))
        levels = [probing.loops[mode].levels[row % FEW_STEPS] for row in range(len(media))]
        with torch.no_grad():
            together = driver.velocity(x, stack_levels(levels), cond, guidance)
            each = [torch.tensor([row]) for row in range(len(media))]
            alone = [driver.velocity(x[row], levels[int(row)], cond.rows(row), guidance) for row in each]
            free = _free(cond, x)
            worst = max(worst, relative_difference(torch.cat(alone)[free], together[free]))
            moved = driver.velocity(torch.where(free, x, x + 1), stack_levels(levels), cond, guidance)
        if not torch.equal(moved[free], together[free]):
            raise Failed(f"guidance {mode}: elements that do not count move those that do")
    require_close(probing, worst)
    return f"relative difference {worst:.1e}; elements that do not count move nothing"


MEDIA_CHECKS: list[Callable[[Probing], str]] = [check_mask, check_media_loop, check_media_rows]


def _generator(row: int) -> torch.Generator:
    return torch.Generator().manual_seed(row)


def _condition(probing: Probing, mode: str, row: int, medium: Medium) -> DrivenCond:
    text = probing.driver.encode([probing.prompts[row]], guidance=probing.guidance[mode])
    return probing.driver.condition(text, [medium], generators=[_generator(row)])


def _free(cond: DrivenCond, x: Tensor) -> Tensor:
    if cond.element_mask is None:
        return torch.ones_like(x, dtype=torch.bool)
    return cond.element_mask.expand_as(x)


def _repeats_on_free(probing: Probing, loop: Rollout, cond: DrivenCond, guidance: float | None) -> None:
    """velocity() repeats the loop's on the elements that count; on the others some pipelines remember their start."""
    assert loop.velocities is not None
    level: Level
    for x, level, recorded in zip(loop.states, loop.levels, loop.velocities, strict=False):
        with torch.no_grad():
            again = probing.driver.velocity(x, level, cond, guidance)
        free = _free(cond, x)
        if not torch.equal(again[free], recorded[free]):
            worst = largest_difference(again[free], recorded[free])
            raise Failed(f"sigma {float(level.sigma):.3g}: velocity() differs from the loop's by {worst:.1e}")


def _name_kinds(probing: Probing) -> str:
    return " and ".join(map(str, clean_kinds(probing)))
