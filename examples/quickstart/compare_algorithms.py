"""All online algorithms on handwritten digits: do they teach a model to do without guidance? (`python
examples/quickstart/compare_algorithms.py --out FOLDER`)

The quickstart's fine-tuned pipeline, its prompts and its reward, at equal budgets of network evaluations. Judged by a
classifier that no training saw, on samples without guidance by the deployment's sampler (stock diffusers).
"""

import argparse
import functools
import json
import resource
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import quickstart
from digits import WORDS, enlarge, load_part, write_all
from judge import SecondJudge, features, spread
from PIL import Image
from sklearn.neural_network import MLPClassifier

from cosmos_rl.reward import batch_reward

JOB = "--train.train_policy."
SAMPLE = "--policy.diffusers.sample."
PER_STEP = 80
BUDGET = 80 * 25 * 30
"""Network evaluations, a backward pass counted as two: those of the quickstart's 25 steps."""
_SDE = (f"{SAMPLE}solver=flow", f"{SAMPLE}noise_level=0.7", f"{SAMPLE}deterministic_sampling=false")
_STEPS = (
    *_SDE,
    f"{JOB}kl_beta=0.0",
    f"{JOB}batch_size_per_optimize=80",
    "--policy.diffusers.weight_copy_decay_type=0",
    "--policy.diffusers.timesteps_fraction=0.9",
)
_WINDOW = (f'{JOB}steps={{choose = "window", size = 3, within = 0.5, elsewhere = "euler"}}',)

ALGORITHMS: Mapping[str, tuple[int, Sequence[str]]] = {
    # evaluations of a sample slot in a step: rollout, then forward and backward (3) per level, old policy, reference
    "NFT": (10 + 4 * 5, ()),
    "EPG": (10 + 4 * 5, (f"{JOB}trainer_type=epg", f"{JOB}advantage_temperature=0.5")),
    "PEPG": (10 + 4 * 5, (f"{JOB}trainer_type=pepg", f"{JOB}advantage_temperature=0.5")),
    "AWM": (10 + 4 * 5, (f"{JOB}trainer_type=awm",)),
    "FlowGRPO": (10 + 9 * 3, (*_STEPS, f"{JOB}trainer_type=flow_grpo")),
    "Fast (window of 3)": (10 + 3 * 3, (*_STEPS, *_WINDOW, f"{JOB}trainer_type=flow_grpo")),
    "DDRL (window of 3), data 0.02": (
        10 + 3 * 3 + 1,
        (
            *_STEPS,
            *_WINDOW,
            f"{JOB}trainer_type=ddrl",
            f"{JOB}advantage_transform=centred_exp_reward",
            f"{JOB}data_term.beta=0.02",
            f"{JOB}data_term.batch_size=40",
            "--train.optm_lr=4e-4",
            f"{SAMPLE}noise_level=1.0",
        ),
    ),
}


@functools.cache
def _classifier() -> MLPClassifier:
    digits, labels = load_part("judge_fit")
    cells = features([enlarge(digit) for digit in digits])
    return MLPClassifier((64,), max_iter=600, alpha=1e-3, random_state=0).fit(cells, labels)


@batch_reward
def digit_probability(media: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
    """The quickstart's reward: how sure a classifier is of the digit that the prompt asks for."""
    asked = [next(WORDS.index(word) for word in prompt.split() if word in WORDS) for prompt in prompts]
    found = _classifier().predict_proba(features([Image.fromarray(image) for image in media]))
    return np.asarray(found)[np.arange(len(asked)), asked]


def fine_tune(out: Path, seed: int) -> Path:
    """The pipeline that all start from, made as the quickstart does; kept in ``out``."""
    if (out / "sft" / "safetensors").exists():
        return quickstart.newest_export(out / "sft")
    write_all(out / "data")
    quickstart.command("tiny-model", "sd3", "--preset", "digits", "--out", str(out / "tiny_sd3"), "--seed", str(seed))
    return quickstart.fine_tune(out, seed)


def reinforce(out: Path, base: Path, name: str, seed: int) -> tuple[Path, dict[str, Any], float]:
    """The export of a run, its last metrics, and its CPU seconds."""
    each, options = ALGORITHMS[name]
    folder, steps = out / f"{name.split()[0].lower()}_{seed}", max(BUDGET // (PER_STEP * each), 1)
    before = _cpu_seconds()
    quickstart.command(
        *("--config", str(quickstart.HERE / "nft.toml")),
        f"--policy.model_name_or_path={base}",
        f"--train.output_dir={folder}",
        f"--train.seed={seed}",
        f"--train.max_num_steps={steps}",
        f"--train.epoch={steps}",
        f"--train.ckpt.save_freq={steps}",
        "--validation.enable=false",
        f"{JOB}dataset.local_dir={out / 'data' / 'prompts.txt'}",
        f"{JOB}reward_hacking_guard.local_dir={out / 'data' / 'validation'}",
        f"{JOB}reward_hacking_guard.action=warn",
        f"{JOB}data_term.local_dir={out / 'data' / 'train'}",
        f"{JOB}use_remote_reward=false",
        f'{JOB}local_reward.reward_fns=[{{function = "examples/quickstart/compare_algorithms.py:digit_probability"}}]',
        *options,
        quickstart.PROMPTS,
    )
    spent = _cpu_seconds() - before
    (metrics,) = folder.glob("2*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return quickstart.newest_export(folder), {key: value for line in lines for key, value in line.items()}, spent


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def over(values: Sequence[float]) -> str:
    """Mean over the seeds, and the range."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} ... {max(values):.3f})"


def main() -> None:
    """Print a table row for each algorithm as it ends."""
    parser = argparse.ArgumentParser(description="All online algorithms on handwritten digits.")
    parser.add_argument("--out", type=Path, default=Path("outputs/digits"))
    parser.add_argument("--only", default="", help="algorithms whose name holds this")
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    out: Path = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    base, judge = fine_tune(out, 0), SecondJudge()
    labels = [digit for digit in range(10) for _ in range(50)]
    asked = np.array(labels)
    before = quickstart.sample(quickstart.sampler(base), labels, 0, guidance=1.0)
    rows = [
        "| algorithm | accuracy without guidance | reward of the last step | held-out loss ratio | diversity ratio "
        "| evaluations | CPU s |",
        "|---" * 7 + "|",
        f"| the start | {judge.accuracy(before, asked):.3f} | | | | | |",
    ]
    for name in ALGORITHMS:
        if given.only.lower() not in name.lower():
            continue
        found = []
        for seed in range(given.seeds):
            export, last, spent = reinforce(out, base, name, seed)
            images = quickstart.sample(quickstart.sampler(export), labels, 0, guidance=1.0)
            diversity = spread(features(images), asked) / spread(features(before), asked)
            found.append(
                (
                    judge.accuracy(images, asked),
                    last["reward/mean"],
                    last["guard/loss_ratio"],
                    diversity,
                    last["train/nfe"],
                    spent,
                )
            )
        columns = list(zip(*found, strict=True))
        cells = [over(column) for column in columns[:4]] + [f"{statistics.mean(column):,.0f}" for column in columns[4:]]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        (out / "table.md").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
