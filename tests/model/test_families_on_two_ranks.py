"""Families without a class of their own on two ranks: the numbers of one."""

import json
from pathlib import Path

import pytest

from tests.support.family_runs import ORDINARY, ZOO, TrainedFamily, family_toml
from tests.support.nft_runs import Job, run_forked

pytestmark = pytest.mark.process
JOBS = [(one, lora) for one in (*ORDINARY, *ZOO) if one.ranks for lora in (True, False)]
PARAMS = [
    pytest.param(*job, id=f"{job[0].name}-{'lora' if job[1] else 'full'}", marks=pytest.mark.zoo) for job in JOBS[1:]
]


@pytest.mark.parametrize(("family", "lora"), [pytest.param(*JOBS[0], id="sana-lora"), *PARAMS])
def test_two_ranks_have_the_losses_of_one(tmp_path: Path, family: TrainedFamily, lora: bool) -> None:
    config = family_toml(tmp_path, family, job="nft", lora=lora)
    for ranks in (1, 2):
        run_forked([Job(config, tmp_path / f"{ranks}")], ranks, tmp_path)
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("1", "2")
    )
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        for key in ("train/loss_mean", "optim/grad_norm", "reward/mean"):
            assert a[key] == pytest.approx(b[key], rel=2e-3), key


@pytest.mark.zoo
def test_a_family_that_needs_a_call_per_level_is_refused(tmp_path: Path) -> None:
    config = family_toml(tmp_path, TrainedFamily("cosmos-predict2"), job="nft")
    with pytest.raises(AssertionError, match="needs a call for each noise level of a batch"):
        run_forked([Job(config, tmp_path / "2")], 2, tmp_path)
