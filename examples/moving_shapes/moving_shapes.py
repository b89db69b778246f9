"""Reinforcement learning on videos, from random weights to clips that move to the right: `python moving_shapes.py`.

Draws clips of moving shapes into a folder of videos, fine-tunes a tiny Wan pipeline on them, and lets DiffusionNFT
teach the result to move shapes to the right. The captions name colour and form alone, and one clip in seven moves to
the right, so only the reward says what is wanted. `report.html` of the last run plays clips from before and after.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from cosmos_rl.policy.model.tiny.shapes import COLOURS, FORMS, Shape, draw_clip
from cosmos_rl.tracking.clips import encode_clip

HERE = Path(__file__).parent
CAPTIONS = {f"a {colour} {form}": (colour, form) for colour in COLOURS for form in FORMS}
PER_DIRECTION = {"left": 16, "up": 16, "down": 16, "right": 8}
"""Clips of each colour and form."""
_JOB, _SAMPLER = "--train.train_policy.", "--policy.diffusers.sample."
_STEPS = (
    f"{_SAMPLER}solver=flow",
    f"{_SAMPLER}noise_level=0.7",
    f"{_SAMPLER}deterministic_sampling=false",
    "--policy.diffusers.timesteps_fraction=0.9",
    "--policy.diffusers.weight_copy_decay_type=0",
    f"{_JOB}kl_beta=0.0",
)
ALGORITHMS = {
    "nft": (),
    "flow_grpo": (*_STEPS, f"{_JOB}trainer_type=flow_grpo", f"{_JOB}kl_beta=0.04"),
    "ddrl": (
        *_STEPS,
        f"{_JOB}trainer_type=ddrl",
        f"{_JOB}advantage_transform=centred_exp_reward",
        f"{_JOB}data_term.beta=0.02",
        f"{_JOB}data_term.batch_size=32",
    ),
}
"""What changes of `nft.toml`; all take about as many network evaluations."""
FPS = 16
DEADLINE_S = 3600


def main() -> int:
    """Run everything for one seed and write `summary.json`; the exit code."""
    parser = argparse.ArgumentParser(description="Teach a tiny Wan pipeline a direction.")
    parser.add_argument("--out", type=Path, default=Path("outputs/moving_shapes"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="nft")
    parser.add_argument("--base", type=Path, help="a fine-tuned pipeline of an earlier run: skip its training")
    given = parser.parse_args()
    out: Path = given.out.absolute()
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    write_data(out)
    base = given.base or fine_tune(out, given.seed)
    run, seconds = reinforce(out, base.absolute(), given.seed, given.algorithm)
    summary = {"algorithm": given.algorithm, "seed": given.seed, **compare(run), "cpu_seconds": round(seconds)}
    (out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    print(json.dumps(summary), f"clips before and after: {run / 'report.html'}", sep="\n", flush=True)
    return 0


def write_data(out: Path) -> None:
    """Clips with captions in the layout of Cosmos-Predict, for training and for the guard, and all captions."""
    random = np.random.default_rng(0)
    write_clips(out / "data", PER_DIRECTION, random)
    write_clips(out / "held_out", {"right": 4}, random)
    (out / "prompts.txt").write_text("".join(f"{caption}\n" for caption in CAPTIONS), encoding="utf-8")


def write_clips(folder: Path, counts: dict[str, int], random: np.random.Generator) -> None:
    """So many clips of each direction for each caption."""
    (folder / "videos").mkdir(parents=True)
    (folder / "metas").mkdir()
    for caption, (colour, form) in CAPTIONS.items():
        for direction, count in counts.items():
            for number in range(count):
                stem = f"{colour}_{form}_{direction}_{number:02}"
                clip = draw_clip(Shape(colour, form, direction), random)
                (folder / "videos" / f"{stem}.mp4").write_bytes(encode_clip(clip, FPS))
                (folder / "metas" / f"{stem}.txt").write_text(f"{caption}\n", encoding="utf-8")


def fine_tune(out: Path, seed: int) -> Path:
    """A tiny Wan, trained on the clips; the exported pipeline."""
    command("tiny-model", "wan", "--preset", "shapes", "--out", str(out / "tiny_wan"), "--seed", str(seed))
    command(
        *("--config", str(HERE / "sft.toml")),
        f"--policy.model_name_or_path={out / 'tiny_wan'}",
        f"--train.output_dir={out / 'sft'}",
        f"--train.seed={seed}",
        f"--train.train_policy.dataset.local_dir={out / 'data'}",
        "cosmos_rl.tools.dataset.diffusers_dataset",
    )
    return max((out / "sft").glob("*/safetensors/step_*"))


def reinforce(out: Path, base: Path, seed: int, algorithm: str) -> tuple[Path, float]:
    """Train on the reward; the run's folder, and the CPU seconds of the whole command."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    command(
        *("--config", str(HERE / "nft.toml")),
        f"--policy.model_name_or_path={base}",
        f"--train.output_dir={out / algorithm}",
        f"--train.seed={seed}",
        f"--train.train_policy.dataset.local_dir={out / 'prompts.txt'}",
        f"--train.train_policy.reward_hacking_guard.local_dir={out / 'held_out'}",
        f"--train.train_policy.data_term.local_dir={out / 'data'}",
        f"--validation.dataset.local_dir={out / 'prompts.txt'}",
        *ALGORITHMS[algorithm],
        "cosmos_rl.tools.dataset.diffusion_nft",
    )
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    (run,) = (path.parent for path in (out / algorithm).glob("*/metrics.jsonl"))
    return run, ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


def compare(run: Path) -> dict[str, float]:
    """The mean reward of the validation clips before and after, and the last held-out loss ratio.

    The gain is in units of `group_std`: the standard deviation of the rewards of one prompt's clips, averaged over the
    prompts of the first step.
    """
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    before, *_, after = [row["val/reward/mean"] for row in rows if "val/reward/mean" in row]
    std = next(row["reward/group_std"] for row in rows if "reward/group_std" in row)
    loss_ratio = next(row["guard/loss_ratio"] for row in reversed(rows) if "guard/loss_ratio" in row)
    return {
        "loss_ratio": loss_ratio,
        "reward_before": before,
        "reward_after": after,
        "group_std": std,
        "gain": (after - before) / std,
    }


def command(*arguments: str) -> None:
    """The `cosmos-rl` command as a user types it."""
    print("$ cosmos-rl", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "cosmos_rl.launcher.cli", *arguments], timeout=DEADLINE_S, check=True)


if __name__ == "__main__":
    sys.exit(main())
