"""Reinforcement learning on videos, from random weights to clips that move as asked: `python moving_shapes.py`.

Draws clips of moving shapes into a folder of videos, fine-tunes a tiny Wan pipeline on them, and lets DiffusionNFT
teach the result to follow the direction in the prompt without guidance. `report.html` of the last run plays clips from
before and after.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from cosmos_rl.policy.model.tiny.shapes import ALL_SHAPES, draw_clip
from cosmos_rl.tracking.clips import encode_clip

HERE = Path(__file__).parent
PER_SHAPE, HELD_OUT_PER_SHAPE = 16, 1
FPS = 16
DEADLINE_S = 3600


def main() -> int:
    """Run everything for one seed and write `summary.json`; the exit code."""
    parser = argparse.ArgumentParser(description="Teach a tiny Wan pipeline directions.")
    parser.add_argument("--out", type=Path, default=Path("outputs/moving_shapes"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", type=Path, help="a fine-tuned pipeline of an earlier run: skip its training")
    given = parser.parse_args()
    out: Path = given.out.absolute()
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    write_data(out)
    base = given.base or fine_tune(out, given.seed)
    reinforce(out, base.absolute(), given.seed)
    return 0


def write_data(out: Path) -> None:
    """Clips with captions in the layout of Cosmos-Predict, for training and for the guard, and all captions."""
    random = np.random.default_rng(0)
    for name, count in (("data", PER_SHAPE), ("held_out", HELD_OUT_PER_SHAPE)):
        (out / name / "videos").mkdir(parents=True)
        (out / name / "metas").mkdir()
        for shape in ALL_SHAPES:
            for number in range(count):
                stem = f"{shape.caption.replace(' ', '_')}_{number:02}"
                (out / name / "videos" / f"{stem}.mp4").write_bytes(encode_clip(draw_clip(shape, random), FPS))
                (out / name / "metas" / f"{stem}.txt").write_text(f"{shape.caption}\n", encoding="utf-8")
    (out / "prompts.txt").write_text("".join(f"{shape.caption}\n" for shape in ALL_SHAPES), encoding="utf-8")


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


def reinforce(out: Path, base: Path, seed: int) -> None:
    """Train on rewards; compare the rewards before and after, also in standard deviations of the first step's."""
    command(
        *("--config", str(HERE / "nft.toml")),
        f"--policy.model_name_or_path={base}",
        f"--train.output_dir={out / 'nft'}",
        f"--train.seed={seed}",
        f"--train.train_policy.dataset.local_dir={out / 'prompts.txt'}",
        f"--train.train_policy.reward_hacking_guard.local_dir={out / 'held_out'}",
        f"--validation.dataset.local_dir={out / 'prompts.txt'}",
        "cosmos_rl.tools.dataset.diffusion_nft",
    )
    (run,) = (path.parent for path in (out / "nft").glob("*/metrics.jsonl"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [row["val/reward/mean"] for row in rows if "val/reward/mean" in row]
    spread = next(row["reward/std"] for row in rows if "reward/std" in row)
    gain = (scores[-1] - scores[0]) / spread
    summary = {"seed": seed, "reward_before": scores[0], "reward_after": scores[-1], "std": spread, "gain": gain}
    (out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    print(json.dumps(summary), f"clips before and after: {run / 'report.html'}", sep="\n", flush=True)


def command(*arguments: str) -> None:
    """The `cosmos-rl` command as a user types it."""
    print("$ cosmos-rl", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "cosmos_rl.launcher.cli", *arguments], timeout=DEADLINE_S, check=True)


if __name__ == "__main__":
    sys.exit(main())
