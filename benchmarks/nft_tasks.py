"""What DiffusionNFT reaches on the two small tasks of `tests/`, over three seeds (`python -m benchmarks.nft_tasks`).

The plane: a mixture of Gaussians with a bounded reward and a known optimum. The images: a generator that miscounts.
NFE are network evaluations per sample slot over the whole run, a backward pass counted as two.
"""

import logging
import tempfile
import time
from pathlib import Path

import torch

from cosmos_rl.errors import UserError
from tests.support.toy_shapes import shapes_tables, shapes_trainer
from tests.support.toy_tasks import TABLE, measure_plane, metrics_of, plane_task, run_loop, toy_config

SEEDS = (0, 1, 2)
Row = tuple[str, str, str]


def plane(seed: int, kl_beta: float) -> str:
    """100 steps; measured by 40 steps of the ODE."""
    trainer, model = plane_task(seed, 100, {"train.train_policy.kl_beta": kl_beta})
    began = time.process_time()
    for step in range(trainer.total_steps):
        nfe = trainer.train_step(step).metrics["train/nfe"]
    spent = time.process_time() - began
    end = measure_plane(model)
    distances = f"MMD2 to tilt {end.to_tilt:.4f}, to base {end.to_base:.3f}"
    return f"E[r] {end.reward:.3f}, {distances}, NFE {nfe / 512:.0f}, {spent:.1f} CPU-s"


def images(seed: int, steps: int, tables: TABLE) -> str:
    """Up to ``steps`` steps through the loop, which the guard may end; counts are of 40 samples a prompt."""
    rarely = {"validation.freq": steps, "validation.n_generation": 40}
    config = toy_config({**shapes_tables(seed, steps, 0.4), **rarely, **tables})
    trainer = shapes_trainer(config)
    began, ended = time.process_time(), "ran to the end"
    with tempfile.TemporaryDirectory() as name:
        try:
            run_loop(config, trainer, Path(name))
        except UserError as error:
            ended = f"stopped by the guard ({'held-out' if 'held-out' in str(error) else 'diversity'})"
        rows = metrics_of(Path(name))
    spent, last = time.process_time() - began, rows[-1]
    if "val/reward/count_mean" not in last:  # stopped between two validations
        last |= trainer.validate(last["step"], lambda *_: None).metrics
    looks = [row for row in rows if "guard/loss_ratio" in row]
    loss, spread = looks[-1]["guard/loss_ratio"], [row["guard/diversity_ratio"] for row in looks]
    norm = max(value for key, value in looks[-1].items() if key.startswith("guard/velocity_norm_ratio/"))
    counts = f"counts right {rows[0]['val/reward/count_mean']:.3f} -> {last['val/reward/count_mean']:.3f}"
    counts += f", loss ratio {loss:.2f}, diversity {spread[-1]:.2f} (least {min(spread):.2f}), velocity norm {norm:.2f}"
    nfe = last["train/nfe"] / trainer.plan.total
    return f"{counts}, {ended} at step {last['step']}, NFE {nfe:.0f}, {spent:.0f} CPU-s with validation"


def measure() -> list[Row]:
    """Rows (what, result, target)."""
    no_kl = {"train.train_policy.kl_beta": 0.0, "train.optm_decay_type": "none"}
    only_warned = {**no_kl, "train.train_policy.reward_hacking_guard.action": "warn"}
    rows: list[Row] = []
    for seed in SEEDS:
        rows.append((f"plane, KL 0.3, seed {seed}", plane(seed, 0.3), "MMD2 to tilt <= 0.06, NFE <= 3000"))
    for seed in SEEDS:
        rows.append((f"plane, no KL, seed {seed}", plane(seed, 0.0), "none: what the KL is for"))
    for seed in SEEDS:
        rows.append((f"images, KL 0.4, seed {seed}", images(seed, 40, {}), ">= 0.80, loss ratio <= 2"))
    for seed in SEEDS:
        rows.append((f"images, no KL, seed {seed}", images(seed, 60, no_kl), "stopped, counts not worse"))
    for seed in SEEDS:
        what = f"images, no KL, the guard only warns, seed {seed}"
        rows.append((what, images(seed, 60, only_warned), "none: what the guard is for"))
    return rows


def main() -> None:
    """Measure and print."""
    logging.getLogger("cosmos").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for what, result, target in measure():
        print(f"{what:46}  {result}  target {target}")


if __name__ == "__main__":
    main()
