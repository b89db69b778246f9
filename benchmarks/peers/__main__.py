"""Fetch, change, run and print: see benchmarks/README.md."""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers import changes, given
from benchmarks.peers.patch import copy_with_changes
from cosmos_rl.errors import UserError

if TYPE_CHECKING:
    from benchmarks.peers.accuracy import Judges
    from benchmarks.peers.loops import Bench

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 12_800
PARTS = ("draws", "step", "accuracy")
SAME_EPOCHS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Our loop next to its peers'.")
    parser.add_argument("--nft", type=Path, required=True, help="a checkout of NVlabs/DiffusionNFT")
    parser.add_argument("--grpo", type=Path, required=True, help="a checkout of yifan123/flow_grpo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the accuracy runs")
    parser.add_argument("--digits", type=Path, default=Path("outputs/digits"), help="where the start is kept, or made")
    parser.add_argument("--pairs", type=int, default=3, help="epochs of each side in the comparison of steps")
    parser.add_argument("--budget", type=int, default=BUDGET, help="network evaluations, a backward pass as two")
    parser.add_argument("--only", choices=PARTS, help="one of the three tables")
    asked = parser.parse_args(argv)
    try:
        for peer, flag, checkout in ((given.NFT, "--nft", asked.nft), (given.GRPO, "--grpo", asked.grpo)):
            print(peer.check(flag, checkout), flush=True)
        for checkout, wanted in ((asked.nft, changes.NFT), (asked.grpo, changes.GRPO)):
            with tempfile.TemporaryDirectory() as name:  # what does not fit is said at once
                copy_with_changes(checkout, Path(name), changes.FOLDERS, wanted)
        given.check_digits(asked.digits)
        _compare(asked)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _compare(asked: argparse.Namespace) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    logging.getLogger("cosmos").setLevel(logging.ERROR)
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    nft, grpo, digits = asked.nft.absolute(), asked.grpo.absolute(), asked.digits.absolute()
    os.chdir(ROOT)
    import torch
    from compare_algorithms import digit_probability, fine_tune

    from benchmarks.peers import accuracy, recipe, same_draws, step
    from benchmarks.peers.loops import Bench

    torch.set_num_threads(1)
    digits.mkdir(parents=True, exist_ok=True)
    base, data = fine_tune(digits, 0), digits / "data"
    bench, judges = Bench(base, data, digit_probability, 0), accuracy.Judges(data, digit_probability)
    if asked.only in (None, "draws"):
        lines = same_draws.measure(nft, bench, recipe.NFT["beta 0.3"], SAME_EPOCHS, judges)
        print(*lines, sep="\n", flush=True)
    if asked.only in (None, "step"):
        print(*step.measure(nft, bench, asked.pairs), sep="\n", flush=True)
    if asked.only in (None, "accuracy"):
        _race(nft, grpo, bench, asked, judges)


def _race(nft: Path, grpo: Path, bench: "Bench", asked: argparse.Namespace, judges: "Judges") -> None:
    import quickstart

    from benchmarks.peers import accuracy, recipe
    from benchmarks.peers.loops import Grpo, Nft, Ours

    start = judges.look(quickstart.sampler(bench.base))
    makers = {
        **{f"ours, {name}": partial(Ours, recipe=one) for name, one in recipe.OURS.items()},
        **{f"DiffusionNFT, {name}": partial(Nft, nft, recipe=one) for name, one in recipe.NFT.items()},
        **{f"flow_grpo, {name}": partial(Grpo, grpo, recipe=one) for name, one in recipe.GRPO.items()},
    }
    found: list[dict[str, accuracy.Outcome]] = []
    for seed in asked.seeds:
        found.append(accuracy.race(makers, replace(bench, seed=seed), asked.budget, judges))
        right = ", ".join(f"{name} {one.end.look.judge_2:.3f}" for name, one in found[-1].items())
        print(f"seed {seed}, judge 2: {right}", flush=True)
    print(accuracy.HEADER, "|---" * 13 + "|", accuracy.start_row(start), sep="\n")
    for name in makers:
        print(accuracy.table_row(name, [outcomes[name] for outcomes in found], start), flush=True)
    best = f"ours, {recipe.BEST}"
    pairs = [(f"ours, {name}", f"DiffusionNFT, {name}") for name in recipe.NFT]
    pairs += [(best, name) for name in makers if not name.startswith("ours")]
    print(*(accuracy.compare(found, *pair) for pair in pairs), sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
