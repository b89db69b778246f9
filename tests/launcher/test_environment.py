"""Mistakes outside of the configuration are all named in a second, before a run folder or torch."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cosmos_rl.launcher.acceptance.environment import inspect_environment
from cosmos_rl.launcher.acceptance.paths import with_absolute_paths
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import Config, GrpoPolicyConfig, load_config
from tests.support import patience
from tests.support.rights import without_rights

KEY = "train.train_policy.dataset.local_dir"
UTF_16 = {
    "utf-16": "is not UTF-8 text but UTF-16; save it as UTF-8",
    "utf-16-le": "has null characters, as UTF-16 without a byte order mark; save it as UTF-8",
    "utf-16-be": "has null characters, as UTF-16 without a byte order mark; save it as UTF-8",
}
"""Encodings, and what is said of a file that has them."""


def problems(config: Config) -> list[str]:
    """Of a configuration whose data a script brings."""
    return inspect_environment(config, None)[0]


def test_every_missing_thing_is_named_and_no_run_folder_is_created(
    tmp_path: Path, write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--policy.model_name_or_path=./no_model",
        "--train.train_policy.dataset.local_dir=no_data",
        "--validation.enable=true",
        "--validation.dataset.local_dir=no_prompts.json",
        f"--policy.lora.lora_path={tmp_path}/no_lora",
    ]
    assert main(["--config", str(write_toml()), *options]) == 2
    message = capsys.readouterr().err
    assert message.count("does not exist") == 4
    tables = ("policy.model_name_or_path", "train.train_policy.dataset", "validation.dataset", "policy.lora.lora_path")
    for key in tables:
        assert key in message
    assert "Traceback" not in message
    assert not (tmp_path / "out").exists()


def test_a_cache_in_which_nothing_can_be_written_is_refused_if_it_would_be_used(
    tmp_path: Path, write_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    key, at = "train.train_policy.cache.dir", tmp_path / "file"
    unused = load_config(write_toml(), [f"--{key}={at}"])
    assert not [line for line in problems(unused) if "cache" in line]
    options = ["--train.train_policy.cache.latents=true"]
    [named] = [line for line in problems(load_config(write_toml(), [f"--{key}={at}", *options])) if "cache" in line]
    assert named.startswith(f'{key} = "{at}": {at}: nothing can be written there (Not a directory); name another')
    assert named.endswith("name another folder, or leave it out: then it is in train.output_dir")
    monkeypatch.setenv("COSMOS_CACHE", str(at / "below"))
    [named] = [line for line in problems(load_config(write_toml(), options)) if "CACHE" in line]
    assert named == (
        f'COSMOS_CACHE = "{at}/below": {at}: nothing can be written there (Not a directory); name another folder, or '
        "unset it: then it is in train.output_dir"
    )
    [named] = [line for line in problems(load_config(write_toml(), [f"--{key}={at}", *options])) if "cache.dir" in line]
    assert named.endswith(f"name another folder, or leave it out: then it is $COSMOS_CACHE, {at}/below")
    assert not [
        line for line in problems(load_config(write_toml(), [f"--{key}={tmp_path}/new", *options])) if key in line
    ]
    assert not (tmp_path / "new").exists()


def test_what_lies_below_a_folder_that_may_not_be_entered_is_named_by_its_key(
    closed_folder: Path, write_toml: Callable[..., Path]
) -> None:
    keys = (
        "policy.model_name_or_path",
        "train.train_policy.dataset.local_dir",
        "policy.lora.lora_path",
        "validation.dataset.local_dir",
        "train.train_policy.cache.dir",
    )
    at = closed_folder / "x" / "y"
    options = [
        *(f"--{key}={at}" for key in keys),
        "--train.train_policy.cache.latents=true",
        "--validation.enable=true",
    ]
    config = load_config(write_toml(), options)
    with without_rights():
        lines = inspect_environment(config, "pairs")[0]
    for key in keys[:-1]:
        assert (
            f'{key} = "{at}": {closed_folder} cannot be entered (Permission denied); look at its permissions' in lines
        )
    [cache] = [line for line in lines if line.startswith(keys[-1])]
    assert cache.startswith(f'{keys[-1]} = "{at}": {closed_folder}: nothing can be written there (Permission denied)')


def test_a_hub_name_that_cannot_be_downloaded_is_refused_at_once(
    write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--policy.model_name_or_path=stabilityai/none", "--train.train_policy.dataset.local_dir=no_data"]
    assert main(["--config", str(write_toml()), *options]) == 2
    message = capsys.readouterr().err
    assert "the local cache of the hub does not have it, and HF_HUB_OFFLINE is set" in message
    assert message.count("does not exist") == 1  # the data, not the model


def test_folders_of_another_kind_are_described(
    tmp_path: Path, write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "checkpoints" / "step_3" / "policy"
    state.mkdir(parents=True)
    data = tmp_path / "data"
    (data / "videos").mkdir(parents=True)
    (data / "a.jpg").write_bytes(b"")
    options = [f"--policy.model_name_or_path={state}", f"--train.train_policy.dataset.local_dir={data}"]
    assert main(["--config", str(write_toml()), *options]) == 2
    message = capsys.readouterr().err
    assert "exported pipelines are under safetensors/step_<N>" in message
    assert "found 1 .jpg, 1 folders (videos)" in message


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *(
            (json.dumps({"root": ".", "data_list": ["0.tar"]}).encode(encoding), why)
            for encoding, why in UTF_16.items()
        ),
        (b'{"root": ".", "data_list": [', "is not valid JSON (Expecting value: line 1 column 29 (char 28))"),
        (b'[{"prompt": "a"}]', "is a file"),
    ],
)
def test_a_wdinfo_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, content: bytes, why: str) -> None:
    place = tmp_path / "wdinfo.json"
    place.write_bytes(content)
    config = Config.from_dict({"train": {"train_policy": {"type": "sft", "dataset": {"local_dir": str(place)}}}})
    found, _ = inspect_environment(config, "pairs")
    wanted = f'{KEY} = "{place}": {why}; give the folder of the images, a .tar, or a wdinfo file, '
    assert [line.partition(wanted)[:2] for line in found if KEY in line] == [("", wanted)]


def pixels(file: Path) -> bytes:
    with Image.open(file) as image:
        return image.tobytes()


def drawn_by_diffusers(adapter: Path, base: Path, text_length: int) -> bytes:
    """What `cosmos-rl sample` should make of "a dog" with seed 1 and 2 steps."""
    import torch
    from diffusers import DiffusionPipeline

    pipe: Any = DiffusionPipeline.from_pretrained(base)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(str(adapter), weight_name="model.safetensors")
    size = {"height": 32, "width": 32, "num_inference_steps": 2, "guidance_scale": 4.5}
    generator = torch.Generator().manual_seed(1)
    return pipe("a dog", max_sequence_length=text_length, generator=generator, **size).images[0].tobytes()


def test_the_verbs_export_and_sample_work_on_a_run(
    tmp_path: Path, write_toml: Callable[..., Path], tiny_sd3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    from cosmos_rl.policy.config import dump_toml, load_config
    from tests.support.trainer_runs import train

    config = write_toml()
    run = train(config, "--train.ema_enable=true")
    (run / "config.toml").write_text(dump_toml(load_config(config, ["--train.ema_enable=true"])))
    assert main(["export", str(run), "--out", str(tmp_path / "exported")]) == 0
    ours, again = (load_file(p / "lora/model.safetensors") for p in (run / "safetensors/step_6", tmp_path / "exported"))
    assert ours.keys() == again.keys()
    assert all(bool((value == again[key]).all()) for key, value in ours.items())

    capsys.readouterr()
    command = ["a cat", "a dog", "--num", "2", "--steps", "2", "--size", "32", "32", "--out", str(tmp_path / "made")]
    assert main(["sample", str(tmp_path / "exported"), *command]) == 0
    files = capsys.readouterr().out.split()
    assert [Path(file).name for file in files] == ["000_a-cat.png", "001_a-cat.png", "002_a-dog.png", "003_a-dog.png"]
    assert len(json.loads((tmp_path / "made" / "index.json").read_text())) == 4
    assert pixels(tmp_path / "made/003_a-dog.png") == drawn_by_diffusers(tmp_path / "exported/lora", tiny_sd3, 16)
    assert pixels(tmp_path / "made/003_a-dog.png") != drawn_by_diffusers(tmp_path / "exported/lora", tiny_sd3, 256)

    assert main(["sample", str(tmp_path / "exported"), *command]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["sample", str(tmp_path), "a cat", "--out", str(tmp_path / "other")]) == 2
    assert "neither a pipeline folder" in capsys.readouterr().err
    assert main(["export", str(run), "--out", str(tmp_path / "exported")]) == 2
    assert main(["export", str(tmp_path / "made"), "--out", str(tmp_path / "new")]) == 2
    assert "holds no whole checkpoint" in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_refused_before_torch_is_loaded(write_toml: Callable[..., Path]) -> None:
    command = ["--config", str(write_toml()), '--logging.logger=["console", "wandb"]']
    code = (
        "import importlib.util, sys; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'wandb' else real(name, package)\n"
        "from cosmos_rl.launcher.cli import main\n"
        f"codes = main({command}), main(['check', '--env', *{command}])\n"
        "sys.exit(10 if 'torch' in sys.modules or codes != (2, 2) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('logging.logger has "wandb", not installed here: pip install "cosmos_rl[wandb]"') == 2


def test_a_base_in_4_bits_without_torchao_is_refused(
    write_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name == "torchao" else found(name, package)
    )
    packed = load_config(write_toml(), ['--policy.lora.quantize_base="nf4"'])
    assert inspect_environment(packed, "pairs")[0] == [
        'policy.lora.quantize_base = "nf4" needs torchao 0.18 or newer: pip install -U torchao'
    ]
    assert inspect_environment(load_config(write_toml()), "pairs")[0] == []


def test_a_missing_address_of_the_reward_service_is_refused_before_torch_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for generation in ("REMOTE", "WFM", "DIFFUSION"):
        monkeypatch.delenv(f"{generation}_REWARD_ENQUEUE_URL", raising=False)
    (tmp_path / "model_index.json").write_text("{}")
    job = {"type": "grpo", "use_remote_reward": True}
    values = {"policy": {"model_name_or_path": str(tmp_path)}, "train": {"train_policy": job, "device": "cpu"}}
    monkeypatch.setenv("REMOTE_REWARD_FETCH_URL", "http://localhost/pull")
    [problem] = problems(Config.from_dict(values))
    assert problem.startswith("REMOTE_REWARD_ENQUEUE_URL: missing in the environment")
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", "http://localhost/enqueue")
    assert problems(Config.from_dict(values)) == []


def test_a_file_of_rewards_is_found_from_any_folder_and_a_missing_one_is_named(
    tmp_path: Path, write_nft_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    functions = '[{function = "my_reward.py:red"}, {function = "cosmos_rl.reward.examples:sharpness"}]'
    path = write_nft_toml(f"[validation]\nlocal_reward.reward_fns = {functions}")
    config = load_config(path, [f"--train.train_policy.local_reward.reward_fns={functions}"])
    lines = problems(config)
    for key in ("train.train_policy", "validation"):
        missing = f'{key}.local_reward.reward_fns: "my_reward.py:red": {tmp_path}/my_reward.py does not exist'
        assert missing in lines
    (tmp_path / "my_reward.py").write_text("def reed(image): return 1.0\n")
    assert all('my_reward.py has no function "red"; did you mean reed' in line for line in problems(config))
    assert len(problems(config)) == 2
    (tmp_path / "my_reward.py").write_text("def red(image) return 1.0\n")
    assert all('"my_reward.py:red": my_reward.py, line 1: expected' in line for line in problems(config))
    assert len(problems(config)) == 2
    for encoding, why in UTF_16.items():
        (tmp_path / "my_reward.py").write_bytes("def red(image): return 1.0\n".encode(encoding))
        assert all(line.endswith(f'"my_reward.py:red": my_reward.py {why}') for line in problems(config))
        assert len(problems(config)) == 2
    (tmp_path / "my_reward.py").write_text("import functools\nred = functools.partial(max, 1.0)\n")
    assert problems(config) == []
    found = with_absolute_paths(config)
    assert isinstance(found.train.train_policy, GrpoPolicyConfig)
    for table in (found.train.train_policy.local_reward, found.validation.local_reward):
        assert table is not None
        names = [function.function for function in table.reward_fns]
        assert names == [f"{tmp_path}/my_reward.py:red", "cosmos_rl.reward.examples:sharpness"]


def test_an_empty_prompt_file_is_reported_with_all_else_before_torch_is_loaded(
    tmp_path: Path, write_nft_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_nft_toml()
    (tmp_path / "prompts.txt").write_text("\n")
    lost = '--train.train_policy.local_reward.reward_fns=[{function = "nowhere.py:red"}]'
    for command in ([], ["check", "--env"]):
        assert main([*command, "--config", str(path), lost]) == 2
        printed = capsys.readouterr().err
        assert f"{tmp_path / 'prompts.txt'}" in printed
        assert "nowhere.py does not exist" in printed
    assert problems(load_config(path)) == []  # a script's own prompts: nobody reads the file


def test_hints_lead_on(
    tmp_path: Path,
    tiny_sd3: Path,
    write_toml: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_sd3").symlink_to(tiny_sd3)
    path = str(write_toml())
    errors = {
        "did you mean ./tiny_sd3?": ["--config", path, "--policy.model_name_or_path=tiny_sdd3"],
        "it is a part of a pipeline, which is tiny_sd3": [
            "--config",
            path,
            "--policy.model_name_or_path=tiny_sd3/transformer",
        ],
        f"did you mean --config {path}?": [path],
        "has no config.toml; give a TOML file or the folder of a run": ["--config", str(tmp_path / "run")],
        'like [{function = "my_reward.py:red"}]': [
            "--config",
            path,
            "--train.train_policy.type=grpo",
            "--train.train_policy.local_reward.reward_fns=my_reward.py:red",
        ],
        "cosmos-rl export": ["sample", str(tmp_path / "run/checkpoints/step_1"), "a dog"],
    }
    (tmp_path / "run/checkpoints/step_1").mkdir(parents=True)
    for hint, command in errors.items():
        assert main(command) == 2, command
        assert hint in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_finds_its_base_under_the_revision_that_it_was_trained_on(
    write_toml: Callable[..., Path], tmp_path: Path, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.trainer_runs import train

    commit, repository = "0" * 40, tmp_path / "hub" / "models--some--model"
    shutil.copytree(tiny_sd3, repository / "snapshots" / commit)
    (repository / "refs" / "diffusers").mkdir(parents=True)
    (repository / "refs" / "diffusers" / "base").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    options = ["--policy.model_name_or_path=some/model", "--policy.model_revision=diffusers/base"]
    run = train(write_toml(), *options, "--train.max_num_steps=1")
    config = json.loads((run / "safetensors/step_1/lora/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/model", "diffusers/base")
    command = ["a dog", "--steps", "2", "--size", "32", "32"]
    assert main(["sample", str(run / "safetensors/step_1"), *command, "--out", str(tmp_path / "adapter")]) == 0
    assert (
        main(["sample", "some/model", "--revision", "diffusers/base", *command, "--out", str(tmp_path / "base")]) == 0
    )
    assert main(["sample", str(tiny_sd3), *command, "--out", str(tmp_path / "local")]) == 0
    adapted, base, local = (pixels(tmp_path / name / "000_a-dog.png") for name in ("adapter", "base", "local"))
    assert base == local != adapted


def test_a_reader_that_has_seen_enough_is_no_error(write_toml: Callable[..., Path]) -> None:
    command = f"{sys.executable} -m cosmos_rl.launcher.cli check --config {write_toml()} | true"
    done = patience.run(["bash", "-c", command])
    assert done.stderr == ""


def captioned(folder: Path, good: int, wrong: bytes, count: int) -> Path:
    folder.mkdir()
    for i in range(good + count):
        Image.new("RGB", (8, 8)).save(folder / f"{i}.png")
        (folder / f"{i}.json").write_bytes(b'\xef\xbb\xbf{"prompt": "a cat"}' if i < good else wrong)
    return folder


def test_a_check_of_the_environment_reads_the_captions(
    tmp_path: Path, write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_toml())
    wrong = captioned(tmp_path / "wrong", 0, b'{"title": "a cat"}', 8)
    some = captioned(tmp_path / "some", 6, b'{"words": "a cat"}', 2)
    for command in (["check", "--env"], []):
        assert main([*command, "--config", path, f"--train.train_policy.dataset.local_dir={wrong}"]) == 2
        message = capsys.readouterr().err
        assert "train.train_policy.dataset.local_dir" in message
        assert "no usable pair" in message
        assert "0.json: has no text under 'prompt'; it has 'title'" in message
    assert main(["check", "--env", "--config", path, f"--train.train_policy.dataset.local_dir={some}"]) == 0
    report = capsys.readouterr().out
    assert "2 files are left out (6 pairs are used)" in report
    assert "7.json: has no text under 'prompt'; it has 'words'" in report


def test_a_check_of_the_environment_says_which_pictures_lose_much(
    tmp_path: Path, write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for i, size in enumerate([(96, 32), (32, 96), (32, 32), (128, 32)]):
        Image.new("RGB", size).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text("a cat")
    path = str(write_toml())
    assert main(["check", "--env", "--config", path, f"--train.train_policy.dataset.local_dir={tmp_path}"]) == 0
    report = capsys.readouterr().out
    assert "warning: 3 of 4 images lose more than a quarter of their area" in report
    assert "3.png loses most, 75%" in report
    assert main(["check", "--env", "--config", path]) == 0
    assert "lose more than a quarter" not in capsys.readouterr().out


def test_modules_of_functions_that_are_not_there_are_refused(
    write_nft_toml: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["check", "--env", "--config", str(write_nft_toml())]
    for key in ("local_reward.reward_fns.0.function", "diversity_features"):
        given = f"--train.train_policy.{key}="
        assert main([*command, f"{given}nowhere.rewards:red"]) == 2
        assert '"nowhere.rewards:red": there is no module nowhere in ' in capsys.readouterr().err
        assert main([*command, f"{given}.rewards:red"]) == 2
        assert '".rewards:red": there is no module .rewards in ' in capsys.readouterr().err
        assert main([*command, f"{given}my_own.py:red"]) == 2
        assert "my_own.py does not exist" in capsys.readouterr().err
        for place in ("numpy:mean", "mine.rewards:red", "__main__:red"):
            (tmp_path / "mine").mkdir(exist_ok=True)
            assert main([*command, given + place]) == 0
