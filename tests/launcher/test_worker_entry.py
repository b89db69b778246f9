"""What a training script calls, in and without the launcher."""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl.launcher import worker_entry
from cosmos_rl.launcher.ranks.signals import SAME_MOMENT_S, StopRequest
from cosmos_rl.launcher.ranks.worker_process import supervise
from cosmos_rl.policy.config import Config
from cosmos_rl.storage.run_folder import find_newest_run


@pytest.fixture
def by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """As if `python script.py --config run.toml ...` had been typed; returns a setter of the arguments."""
    for name in ("COSMOS_RUN_DIR", "COSMOS_EXIT_FILE", "COSMOS_LAUNCHER_PID", "COSMOS_ROLE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    path = tmp_path / "run.toml"
    path.write_text(
        f'[policy]\nmodel_name_or_path = "{tmp_path}/model"\nis_diffusers = true\n'
        f'[train]\noutput_dir = "{tmp_path}/out"\ndevice = "cpu"\n'
    )

    def type_in(*arguments: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
        return path

    type_in("--config", str(path))
    return type_in


def ends_with(code: int, **arguments: Any) -> None:
    with pytest.raises(SystemExit) as end:
        worker_entry.main(**arguments)
    assert end.value.code == code


def test_arguments_that_can_have_no_effect_yet_are_refused(
    by_hand: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ends_with(2, data_packer=object(), filter_reward_fns=[print])
    assert "not usable yet: data_packer, filter_reward_fns" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rewards_go_to_reinforcement_learning_and_to_no_other_job(
    by_hand: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import cosmos_rl.policy.trainer

    ends_with(2, dataset=[], reward_fns=[print])
    assert 'reward_fns: only with train.train_policy.type = "grpo"' in capsys.readouterr().err
    given = {}
    monkeypatch.setattr(cosmos_rl.policy.trainer, "run", lambda *args, **keywords: given.update(keywords) or 0)
    path = by_hand()
    path.write_text(
        path.read_text() + '[train.train_policy]\ntype = "grpo"\ntrainer_type = "diffusion_nft"\n'
        "uncentralized_training = true\n"
        "[policy.parallelism]\ndp_shard_size = 1\n[policy.diffusers.sample]\ndeterministic_sampling = true\n"
    )
    by_hand("--config", str(path), "--mode=colocated", "--train.train_batch_per_replica=16")
    worker_entry.main(dataset=["a"], reward_fns=[print])
    assert (given["reward_fns"], given["val_reward_fns"]) == ([print], None)


def test_a_missing_config_is_a_usage_error(by_hand: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    by_hand("--other")
    ends_with(2)
    assert "--config X.toml" in capsys.readouterr().err


def test_settings_that_are_not_built_are_refused_without_the_launcher_too(
    by_hand: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = by_hand()
    by_hand("--config", str(path), "--policy.parallelism.tp_size=2")
    ends_with(2)
    assert "not supported yet" in capsys.readouterr().err


def test_a_script_of_its_own_gets_a_run_folder_and_reaches_the_trainer(
    by_hand: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = by_hand()
    by_hand("--my-option", "3", "--train.seed=7")  # the script's parser has taken --config out
    ends_with(2, dataset=[], unheard_of=1, args=argparse.Namespace(config=str(path)))
    printed = capsys.readouterr()
    assert "unknown arguments are ignored: unheard_of" in printed.out
    assert printed.err.startswith("error: dataset: is empty")  # the trainer's word on the empty data set
    assert find_newest_run(tmp_path / "out") is None
    assert not list((tmp_path / "out").iterdir())  # nothing began, so nothing is left


def test_a_script_started_by_hand_is_one_rank(
    by_hand: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = by_hand()
    options = [
        "--policy.parallelism.dp_shard_size=4",
        "--train.global_batch_size=6",
        "--train.train_policy.mini_batch=3",
    ]
    by_hand("--config", str(path), *options)
    ends_with(2, dataset=[])
    printed = capsys.readouterr()
    assert "1 rank, policy.parallelism.dp_shard_size = 1 in place of 4" in printed.out
    assert printed.err.startswith("error: dataset: is empty")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ends_with(2, dataset=[])
    assert "several ranks are started with `cosmos-rl --nproc-per-node N" in capsys.readouterr().err


def test_success_returns_and_other_codes_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COSMOS_EXIT_FILE", raising=False)
    monkeypatch.delenv("COSMOS_LAUNCHER_PID", raising=False)
    assert supervise(lambda stop: 0) is None
    with pytest.raises(SystemExit) as end:
        supervise(lambda stop: 75)
    assert end.value.code == 75


def test_the_first_signal_stays_the_reason_to_stop() -> None:
    stop = StopRequest()
    assert (stop.requested, stop.exit_code) == (None, 0)
    stop.note("SIGTERM")
    stop.note("SIGINT")
    assert (stop.requested, stop.exit_code, stop.insisted) == ("SIGTERM", 75, False)
    time.sleep(2 * SAME_MOMENT_S)  # two at one moment are one
    stop.note("SIGINT")
    assert stop.insisted


def test_the_bundled_launcher_reads_pairs_or_prompts_for_validation(tmp_path: Path) -> None:
    from cosmos_rl.data.prompts import PromptFile
    from cosmos_rl.errors import UserError
    from cosmos_rl.tools.dataset.diffusers_dataset import training_pairs, validation_data

    prompts = tmp_path / "prompts.json"
    prompts.write_text('[{"prompt": "a cat"}]')
    source = {"dataset": {"local_dir": str(prompts)}}
    assert validation_data(Config.from_dict({"validation": source})) is None
    read = validation_data(Config.from_dict({"validation": {**source, "enable": True}}))
    assert isinstance(read, PromptFile)
    assert list(read) == ["a cat"]
    with pytest.raises(UserError, match=r"train\.train_policy\.dataset\.local_dir: missing"):
        training_pairs(Config())


@pytest.mark.process
def test_a_training_process_imports_nothing_of_check_and_no_library_that_it_never_uses() -> None:
    code = (
        "import sys, cosmos_rl.launcher.worker_entry, cosmos_rl.policy.trainer.loop\n"
        "import cosmos_rl.policy.trainer.rl.build\n"
        "import cosmos_rl.policy.trainer.diffusers_trainer.build, cosmos_rl.policy.model.diffusers.sd3_model\n"
        "from diffusers import StableDiffusion3Pipeline\n"
        "unwanted = ('cosmos_rl.launcher.check', 'cosmos_rl.launcher.doctor', 'torchao', 'boto3')\n"
        "print([name for name in sys.modules if name.startswith(unwanted)])\n"
        "import importlib.util; print(importlib.util.find_spec('torchao') is not None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines(), done.stderr) == (["[]", "True"], "")  # the 8-bit optimisers still find torchao
