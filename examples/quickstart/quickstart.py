"""From random weights to judged images: `make quickstart`.

Writes real handwritten digits as a captioned image folder, fine-tunes a tiny SD3 pipeline on them with the normal
command (stopping it once and resuming it), teaches the result a style with a LoRA adapter and, by reinforcement
learning with scores from the reward service, to do without guidance; samples with plain diffusers from the exports, and
has the images judged by classifiers fitted on real digits that no training ever saw.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from digits import WORDS, enlarge, load_part, prompt_of, write_all
from judge import Judge, Scores, SecondJudge, features, spread
from PIL import Image

HERE = Path(__file__).parent
COSMOS_RL = [sys.executable, "-m", "cosmos_rl.launcher.cli"]
REWARD_SERVICE = [sys.executable, "-m", "cosmos_rl_reward.cli"]
DATASET = "cosmos_rl.tools.dataset.diffusers_dataset"
PROMPTS = "cosmos_rl.tools.dataset.diffusion_nft"
PER_DIGIT = 50
BATCH = 50
COLUMNS = 3  # images of each digit in a row of the grid
STOP_AT_STEP = 300
DEADLINE_S = 1800


def main() -> int:
    """Run everything for one seed and write `summary.json` and `grid.png`; returns 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description="Fine-tune a tiny SD3 pipeline on handwritten digits and judge it.")
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    out: Path = given.out.absolute()
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)

    heading("1/6  real handwritten digits as a folder of captioned images")
    for name, count in write_all(out / "data").items():
        print(f"{out / 'data' / name}: {count} images")
    heading("2/6  a tiny SD3 pipeline with random weights")
    command("tiny-model", "sd3", "--preset", "digits", "--out", str(out / "tiny_sd3"), "--seed", str(given.seed))
    heading("3/6  fine-tune all weights; the run is stopped once and resumed")
    tuned = fine_tune(out, given.seed)
    heading("4/6  teach the result a style with a LoRA adapter")
    adapter = style(out, tuned, given.seed)
    heading("5/6  reinforcement learning: a classifier's score teaches the result to do without guidance")
    reinforced = reinforce(out, tuned, given.seed)
    heading("6/6  sample with plain diffusers and judge")
    return judge(out, tuned, adapter, reinforced, given.seed)


def heading(text: str) -> None:
    """A line that stands out in the log."""
    print(f"\n=== {text}", flush=True)


def command(*arguments: str, expect: int = 0, environment: Mapping[str, str] | None = None) -> None:
    """The `cosmos-rl` command as a user types it, with more in its environment."""
    print("$ cosmos-rl", *arguments, flush=True)
    everything = {**os.environ, **(environment or {})}
    code = subprocess.run([*COSMOS_RL, *arguments], timeout=DEADLINE_S, env=everything).returncode
    if code != expect:
        raise SystemExit(f"cosmos-rl ended with exit code {code}, expected {expect}")


def fine_tune(out: Path, seed: int) -> Path:
    """Train all weights; SIGTERM after some steps, then the same command with resume. Returns the exported pipeline."""
    arguments = [
        *("--config", str(HERE / "sft.toml")),
        f"--policy.model_name_or_path={out / 'tiny_sd3'}",
        f"--train.output_dir={out / 'sft'}",
        f"--train.seed={seed}",
        f"--train.train_policy.dataset.local_dir={out / 'data' / 'train'}",
        f"--validation.dataset.local_dir={out / 'data' / 'validation'}",
        DATASET,
    ]
    print("$ cosmos-rl", *arguments, flush=True)
    process = subprocess.Popen([*COSMOS_RL, *arguments])
    try:
        wait_for_step(out / "sft", STOP_AT_STEP, process)
        process.send_signal(signal.SIGTERM)
        code = process.wait(DEADLINE_S)
    finally:
        process.kill()
    if code != 75:
        raise SystemExit(f"the stopped run ended with exit code {code}, expected 75 (saved and stopped)")
    command(*arguments[:-1], "--train.resume=true", DATASET)
    return newest_export(out / "sft")


