"""A resume says what is not as it was: other data, another base or another adapter are refused, the rest is a line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cosmos_rl.checkpoint.layout import COMMIT_MARKER, TRAINER_STATE, build_marker_text, policy_dir
from cosmos_rl.data.pair_files import Pair, digest_pairs
from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.digest import pipeline_digest
from cosmos_rl.policy.trainer.same_run import log_changes
from tests.support.pairs import other_captions, other_names
from tests.support.trainer_runs import train

Toml = Callable[..., Path]


@pytest.fixture
def saved(write_toml: Toml) -> tuple[Path, tuple[Path, int]]:
    config = write_toml()
    return config, (train(config, "--train.max_num_steps=2"), 2)


@pytest.mark.parametrize("change", [other_captions, other_names])
def test_other_data_is_refused(
    saved: tuple[Path, tuple[Path, int]], tmp_path: Path, image_folder: Path, change: Callable[[Path], None]
) -> None:
    config, step = saved
    data = shutil.copytree(image_folder, tmp_path / "data")
    chosen = f"--train.train_policy.dataset.local_dir={data}"
    train(config, chosen, "--train.max_num_steps=3", resume=step)  # the same data in another place
    change(data)
    with pytest.raises(UserError, match=r"data \(digest of names and captions\) = '\w+', this run has '\w+'"):
        train(config, chosen, resume=step)


def test_another_base_model_is_refused(saved: tuple[Path, tuple[Path, int]], tmp_path: Path, tiny_sd3: Path) -> None:
    config, step = saved
    moved = shutil.copytree(tiny_sd3, tmp_path / "moved")
    (moved / "README.md").write_text("a new description")
    train(config, f"--policy.model_name_or_path={moved}", "--train.max_num_steps=3", resume=step)
    file = next((moved / "transformer").glob("*.safetensors"))
    weights = load_file(file)
    save_file({name: value + 1 for name, value in weights.items()}, file)
    with pytest.raises(UserError, match=r"base model \(digest of its files\) = '\w+', this run has '\w+'"):
        train(config, f"--policy.model_name_or_path={moved}", resume=step)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--policy.lora.lora_alpha=64", r"policy\.lora\.lora_alpha = 8.*, this run has 64"),
        ("--policy.lora.use_rslora=true", r"policy\.lora\.use_rslora = False, this run has True"),
        ("--policy.lora.alpha_pattern={to_q=3}", r"policy\.lora\.alpha_pattern = {}, this run has {'to_q': 3"),
        ("--policy.lora.r_pattern={to_q=3}", r"policy\.lora\.r_pattern"),
    ],
)
def test_an_adapter_that_would_act_otherwise_is_refused(
    saved: tuple[Path, tuple[Path, int]], option: str, text: str
) -> None:
    config, step = saved
    with pytest.raises(UserError, match=text):
        train(config, option, resume=step)


@pytest.mark.zoo
def test_another_optimiser_is_refused_and_another_name_of_the_same_is_not(
    saved: tuple[Path, tuple[Path, int]], write_toml: Toml
) -> None:
    config, step = saved
    muon = '--train.optm_name="Muon"'
    with pytest.raises(UserError, match=r"train\.optm_name = 'AdamW', this run has 'Muon'"):
        train(config, muon, resume=step)
    train(config, '--train.optm_name="torch.optim.AdamW"', "--train.max_num_steps=3", resume=step)
    run = train(write_toml(), muon, "--train.max_num_steps=1")
    with pytest.raises(UserError, match=r"train\.optm_name = 'Muon', this run has 'AdamW'"):
        train(config, resume=(run, 1))


def test_what_may_change_is_one_line(saved: tuple[Path, tuple[Path, int]], caplog: pytest.LogCaptureFixture) -> None:
    config, step = saved
    size = ("--policy.diffusers.inference_size=[16, 16]", "--policy.diffusers.max_prompt_length=8")
    options = ("--train.optm_lr=5e-3", *size)
    places = ("--train.ckpt.save_freq=1", "--logging.log_interval=2", "--train.train_policy.mini_batch=4")
    with caplog.at_level("WARNING", logger="cosmos"):
        train(config, *options, *places, "--train.max_num_steps=3", resume=step)
    (line,) = [message for message in caplog.messages if "Changed since" in message]
    assert line == (
        "Changed since the checkpoint: policy.diffusers.max_prompt_length 16 -> 8; policy.diffusers.inference_size "
        "[32, 32] -> [16, 16]; train.optm_lr 0.01 -> 0.005"
    )
    caplog.clear()
    with caplog.at_level("WARNING", logger="cosmos"):
        train(config, *options, "--train.max_num_steps=4", resume=(step[0], 3))
    assert not [message for message in caplog.messages if "Changed since" in message]


def test_a_checkpoint_of_an_older_version_resumes_and_says_what_was_not_compared(
    saved: tuple[Path, tuple[Path, int]], caplog: pytest.LogCaptureFixture
) -> None:
    config, (run, step) = saved
    policy = policy_dir(run / "checkpoints", step)
    state = json.loads((policy / TRAINER_STATE).read_text())
    del state["settings"], state["run"]["base model (digest of its files)"], state["run"]["train.optm_name"]
    (policy / TRAINER_STATE).write_text(json.dumps(state))
    (policy / COMMIT_MARKER).unlink()
    (policy / COMMIT_MARKER).write_text(build_marker_text(policy))
    with caplog.at_level("INFO", logger="cosmos"):
        train(config, "--train.max_num_steps=3", resume=(run, step))
    assert [m for m in caplog.messages if m.startswith("not compared") and "base model" in m]


def test_the_digest_of_captions_differs_by_name_and_text() -> None:
    def digest(*pairs: tuple[str, str]) -> str:
        return digest_pairs([Pair(name, f"{name}.png", prompt) for name, prompt in pairs])

    assert digest(("a", "x"), ("b", "y")) == digest(("a", "x"), ("b", "y"))
    several = [digest(("a", "x"), ("b", "y")), digest(("a", "y"), ("b", "x")), digest(("ax", ""), ("b", "y"))]
    assert len(set(several)) == 3


def test_a_base_that_is_not_here_has_no_digest(tmp_path: Path, tiny_sd3: Path) -> None:
    assert pipeline_digest(str(tmp_path), None) is None
    assert pipeline_digest("nobody/nothing", None) is None
    assert len(pipeline_digest(str(tiny_sd3), None) or "") == 16


def test_of_a_list_of_tables_only_the_keys_that_differ_are_named(caplog: pytest.LogCaptureFixture) -> None:
    before = {
        "sets": [{"local_dir": "a" * 99, "rewards": ["x"]}, {"local_dir": "b", "rewards": ["y"]}],
        "one": [{"k": 1}],
    }
    now = {"sets": [{"local_dir": "a" * 99, "rewards": ["x"]}, {"local_dir": "b", "rewards": ["z"]}], "one": []}
    with caplog.at_level("WARNING", logger="cosmos"):
        log_changes(before, now)
    assert caplog.messages == ['Changed since the checkpoint: sets.1.rewards ["y"] -> ["z"]; one [{"k": 1}] -> []']
