"""Families without a class of their own on two ranks: the numbers of one."""

from pathlib import Path

import pytest

from cosmos_rl.tracking.metrics import read_metrics
from tests.support.family_runs import ORDINARY, ZOO, TrainedFamily, family_toml
from tests.support.nft_runs import Job, image_prompts, run_forked

pytestmark = pytest.mark.process
JOBS = [(one, lora) for one in (*ORDINARY, *ZOO) if one.ranks for lora in (True, False)]
PARAMS = [
    pytest.param(*job, id=f"{job[0].name}-{'lora' if job[1] else 'full'}", marks=pytest.mark.zoo) for job in JOBS[1:]
]


@pytest.mark.parametrize(("family", "lora"), [pytest.param(*JOBS[0], id="sana-lora"), *PARAMS])
def test_two_ranks_have_the_losses_of_one(tmp_path: Path, family: TrainedFamily, lora: bool) -> None:
    require_the_numbers_of_one(tmp_path, family_toml(tmp_path, family, job="nft", lora=lora))


@pytest.mark.zoo
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_two_ranks_have_the_losses_of_one_in_half_precision(tmp_path: Path, lora: bool) -> None:
    """Wan keeps parts of its transformer in float32, on shards too."""
    wan = next(family for family in ORDINARY if family.name == "wan")
    halves = "--train.param_dtype=bfloat16", "--policy.parallelism.dp_shard_size=2"
    one_rank = "--policy.parallelism.dp_shard_size=1"
    config = family_toml(tmp_path, wan, job="nft", lora=lora)
    require_the_numbers_of_one(tmp_path, config, *halves, one_rank=one_rank, rel=2e-2)


@pytest.mark.zoo
def test_two_ranks_have_the_losses_of_one_with_media_as_conditions(tmp_path: Path) -> None:
    cosmos = TrainedFamily("cosmos-predict2.5", frames=("num_frames", 9))
    prompts = image_prompts(tmp_path)
    given = "--policy.diffusers.conditional_frames=[0,2]", f"--train.train_policy.dataset.local_dir={prompts}"
    require_the_numbers_of_one(tmp_path, family_toml(tmp_path, cosmos, job="nft"), *given)


def require_the_numbers_of_one(
    folder: Path, config: Path, *options: str, one_rank: str | None = None, rel: float = 2e-3
) -> None:
    """``one_rank``: an option of the run on one rank alone."""
    for ranks in (1, 2):
        more = (one_rank,) if one_rank is not None and ranks == 1 else ()
        run_forked([Job(config, folder / f"{ranks}", (*options, *more))], ranks, folder)
    one, two = (read_metrics(folder / name / "metrics.jsonl") for name in ("1", "2"))
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        for key in ("train/loss_mean", "optim/grad_norm", "reward/mean"):
            assert a[key] == pytest.approx(b[key], rel=rel), key


@pytest.mark.zoo
def test_a_family_that_needs_a_call_per_level_is_refused(tmp_path: Path) -> None:
    config = family_toml(tmp_path, TrainedFamily("cosmos-predict2"), job="nft")
    with pytest.raises(AssertionError, match="needs a call for each noise level of a batch"):
        run_forked([Job(config, tmp_path / "2")], 2, tmp_path)