def wait_for_step(output: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Return when `metrics.jsonl` of the run holds `step` lines."""
    end = time.monotonic() + DEADLINE_S
    while sum(len(path.read_text(encoding="utf-8").splitlines()) for path in output.glob("2*/metrics.jsonl")) < step:
        if process.poll() is not None:
            raise SystemExit(f"the run ended early with exit code {process.returncode}")
        if time.monotonic() > end:
            raise SystemExit(f"step {step} was not reached in {DEADLINE_S} s")
        time.sleep(0.2)


def newest_export(output: Path) -> Path:
    """`<output>/safetensors/step_<N>` with the largest N, by the documented path."""
    return max((output / "safetensors").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


def style(out: Path, base: Path, seed: int) -> Path:
    """Train an adapter on red digits; returns its folder."""
    command(
        *("--config", str(HERE / "lora.toml")),
        f"--policy.model_name_or_path={base}",
        f"--train.output_dir={out / 'lora'}",
        f"--train.seed={seed}",
        f"--train.train_policy.dataset.local_dir={out / 'data' / 'red'}",
        DATASET,
    )
    return newest_export(out / "lora") / "lora"


def reinforce(out: Path, base: Path, seed: int) -> Path:
    """DiffusionNFT on the fine-tuned pipeline, scored by the reward service; returns the exported pipeline."""
    with reward_service(out) as address:
        command(
            *("--config", str(HERE / "nft.toml")),
            f"--policy.model_name_or_path={base}",
            f"--train.output_dir={out / 'nft'}",
            f"--train.seed={seed}",
            f"--train.train_policy.dataset.local_dir={out / 'data' / 'prompts.txt'}",
            f"--train.train_policy.reward_hacking_guard.local_dir={out / 'data' / 'validation'}",
            f"--validation.dataset.local_dir={out / 'data' / 'prompts.txt'}",
            PROMPTS,
            environment={
                "REMOTE_REWARD_ENQUEUE_URL": f"{address}/api/reward/enqueue",
                "REMOTE_REWARD_FETCH_URL": f"{address}/api/reward/pull",
            },
        )
    return newest_export(out / "nft")


@contextlib.contextmanager
def reward_service(out: Path) -> Iterator[str]:
    """The service with our reward, on a free port, for the length of the block; yields its address."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    arguments = [
        "--config",
        str(HERE / "rewards.toml"),
        "--port",
        str(port),
        "--state-dir",
        str(out / "reward_service"),
    ]
    print("$ cosmos-rl-reward", *arguments, flush=True)
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    process = subprocess.Popen([*REWARD_SERVICE, *arguments], env=environment)
    try:
        wait_until_ready(f"http://localhost:{port}", process)
        yield f"http://localhost:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(60)
        finally:
            process.kill()
    if code != 0:
        raise SystemExit(f"the reward service ended with exit code {code}, expected 0")


def wait_until_ready(address: str, process: subprocess.Popen[bytes]) -> None:
    """Return when the service's rewards are ready."""
    end = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/readyz", timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit(f"the reward service at {address} did not become ready")


def sampler(base: Path, adapter: Path | None = None) -> Any:
    """A stock diffusers pipeline, loaded the documented way."""
    from diffusers import DiffusionPipeline

    from cosmos_rl.policy.model.quiet import quiet_libraries

    with quiet_libraries():
        pipe: Any = DiffusionPipeline.from_pretrained(base)
    pipe.set_progress_bar_config(disable=True)
    if adapter is not None:
        pipe.load_lora_weights(str(adapter), weight_name="model.safetensors", adapter_name="default")
        pipe.set_adapters("default")
    return pipe


def sample(pipe: Any, labels: list[int], seed: int, guidance: float | None = None) -> list[Image.Image]:
    """One image for each label, with the settings of sft.toml; `guidance` replaces the one there, 1 is none."""
    import torch

    table = tomllib.loads((HERE / "sft.toml").read_text(encoding="utf-8"))["policy"]["diffusers"]
    images: list[Image.Image] = []
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, len(labels), BATCH):
        images += pipe(
            [prompt_of(label) for label in labels[first : first + BATCH]],
            num_inference_steps=table["sample"]["num_steps"],
            guidance_scale=table["sample"]["guidance_scale"] if guidance is None else guidance,
            max_sequence_length=table["max_prompt_length"],
            generator=generator,
        ).images
    return images


