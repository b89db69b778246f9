"""Commands that are given a file or folder of another kind say what it is and what takes it."""

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cosmos_rl.launcher import commands
from cosmos_rl.launcher.acceptance.environment import inspect_environment
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.file_kinds import FileKind, find_kind
from cosmos_rl.launcher.machine import free_disk
from cosmos_rl.policy.config import load_config
from cosmos_rl.storage.disk import find_existing_folder
from tests.support.nft_runs import nft_toml
from tests.support.rights import without_rights

ONE = np.zeros((1, 1), np.float32)
EXPORTED, PLAIN = {"transformer.a.lora_A.weight": ONE, "transformer.a.lora_B.weight": ONE}, {"a.weight": ONE}
FILES = {
    "kohya.safetensors": {"lora_unet_a.lora_down.weight": ONE},
    "older.safetensors": {"a.attn.processor.to_q_lora.down.weight": ONE},
    "flux.safetensors": {"double_blocks.0.processor.qkv_lora1.down.weight": ONE},
    "lokr.safetensors": {"lycoris_blocks_0_attn.lokr_w1": ONE},
    "model.safetensors": PLAIN,
    "exported/model.safetensors": EXPORTED,
    "step_2/lora/model.safetensors": EXPORTED,
}
KINDS = {
    "kohya.safetensors": FileKind.ADAPTER_FILE,
    "older.safetensors": FileKind.ADAPTER_FILE,
    "flux.safetensors": FileKind.ADAPTER_FILE,
    "lokr.safetensors": FileKind.ADAPTER_FILE,
    "model.safetensors": FileKind.WEIGHTS_FILE,
    "broken.safetensors": None,
    "exported": FileKind.ADAPTER,
    "step_2": FileKind.ADAPTER,
    "experts": FileKind.ADAPTER,
    "pipeline": FileKind.PIPELINE,
    "pipeline/transformer": FileKind.PIPELINE_PART,
    "run": FileKind.RUN,
    "run/checkpoints": FileKind.CHECKPOINT,
    "run/checkpoints/step_3": FileKind.CHECKPOINT,
    "run/checkpoints/step_3/policy": FileKind.CHECKPOINT,
    "run/config.toml": FileKind.CONFIG,
    "model.pt": FileKind.TORCH_FILE,
    "a.png": None,
    "empty": None,
    "nowhere": None,
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one of every kind, which is the current one."""
    for folder in ("experts/transformer", "pipeline/transformer", "run/checkpoints/step_3/policy", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("run/config.toml", "model.pt", "a.png", "broken.safetensors", "pipeline/transformer/config.json"):
        (tmp_path / name).touch()
    for name in ("experts/transformer/adapter_config.json", "pipeline/model_index.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "run/checkpoints/step_3/policy/COMMITTED.json").write_text('{"files": {}}')
    for name, tensors in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_place_is_known_by_what_lies_in_it(place: Path) -> None:
    assert {name: find_kind(Path(name)) for name in KINDS} == KINDS


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv, "--out", "out"]) == 2
    return capsys.readouterr().err


def test_sample_says_what_it_was_given_and_what_takes_that(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, kind in KINDS.items():
        if kind not in (FileKind.PIPELINE, FileKind.ADAPTER) and name != "nowhere":
            error = run(capsys, "sample", name, "a cat")
            assert f"{name}: neither a pipeline folder" in error
            if kind is not None and "run" not in name:
                assert kind.describe("it") in error
    step = "run/checkpoints/step_3"
    assert f"cosmos-rl export {step} --out DIR" in run(capsys, "sample", step, "a cat")
    assert "safetensors/step_<N>" in run(capsys, "sample", "run", "a cat")
    assert "does not exist" in run(capsys, "sample", "run/safetensors", "a cat")  # not asked of the hub


def test_export_and_import_say_what_they_were_given(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, kind in KINDS.items():
        if kind not in (None, FileKind.RUN, FileKind.CHECKPOINT):
            error = run(capsys, "export", name)
            assert kind.describe(name) in error
            assert "export takes a checkpoint of a run" in error
        if kind not in (None, FileKind.PIPELINE):
            assert main(["check-model", name]) == 2
            assert kind.describe(name) in capsys.readouterr().err
        if kind not in (None, FileKind.TORCH_FILE):
            assert kind.describe(name) in run(capsys, "import", name, "--base", "pipeline")


def test_a_place_in_which_nothing_can_be_written_is_named_before_any_work(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export, sample = ("export", "run/checkpoints/step_3"), ("sample", "exported", "a cat")
    for command in (export, sample, ("import", "model.pt", "--base", "pipeline"), ("tiny-model", "sd3")):
        assert main([*command, "--out", "a.png/new"]) == 2
        error = capsys.readouterr().err
        assert (
            f"{place}/a.png: nothing can be written there (Not a directory); choose another place with --out" in error
        )


def test_a_place_below_a_folder_that_may_not_be_entered_is_named(
    closed_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(closed_folder / "x" / "y")
    for command in (("tiny-model", "sd3"), ("sample", "exported", "a cat")):
        with without_rights():
            assert main([*command, "--out", out]) == 2
        error = capsys.readouterr().err
        assert f"{closed_folder}: nothing can be written there (Permission denied); choose another place" in error


def test_what_lies_below_a_folder_that_may_not_be_entered_is_named_by_every_command(
    closed_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = str(closed_folder / "x"), ("--out", str(closed_folder.parent / "new"))
    taken = (("sample", given, "a cat", *out), ("export", given, *out), ("import", given, "--base", given, *out))
    for command in (*taken, ("report", given), ("create-prompts", "--dataset_path", given, "--prompt", "a")):
        with without_rights():
            assert main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {given}")
        assert error.endswith(": Permission denied; look at its permissions and at those of the folders above it\n")


def test_what_is_not_permitted_and_is_no_path_is_no_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # what os.kill raises

    monkeypatch.setattr(commands, "schema", refuse)
    with pytest.raises(PermissionError, match="not permitted"):
        main(["schema"])


def test_the_folder_that_may_not_be_entered_is_the_one_that_exists(closed_folder: Path) -> None:
    with without_rights():
        assert find_existing_folder(closed_folder / "x") == closed_folder
        assert free_disk(closed_folder / "x") > 0


@pytest.mark.parametrize("key", ["train.train_policy.teacher", "policy.lora.lora_path"])
def test_weights_of_a_policy_of_the_wrong_kind_are_refused_before_a_model_is_loaded(
    place: Path, tiny_sd3: Path, key: str
) -> None:
    def problems(value: str, *, lora: bool) -> list[str]:
        config = load_config(nft_toml(place, tiny_sd3, lora=lora), [f"{key}={value}", "train.train_policy.kl_beta=1.0"])
        return [line for line in inspect_environment(config, None)[0] if key in line]

    shutil.rmtree("run/checkpoints/step_3")
    for value in ("exported", "step_2", "experts", "kohya.safetensors"):
        assert problems(value, lora=True) == []
    for value in ("pipeline", "pipeline/transformer", "run", "model.safetensors", "empty"):
        [line] = problems(value, lora=True)
        assert line.startswith(f'{key} = "{value}": ')
        assert "give an exported adapter with [policy.lora]" in line
    for value in ("broken.safetensors", "a.png"):
        [line] = problems(value, lora=True)
        assert line.startswith(f'{key} = "{value}": is no complete .safetensors file; give an exported adapter')
    if key == "policy.lora.lora_path":
        return
    assert problems("pipeline", lora=False) == []
    for value in ("exported", "kohya.safetensors", "run", "empty"):
        [line] = problems(value, lora=False)
        assert line.endswith("give a pipeline folder without [policy.lora]")
    [line] = problems("nowhere/teacher", lora=True)
    assert "does not exist" in line
