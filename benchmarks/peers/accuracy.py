"""What the loops make of equal numbers of network evaluations: digits without guidance, judged by a classifier that no
training saw."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.changes import TEXT_TOKENS
from benchmarks.peers.loops import Bench, Loop

PER_DIGIT = 50
LEVELS = (0.2, 0.4, 0.6, 0.8)
Maker = Callable[[Bench], Loop]


@dataclass(frozen=True)
class Look:
    """A pipeline's images and what is said of them."""

    judge_2: float
    judge_1: float
    reward: float
    spread: float
    """Within the images of a digit."""
    loss: float
    """Flow matching, on real digits that no training saw."""


@dataclass(frozen=True)
class Stage:
    """A run at some point, with what it has spent until then."""

    look: Look
    epochs: int
    evaluations: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """A run."""

    half: Stage
    """After half of the evaluations."""
    end: Stage
    training_reward: float
    """Of the last three epochs."""


class Judges:
    """Fitted once."""

    def __init__(self, data: Path, reward: Callable[..., np.ndarray]) -> None:
        from judge import Judge, SecondJudge

        self._first, self._second, self._reward, self._data = Judge(), SecondJudge(), reward, data

    def look(self, pipe: Any) -> Look:
        """Guidance-free images by the sampler of deployment, from the same noise for all."""
        import quickstart
        from digits import prompt_of
        from judge import features, spread

        labels = [digit for digit in range(10) for _ in range(PER_DIGIT)]
        images, asked = quickstart.sample(pipe, labels, 0, guidance=1.0), np.array(labels)
        pixels = np.stack([np.asarray(image.convert("RGB")) for image in images])
        return Look(
            self._second.accuracy(images, asked),
            float(np.mean(self._first.labels(images) == asked)),
            float(np.mean(self._reward(pixels, [prompt_of(label) for label in labels]))),
            spread(features(images), asked),
            held_out_loss(pipe, self._data / "validation"),
        )


