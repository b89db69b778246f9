"""How a DiffusionNFT job ends when something goes wrong: with a message, in time, and with what was good."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from cosmos_rl.checkpoint import layout
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import TrainingStoppedError, UserError
from cosmos_rl.launcher.ranks.worker_process import supervise
from cosmos_rl.policy.config.jobs import DIFFUSION_NFT, JOBS
from cosmos_rl.policy.trainer.rl.algorithm import Terms
from cosmos_rl.policy.trainer.rl.nft import DiffusionNft
from cosmos_rl.policy.trainer.rl.scoring import Scoring
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.nft_runs import nft_toml, nft_train, nft_trainer
from tests.support.paths import ROOT
from tests.support.patience import exit_code, wait_until
from tests.support.states import assert_same_state, saved_state


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("broken", r"reward broken: the function cannot be used: AttributeError: .*\(nft_rewards.py, line \d+\)"),
        (
            "stuck",
            r"reward stuck: the function has not returned after 0.3 s \(train.train_policy.local_reward.timeout_s",
        ),
        ("not_a_number", r"16 of 16 rewards of this step are missing .*\n.*not_a_number: the function gave nan"),
        (
            "never",
            r"16 of 16 rewards .*max_missing_frac = 0.2 allows fewer\):\n  sample 0 \('.*'\): never: .*gave None",
        ),
    ],
)
def test_a_reward_that_gives_nothing_ends_the_run(tmp_path: Path, tiny_sd3: Path, reward: str, message: str) -> None:
    config = nft_toml(tmp_path, tiny_sd3, reward=reward)
    with pytest.raises(UserError, match=message):
        nft_train(config, f"--train.train_policy.local_reward.timeout_s={0.3 if reward == 'stuck' else 60.0}")


def test_the_threads_of_the_rewards_end_with_the_run(tmp_path: Path, tiny_sd3: Path) -> None:
    before = set(threading.enumerate())
    during: set[threading.Thread] = set()

    def note(metrics: dict[str, Any], step: int) -> None:
        during.update(threading.enumerate())

    nft_train(nft_toml(tmp_path, tiny_sd3), "--train.max_num_steps=1", custom_logger_fns=[note])
    assert "local-rewards" in {thread.name for thread in during - before}
    assert set(threading.enumerate()) <= before
    with pytest.raises(UserError):
        nft_train(nft_toml(tmp_path, tiny_sd3, reward="broken"))
    assert set(threading.enumerate()) <= before


def test_scores_that_never_come_are_not_waited_for(tmp_path: Path, tiny_sd3: Path) -> None:
    from concurrent.futures import Future

    scoring = nft_trainer(nft_toml(tmp_path, tiny_sd3))._scoring
    job = scoring._job
    hasty = job.model_copy(update={"remote_reward": job.remote_reward.model_copy(update={"timeout_s": -29.9})})
    with pytest.raises(TrainingStoppedError, match=r"the rewards smooth of 0 samples have not arrived after 0.2 s"):
        Scoring(scoring.rewards, scoring._model, hasty, 0, Context(torch.device("cpu"))).wait(Future())


class Infinite(DiffusionNft):
    """The algorithm with a loss that is infinite in some of its calls."""

    numbers: ClassVar[Iterator[int]]
    infinite: ClassVar[tuple[int, ...]]

    def loss(self, *args: Any) -> tuple[torch.Tensor, Terms]:
        loss_sum, terms = super().loss(*args)
        factor = torch.inf if next(self.numbers) in self.infinite else 1.0
        return loss_sum * factor, {**terms, "policy_loss": terms["policy_loss"] * factor}


@pytest.fixture
def infinite(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the loss infinite in the given calls."""

    def make(*calls: int) -> None:
        Infinite.numbers, Infinite.infinite = itertools.count(), calls
        kind = replace(DIFFUSION_NFT, algorithm=f"{__name__}:Infinite.from_config")
        monkeypatch.setitem(JOBS, ("grpo", "diffusion_nft"), kind)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_an_infinite_loss_leaves_its_step_out(
    tmp_path: Path, tiny_sd3: Path, infinite: Callable[..., None], lora: bool
) -> None:
    infinite(9)  # of 8 calls a step: in the second one
    run = nft_train(nft_toml(tmp_path, tiny_sd3, lora=lora), "--train.ema_enable=true")
    assert_same_state(saved_state(run, 2), saved_state(run, 1))
    states = saved_state(run, 3)
    assert all(value.isfinite().all() for value in states.values())
    assert not all(torch.equal(value, saved_state(run, 2)[key]) for key, value in states.items())
    assert [line["optim/steps"] for line in read_metrics(run / "metrics.jsonl")] == [1, 1, 2]


