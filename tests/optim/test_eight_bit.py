"""The 8-bit optimisers of torchao: they train, and their state survives a stop and another number of ranks.

torchao takes more room than a test should ask for, and diffusers imports it wherever it is installed, so it is no part
of the `dev` extra: without it these tests are left out. Its step is compiled; here it runs as it is written.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_rl.checkpoint import layout
from cosmos_rl.distributed.blocks import blocks_in_a_row
from cosmos_rl.errors import UserError
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.ranks import train_on_ranks
from tests.support.states import assert_same_state, drop_steps_after, saved_state
from tests.support.trainer_runs import train

OPTIONS = (
    "--train.ckpt.save_freq=1",
    "--train.ckpt.max_keep=-1",
    "--train.optm_lr=1e-3",
    "--train.optm_warmup_steps=3",
)
EIGHT = '--train.optm_name="AdamW8bit"'


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((64, 256), 1), ((16, 512), 2), ((8, 256), 0), ((4096,), 0), ((1536, 16), 0), ((64, 300), 0), ((32, 16, 4, 4), 1)],
)
def test_no_block_reaches_over_two_rows(shape: tuple[int, ...], blocks: int) -> None:
    assert blocks_in_a_row(shape) == blocks


@pytest.fixture
def eager() -> Iterator[None]:
    pytest.importorskip("torchao")
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def losses(run: Path) -> np.ndarray:
    return np.array([line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl")])


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["AdamW", pytest.param("Adam", marks=pytest.mark.zoo)])
def test_training_stays_near_the_float32_optimiser(write_toml: Callable[..., Path], name: str) -> None:
    options = [*OPTIONS, "--train.max_num_steps=12"]
    ours, theirs = (
        train(write_toml(lora=False), *options, f'--train.optm_name="{each}"') for each in (f"{name}8bit", name)
    )
    state = saved_state(ours, 12)
    assert sum(key.endswith(".codes") for key in state) > 4
    np.testing.assert_allclose(losses(ours), losses(theirs), rtol=2e-2)
    assert losses(ours)[-3:].mean() < losses(ours)[:3].mean()
    moved = [key for key in state if key.startswith("model.")]
    before = saved_state(ours, 1)
    reference = saved_state(theirs, 12)
    distance = sum(float((state[key] - reference[key]).square().sum()) for key in moved) ** 0.5
    path = sum(float((reference[key] - before[key]).square().sum()) for key in moved) ** 0.5
    assert 0 < distance < 0.2 * path


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_resume_is_exact(write_toml: Callable[..., Path], lora: bool) -> None:
    config = write_toml(lora=lora)
    run = train(config, EIGHT, *OPTIONS)
    before, lines = saved_state(run, 6), losses(run)
    drop_steps_after(run, 3)
    train(config, EIGHT, *OPTIONS, resume=(run, 3))
    assert_same_state(saved_state(run, 6), before)
    assert (losses(run) == lines).all()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("saved", "now"), [("AdamW", "AdamW8bit"), ("AdamW8bit", "AdamW")])
def test_optimiser_state_of_the_other_kind_is_refused(write_toml: Callable[..., Path], saved: str, now: str) -> None:
    config = write_toml(lora=False)
    run = train(config, f'--train.optm_name="{saved}"', "--train.max_num_steps=1")
    with pytest.raises(UserError, match=rf"train\.optm_name = '{saved}', this run has '{now}'"):
        train(config, f'--train.optm_name="{now}"', resume=(run, 1))


@pytest.mark.zoo
@pytest.mark.process
@pytest.mark.usefixtures("eager")
def test_two_ranks_then_one_end_like_one(
    write_toml: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    config = write_toml(lora=False)
    options = (EIGHT, *OPTIONS, "--train.global_batch_size=8")
    calm = train_on_ranks(1, config, tmp_path / "calm", *options)
    moved = train_on_ranks(2, config, tmp_path / "moved", *options, "--train.max_num_steps=3")
    assert layout.list_whole_steps(moved / "checkpoints") == [1, 2, 3]
    train_on_ranks(1, config, moved, *options, resume_step=3)
    np.testing.assert_allclose(losses(moved), losses(calm), rtol=1e-4)  # a rounding may fall to the other side
    ours, theirs = saved_state(moved, 3), saved_state(calm, 3)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if key.endswith(".scale"):
            torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-9)