def judge(out: Path, tuned: Path, adapter: Path, reinforced: Path, seed: int) -> int:
    """Sample, judge, draw the grid, write the summary; the exit code."""
    import numpy as np

    labels = [digit for digit in range(10) for _ in range(PER_DIGIT)]
    few = [digit for digit in range(10) for _ in range(COLUMNS)]
    untrained = sample(sampler(out / "tiny_sd3"), few, seed)
    images = sample(sampler(tuned), labels, seed)
    red = sample(sampler(tuned, adapter), few, seed)
    before = sample(sampler(tuned), labels, seed, guidance=1.0)
    after = sample(sampler(reinforced), labels, seed, guidance=1.0)
    scores = Judge().judge(images, np.array(labels))
    free = compare(out, before, after, np.array(labels))

    real_digits, real_labels = load_part("judge_fit")
    real = [enlarge(digit).convert("RGB") for n in range(10) for digit in real_digits[real_labels == n][:COLUMNS]]
    rows = [("real", real), ("random weights", untrained), ("fine-tuned", few_of(images)), ("+ LoRA", red)]
    rows += [("no guidance", few_of(before)), ("after RL", few_of(after))]
    draw_grid(rows, out / "grid.png")
    write_summary(out, scores, free, seed)
    tuning = scores.accuracy >= 0.85 and min(scores.per_digit.values()) >= 0.6 and scores.spread_ratio >= 0.7
    wanted = max(free["judge2_accuracy_real"] - 0.04, free["cfg_free_before"])
    learning = free["cfg_free_after"] >= wanted and free["loss_ratio"] <= 2.0 and free["diversity_ratio"] >= 0.6
    print(f"\n{met(tuning)}: fine-tuning: >= 85 % in all, >= 60 % for each digit, spread >= 0.7")
    print(f"{met(learning)}: RL: within 4 points of real digits without guidance, loss ratio <= 2, diversity >= 0.6")
    print(f"images: {out / 'grid.png'}\npipeline: {reinforced}\nadapter:  {adapter}\nsummary:  {out / 'summary.json'}")
    print(f"RL run:   {out / 'nft' / reinforced.resolve().parents[1].name / 'report.html'}")
    return 0 if tuning and learning else 1


def met(goal: bool) -> str:
    """How a goal is reported."""
    return "goal reached" if goal else "GOAL MISSED"


def few_of(images: list[Image.Image]) -> list[Image.Image]:
    """The first images of each digit."""
    return [images[digit * PER_DIGIT + k] for digit in range(10) for k in range(COLUMNS)]


def compare(out: Path, before: list[Image.Image], after: list[Image.Image], asked: Any) -> dict[str, float]:
    """What reinforcement learning changed, by a judge that nothing was tuned for, and what it cost."""
    second = SecondJudge()
    lines = [
        json.loads(line) for path in (out / "nft").glob("2*/metrics.jsonl") for line in path.open(encoding="utf-8")
    ]
    last = {key: value for line in lines for key, value in line.items()}
    return {
        "cfg_free_before": second.accuracy(before, asked),
        "cfg_free_after": second.accuracy(after, asked),
        "judge2_accuracy_real": second.accuracy_real,
        "loss_ratio": last["guard/loss_ratio"],
        "diversity_ratio": spread(features(after), asked) / spread(features(before), asked),
        "network_evaluations": last["train/nfe"],
    }


def draw_grid(rows: list[tuple[str, list[Image.Image]]], path: Path) -> None:
    """One labelled row of images for each kind, enlarged without smoothing."""
    from PIL import ImageDraw, ImageFont

    side, gap, left = 34, 2, 108
    width = left + 10 * (COLUMNS * side + 6)
    grid = Image.new("RGB", (width, len(rows) * (side + 10)), "white")
    draw = ImageDraw.Draw(grid)
    font = ImageFont.load_default(size=13)
    for row, (name, images) in enumerate(rows):
        top = row * (side + 10) + 5
        draw.text((6, top + 9), name, fill="black", font=font)
        for k, image in enumerate(images):
            x = left + k * side + (k // COLUMNS) * 6
            grid.paste(image.resize((side - gap, side - gap), Image.Resampling.BICUBIC), (x, top))
    grid.save(path)


def write_summary(out: Path, scores: Scores, free: dict[str, float], seed: int) -> None:
    """Print the table and write `summary.json`."""
    print(f"\n{'digit':8} judged right")
    for word in WORDS:
        print(f"{word:8} {scores.per_digit[word]:12.1%}")
    print(f"{'all':8} {scores.accuracy:12.1%}   (the judge on real digits: {scores.judge_accuracy_real:.1%})")
    print(f"spread within a digit, against real digits: {scores.spread_ratio:.2f}")
    print(
        f"without guidance: {free['cfg_free_before']:.1%} before RL, {free['cfg_free_after']:.1%} after (the second "
        f"judge on real digits: {free['judge2_accuracy_real']:.1%}); held-out loss x "
        f"{free['loss_ratio']:.2f}, diversity x {free['diversity_ratio']:.2f}"
    )
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
    print(f"CPU-seconds: {cpu_seconds:.0f}")
    summary = {**asdict(scores), **free, "cpu_seconds": round(cpu_seconds, 1), "seed": seed}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
