"""An epoch of DiffusionNFT: ours and its authors', in turn, from the same settings."""

import statistics
from pathlib import Path

from benchmarks.peers.loops import Bench, Counter, Loop, Nft, Ours, Spent
from benchmarks.peers.recipe import STEP_RECIPES, Recipe

HEADER = (
    "| settings | forwards, backwards a sample: ours | theirs | rollout | update | all "
    "| CPU s of an epoch: ours, theirs |"
)


def measure(checkout: Path, bench: Bench, pairs: int) -> list[str]:
    """Lines of the table; ratios of CPU times are medians over the pairs, with the least and the largest."""
    rows = [HEADER, "|---" * 7 + "|"]
    return rows + [_compare(name, recipe, checkout, bench, pairs) for name, recipe in STEP_RECIPES.items()]


def _compare(name: str, recipe: Recipe, checkout: Path, bench: Bench, pairs: int) -> str:
    loops: tuple[Loop, Loop] = (Ours(bench, recipe), Nft(checkout, bench, recipe))
    for loop in loops:  # the first epoch is warm-up, and its old policy is still the trained one
        loop.epoch()
    if len({loop.counter.text_tokens for loop in loops}) != 1:
        raise RuntimeError(f"texts of {[loop.counter.text_tokens for loop in loops]} tokens")
    before = [(loop.counter.forwards, loop.counter.backwards) for loop in loops]
    spent: tuple[list[Spent], list[Spent]] = ([], [])
    for number in range(pairs):
        for which in (0, 1) if number % 2 else (1, 0):  # neither is always the first
            spent[which].append(loops[which].epoch())
    work = [_work(loop.counter, *start, pairs * recipe.samples) for loop, start in zip(loops, before, strict=True)]
    for loop in loops:
        loop.close()
    ratios = (
        _ratio([(a.rollout, b.rollout) for a, b in zip(*spent, strict=True)]),
        _ratio([(a.update, b.update) for a, b in zip(*spent, strict=True)]),
        _ratio([(a.rollout + a.update, b.rollout + b.update) for a, b in zip(*spent, strict=True)]),
    )
    seconds = [statistics.median(one.rollout + one.update for one in side) for side in spent]
    return f"| {name} | {work[0]} | {work[1]} | {' | '.join(ratios)} | {seconds[0]:.1f}, {seconds[1]:.1f} |"


def _work(counter: Counter, forwards: int, backwards: int, samples: int) -> str:
    return f"{(counter.forwards - forwards) / samples:.1f}, {(counter.backwards - backwards) / samples:.1f}"


def _ratio(pairs: list[tuple[float, float]]) -> str:
    found = [ours / theirs for ours, theirs in pairs]
    return f"{statistics.median(found):.2f} ({min(found):.2f} ... {max(found):.2f})"