def test_infinite_losses_in_a_row_end_the_run_with_the_last_good_weights(
    tmp_path: Path, tiny_sd3: Path, infinite: Callable[..., None]
) -> None:
    infinite(*range(8, 100))
    with pytest.raises(FloatingPointError, match="not finite in 2 steps in a row .* so the weights are finite"):
        nft_train(nft_toml(tmp_path, tiny_sd3), "--train.max_nonfinite_steps=2", "--train.max_num_steps=9")
    (run,) = (path for path in (tmp_path / "out").iterdir() if path.name.isdigit())
    assert layout.list_whole_steps(run / "checkpoints") == [1, 2]
    assert_same_state(saved_state(run, 2), saved_state(run, 1))


def test_a_stopped_training_is_a_failure_that_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(stop: object) -> int:
        raise TrainingStoppedError("stopped by the guard")

    monkeypatch.delenv("COSMOS_EXIT_FILE", raising=False)
    with pytest.raises(SystemExit) as ended:
        supervise(body)
    assert ended.value.code == 1
    monkeypatch.setenv("COSMOS_EXIT_FILE", str(tmp_path / "exit"))
    with pytest.raises(SystemExit) as ended:  # 0: the agent does not start it again; the launcher reads the file
        supervise(body)
    assert ended.value.code == 0
    assert (tmp_path / "exit.0").read_text() == "1"
    assert (tmp_path / "exit.0.message").read_text() == "stopped by the guard"  # the launcher prints it
    assert capsys.readouterr().err == "error: stopped by the guard\n"


# ---- the documented command ----------------------------------------------------------------------------------------


class Command:
    """`cosmos-rl` in a process of its own."""

    def __init__(self, config: Path, log: Path, *options: str, **environment: str) -> None:
        code = "import sys; from cosmos_rl.launcher.cli import main; sys.exit(main())"
        command = [
            sys.executable,
            "-c",
            code,
            "--config",
            str(config),
            *options,
            "cosmos_rl.tools.dataset.diffusion_nft",
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)

    def end(self) -> int:
        try:
            return exit_code(self.process)
        finally:
            self.process.kill()


@pytest.mark.process
def test_sigterm_within_a_step_saves_it_and_ends_with_75(tmp_path: Path, tiny_sd3: Path) -> None:
    called = tmp_path / "called"
    options = ("--train.ckpt.save_freq=50", "--train.max_num_steps=60")
    command = Command(nft_toml(tmp_path, tiny_sd3, reward="slow"), tmp_path / "log", *options, TEST_CALLED=str(called))

    def is_called() -> bool:
        assert command.process.poll() is None, command.log.read_text()[-3000:]
        return called.exists()

    wait_until(is_called, "the first reward")
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == 75, command.log.read_text()[-3000:]
    (run,) = (path for path in (tmp_path / "out").iterdir() if path.name.isdigit())
    (step,) = layout.list_whole_steps(run / "checkpoints")
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, step + 1))
    policy = layout.policy_dir(run / "checkpoints", step)
    assert json.loads((policy / layout.TRAINER_STATE).read_text())["task"]["optimizer_steps"] == step


@pytest.mark.process
def test_a_rank_that_dies_ends_the_job(tmp_path: Path, tiny_sd3: Path) -> None:
    config = nft_toml(tmp_path, tiny_sd3, reward="dies_on_rank_one")
    command = Command(config, tmp_path / "log", "--nproc-per-node=2", "--train.train_policy.mini_batch=2")
    assert command.end() == 1, command.log.read_text()[-3000:]
    assert re.search("rank 1 ended with exit code 17", command.log.read_text())