@torch.no_grad()
def held_out_loss(pipe: Any, folder: Path) -> float:
    """Mean squared error of the velocities at fixed levels with fixed noise."""
    import json

    from PIL import Image

    files = sorted(folder.glob("*.png"))
    prompts = [json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))["prompt"] for file in files]
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB"), dtype=np.float32) for file in files])
    images = torch.from_numpy(pixels / 127.5 - 1).permute(0, 3, 1, 2)
    vae = pipe.vae.config
    clean: Tensor = (pipe.vae.encode(images).latent_dist.mean - vae.shift_factor) * vae.scaling_factor
    text, _, pooled, _ = pipe.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS
    )
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    losses = []
    for sigma in LEVELS:
        levels = torch.full((len(files),), 1000 * sigma)
        velocity = pipe.transformer(
            hidden_states=(1 - sigma) * clean + sigma * noise,
            timestep=levels,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        losses.append(float(((velocity - (noise - clean)) ** 2).mean()))
    return statistics.mean(losses)


def race(makers: Mapping[str, Maker], bench: Bench, budget: int, judges: Judges) -> dict[str, Outcome]:
    """Let all loops spend about ``budget`` evaluations, in turn so that a busy machine is busy for all alike."""
    rewards: dict[str, list[float]] = {name: [] for name in makers}
    loops: dict[str, Loop] = {}
    for name, maker in makers.items():
        loops[name] = maker(_with_record(bench, rewards[name]))
    seconds, epochs = dict.fromkeys(makers, 0.0), dict.fromkeys(makers, 0)

    def missing(name: str, wanted: float) -> float:
        done = loops[name].counter.evaluations
        return wanted - done - done / max(epochs[name], 1) / 2

    def advance(wanted: float) -> dict[str, Stage]:
        while waiting := [name for name in loops if missing(name, wanted) > 0]:
            name = max(waiting, key=lambda one: missing(one, wanted))
            spent = loops[name].epoch()
            seconds[name] += spent.rollout + spent.update
            epochs[name] += 1
        return {
            name: Stage(_look(loop, judges), epochs[name], loop.counter.evaluations, seconds[name])
            for name, loop in loops.items()
        }

    halves, ends = advance(budget / 2), advance(budget)
    found = {}
    for name, loop in loops.items():
        latest = statistics.mean(rewards[name][-3 * len(rewards[name]) // epochs[name] :])
        found[name] = Outcome(halves[name], ends[name], latest)
        loop.close()
    return found


def _look(loop: Loop, judges: Judges) -> Look:
    done = loop.counter.forwards, loop.counter.backwards
    with loop.result() as pipe:
        look = judges.look(pipe)
    loop.counter.forwards, loop.counter.backwards = done  # those of the judges' images are nobody's
    return look


def _with_record(bench: Bench, record: list[float]) -> Bench:
    def reward(images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        scores = bench.reward(images, prompts)
        record.append(float(np.mean(scores)))
        return scores

    return Bench(bench.base, bench.data, reward, bench.seed)


HEADER = (
    "| run | judge 2 | at half the evaluations | judge 1 | reward | reward in training | spread | held-out loss ratio "
    "| epochs | evaluations | CPU s | points of judge 2 per 10k evaluations, in the first half "
    "| per 100 CPU s, in the first half |"
)


def table_row(name: str, outcomes: Sequence[Outcome], start: Look) -> str:
    """Means over seeds, with the range of judge 2."""

    def mean(values: Sequence[float], digits: int = 3) -> str:
        return f"{statistics.mean(values):.{digits}f}"

    ends, halves = [one.end for one in outcomes], [one.half for one in outcomes]
    looks = [end.look for end in ends]
    right = [look.judge_2 for look in looks]

    def gained(cost: Callable[[Stage], float], unit: float) -> str:
        """Points a unit of the cost, of the whole run and of its first half."""
        rates = []
        for stages in (ends, halves):
            points = 100 * (statistics.mean(stage.look.judge_2 for stage in stages) - start.judge_2)
            rates.append(unit * points / statistics.mean(cost(stage) for stage in stages))
        return f"{rates[0]:.1f}, {rates[1]:.1f}"

    cells = [
        name,
        f"{mean(right)} ({min(right):.3f} ... {max(right):.3f})",
        mean([half.look.judge_2 for half in halves]),
        mean([look.judge_1 for look in looks]),
        mean([look.reward for look in looks]),
        mean([one.training_reward for one in outcomes]),
        mean([look.spread for look in looks]),
        mean([look.loss / start.loss for look in looks], 2),
        mean([end.epochs for end in ends], 0),
        mean([end.evaluations for end in ends], 0),
        mean([end.seconds for end in ends], 1),
        gained(lambda stage: stage.evaluations, 1e4),
        gained(lambda stage: stage.seconds, 100),
    ]
    return f"| {' | '.join(cells)} |"


def start_row(start: Look) -> str:
    """The pipeline that all start from."""
    return (
        f"| the start | {start.judge_2:.3f} | | {start.judge_1:.3f} | {start.reward:.3f} | | {start.spread:.3f} "
        "| 1 | | | | | |"
    )


def compare(found: Sequence[Mapping[str, Outcome]], ours: str, theirs: str) -> str:
    """How far apart two runs are, seed by seed, with the standard error of the mean."""

    def points(stage: Callable[[Outcome], Stage]) -> str:
        apart = [100 * (stage(one[ours]).look.judge_2 - stage(one[theirs]).look.judge_2) for one in found]
        if len(apart) < 2:
            return f"{apart[0]:+.1f}"
        return f"{statistics.mean(apart):+.1f} +- {statistics.stdev(apart) / len(apart) ** 0.5:.1f}"

    end, half = points(lambda one: one.end), points(lambda one: one.half)
    return f"{ours} less {theirs}: judge 2 {end} points, at half the evaluations {half}"
