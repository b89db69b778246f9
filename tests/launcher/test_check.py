"""`cosmos-rl check`: errors, arithmetic, sizes and what it says when it cannot know."""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl.launcher.acceptance.length import run_length
from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import load_config
from tests.support.checks import assert_memory_and_disk, check, estimate_and_rise, modules_of_check, sizes
from tests.support.paths import ROOT

Toml = Callable[..., Path]


def test_the_report_says_what_is_trained_in_which_batches_on_what(
    write_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, _ = check(capsys, "--config", write_toml())
    assert code == 0
    for text in (
        'LoRA adapter "default" of',
        "transformer of 288,528 weights",
        "attn.to_q: 2 layers",
        "4 samples per step = 1 x 4",
        "a rank takes its 4 in 2 micro-batches of 2",
        "12 captions in",
        "3 steps per epoch x 100 epochs = 300 steps",
        "train.max_num_steps ends the run after 6 steps",
        "optimizer state",
        "one checkpoint",
        "holds no earlier run to read it from",
        "policy.lora.r = 4",
    ):
        assert text in report, text


def test_all_errors_are_in_one_report(write_toml: Toml, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_toml("[validation]\nenable = true\nfrequency = 3")
    code, report, errors = check(capsys, "--config", path, "--train.train_policy.mini_batch=3", "--train.optm_lr=-1.0")
    assert (code, report) == (2, "")
    for key in ("validation.frequency", "validation.dataset.local_dir", "mini_batch", "train.optm_lr"):
        assert key in errors


def test_it_never_imports_torch(write_toml: Toml) -> None:
    assert modules_of_check(write_toml()) & {"torch", "diffusers"} == set()


@pytest.mark.parametrize(
    ("lora", "options"),
    [
        (True, []),
        (True, ["--policy.lora.target_modules=all-linear"]),
        (True, ['--policy.lora.r_pattern={"attn.to_q" = 7, "transformer_blocks.0.attn.to_k" = 2}']),
        (True, ['--policy.lora.lora_names=["default", "old"]', '--policy.lora.target_modules=["proj", "to_q"]']),
        (False, []),
        (False, ['--policy.freeze_pattern=["^transformer_blocks\\\\.0\\\\."]']),
        (False, ['--policy.trainable_pattern=["attn"]']),
        (False, ['--policy.trainable_map={"." = false, "norm" = true}']),
    ],
)
def test_the_number_of_trained_weights_is_the_trainers(write_toml: Toml, lora: bool, options: list[str]) -> None:
    from cosmos_rl.policy.model.base import ModelRegistry

    config, files = sizes(write_toml(lora=lora), *options)
    selection = files.selection
    model = ModelRegistry.build_diffusers_model(config)
    assert selection.trained == sum(p.numel() for p in model.trainable_parameters().values())
    adapters = sum(p.numel() for name, p in model.transformer.named_parameters() if ".lora_" in name)
    assert selection.spare_adapters == (adapters - selection.trained if lora else 0)


def test_a_target_that_matches_nothing_is_refused_with_the_nearest(
    write_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = check(capsys, "--config", write_toml(), '--policy.lora.target_modules=["attn.to_qq"]')
    assert code == 2
    assert "'attn.to_qq' matches no layer of the transformer; did you mean 'attn.to_q'?" in errors


RECIPES = [path for path in sorted((ROOT / "configs").glob("*/*.toml")) if not path.is_symlink()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_checked_without_its_model(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report, _ = check(capsys, "--config", recipe)
    assert code == 0
    assert "is not in the hub cache" in report
    assert ("--revision diffusers/base/post-trained` fetches it" in report) == ("cosmos-predict2-5" in recipe.stem)
    assert "unknown, as the sizes are" in report


def test_a_model_in_the_hub_cache_is_looked_into(
    write_toml: Toml,
    tmp_path: Path,
    tiny_sd3: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit, repository = "0" * 40, tmp_path / "hub" / "models--some--model"
    shutil.copytree(tiny_sd3, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    code, report, _ = check(capsys, "--config", write_toml(), "--policy.model_name_or_path=some/model", "--env")
    assert code == 0
    assert "transformer of 288,528 weights" in report


def test_the_environment_is_looked_at_only_when_asked(write_toml: Toml, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "--config",
        write_toml(),
        "--policy.model_name_or_path=some/model",
        "--train.train_policy.dataset.local_dir=no",
    ]
    code, report, errors = check(capsys, *argv)
    assert (code, errors) == (0, "")
    assert "some/model is not in the hub cache" in report
    assert "number of samples and steps: unknown (no is not there); at most 6" in report
    code, report, errors = check(capsys, *argv, "--env")
    assert code == 2
    assert "Environment GPU: " in report
    assert "free disk for train.output_dir" in report
    assert "does not exist" in errors
    assert "HF_HUB_OFFLINE is set" in errors


def test_too_little_disk_for_one_checkpoint_is_refused(
    write_toml: Toml, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmos_rl.launcher.machine.free_disk", lambda path: 1000)
    code, _, errors = check(capsys, "--config", write_toml(), "--env")
    assert code == 2
    assert "train.output_dir: 1 kB free, one checkpoint and its export need" in errors


@pytest.mark.parametrize(("most", "steps", "text"), [(5, 5, "max_num_steps ends"), (100, 24, "train.epoch ends")])
def test_the_limit_that_ends_the_run_is_named(
    write_toml: Toml, capsys: pytest.CaptureFixture[str], most: int, steps: int, text: str
) -> None:
    options = ["--train.train_batch_per_replica=1", "--train.train_policy.mini_batch=1", "--train.epoch=2"]
    path = write_toml()
    config = load_config(path, [*options, f"--train.max_num_steps={most}"])
    assert run_length(config, own_data=False).steps == steps
    assert text in check(capsys, "--config", path, *options, f"--train.max_num_steps={most}")[1]


def test_held_out_samples_and_incomplete_batches_count_as_in_training(write_toml: Toml) -> None:
    extra = "[validation]\nenable = true"
    path = write_toml(extra, train="")
    options = ["--train.train_policy.dataset.test_size=0.25", "--train.max_num_steps=none", "--train.epoch=2"]
    dropped = run_length(load_config(path, options), own_data=False)
    assert (dropped.samples, dropped.held_out, dropped.steps) == (12, 3, 4)
    kept = run_length(load_config(path, [*options, "--train.train_policy.dataloader_drop_last=false"]), own_data=False)
    assert kept.steps == 6


def test_a_batch_larger_than_the_data_is_refused(write_toml: Toml, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = check(capsys, "--config", write_toml(), "--train.train_batch_per_replica=14")
    assert code == 2
    assert "12 captions, 0 of them held out, make no whole step of 14 samples" in errors


def test_preferences_that_cannot_be_counted_are_not_too_few(
    write_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    dpo = ["--config", write_toml(), "--train.train_policy.type=dpo", "--train.train_policy.trainer_type=dpo"]
    code, report, errors = check(capsys, *dpo)
    assert (code, errors) == (0, "")
    assert "unknown" in report
    assert "has no rejected_dir" in report
    table = write_toml(name="preferences.jsonl")
    table.write_text('{"prompt": "a cat", "chosen": "a.png", "rejected": "b.png"}\n', encoding="utf-8")
    for name in ("a.png", "b.png"):
        (table.parent / name).touch()
    code, _, errors = check(capsys, *dpo, f"--train.train_policy.dataset.local_dir={table}")
    assert code == 2
    assert "1 preferences, 0 of them held out, make no whole step of 4 samples" in errors


def test_the_whole_configuration_can_be_printed_and_read_again(
    write_toml: Toml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--toml", "--config", str(write_toml()), "--train.seed=7", "--nproc-per-node", "2"]) == 0
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    again = load_config(tmp_path / "again.toml")
    assert (again.train.seed, again.policy.parallelism.dp_shard_size) == (7, 2)


def test_the_time_of_a_step_is_read_from_an_earlier_run(
    write_toml: Toml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "out" / "20250102030405"
    (run / "checkpoints").mkdir(parents=True)
    rows = [{"step": step, "time/iteration": seconds} for step, seconds in enumerate([9.0, 2.0, 2.0, 2.5])]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"2.25 s, the median of the last 4 steps of {run}" in check(capsys, "--config", write_toml())[1]


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]"])
def test_broken_weights_make_sizes_unknown(
    write_toml: Toml, tmp_path: Path, tiny_sd3: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    broken = shutil.copytree(tiny_sd3, tmp_path / "broken")
    (broken / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(content)
    code, report, _ = check(capsys, "--config", write_toml(), f"--policy.model_name_or_path={broken}")
    assert code == 0
    assert "sizes: unknown" in report
    assert "is not a whole safetensors file" in report


def test_an_unknown_transformer_leaves_out_its_activations_only(
    write_toml: Toml, tmp_path: Path, tiny_sd3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(tiny_sd3, tmp_path / "other")
    for path, old, new in (
        (other / "model_index.json", "StableDiffusion3Pipeline", "MyPipeline"),
        (other / "transformer" / "config.json", '"patch_size"', '"my_patch_size"'),
    ):
        path.write_text(path.read_text().replace(old, new))
    code, report, _ = check(capsys, "--config", write_toml(), f"--policy.model_name_or_path={other}")
    assert code == 0
    assert "no model is registered for MyPipeline" in report
    why = "the configuration of SD3Transformer2DModel has no whole number patch_size"
    how = f"measure it with `cosmos-rl check-model {other}`"
    assert f"latents and tokens: unknown ({why}; {how})" in report
    assert f"unknown and left out: activations of the transformer ({why}; {how})" in report
    assert "trained weights" in report


@pytest.mark.parametrize("shards", [1, 4])
def test_trained_state_is_sixteen_bytes_a_weight_over_the_shards(write_toml: Toml, shards: int) -> None:
    options = [f"--policy.parallelism.dp_shard_size={shards}", "--train.param_dtype=bfloat16"]
    config, files = sizes(write_toml(lora=False), *options)
    found = estimate.memory(config, files, on_cpu=False, saves=1)
    state = sum(found.parts[name] for name in ("trained weights", "gradients", "optimizer state"))
    assert math.isclose(state, 16 * files.selection.trained / shards, rel_tol=1e-6)
    assert found.phases["forward and backward"] > state


@pytest.mark.parametrize(("samples", "copies"), [(1, 0), (2, 1), (3, 1), (8, 3)])
def test_sums_that_wait_for_others_are_counted(write_toml: Toml, samples: int, copies: int) -> None:
    """Before the last of 8 samples of a rank there are the sums of 4, 2 and 1 of them."""
    total = f"--train.global_batch_size={2 * samples}"
    options = [total, "--train.train_policy.mini_batch=1", "--policy.parallelism.dp_shard_size=2"]
    config, files = sizes(write_toml(lora=False), *options)
    bare = estimate.memory(config, files, on_cpu=False, saves=1).phases
    invariant = ("--train.rank_invariant=true", "--train.optm_impl=for-loop")
    config, files = sizes(write_toml(lora=False), *options, *invariant)
    found = estimate.memory(config, files, on_cpu=False, saves=1)
    rise = found.phases["forward and backward"] - bare["forward and backward"]
    assert rise == copies * found.parts["gradients"]


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ((), 2 + 1),  # 4 samples of a rank at 2 noise levels
        (("--train.train_policy.batch_size_per_optimize=2",), 1 + 1),
        (("--train.train_policy.learnt_share=0.5", "--policy.diffusers.timesteps_fraction=1.0"), 1 + 2),
        (('--train.train_policy.data_term={beta = 0.5, local_dir = "pairs", batch_size = 32}',), 4 + 1),
        (
            ('--train.train_policy.data_term={beta = 0.5, local_dir = "pairs", batch_size = 32, per_step = true}',),
            5 + 1,
        ),
    ],
)
def test_sums_that_wait_in_reinforcement_learning_are_counted(
    write_nft_toml: Toml, options: tuple[str, ...], copies: int
) -> None:
    invariant = ("--train.rank_invariant=true", "--train.optm_impl=for-loop", "--train.train_policy.mini_batch=1")
    options = (*options, "--policy.parallelism.dp_shard_size=2", "--train.train_policy.mini_batch=1")
    one_by_one = "--rollout.n_generation_mini_batch=1"
    phases = []
    for own in ((one_by_one,), invariant):
        config, files = sizes(write_nft_toml(lora=False), *options, *own)
        found = estimate.memory(config, files, on_cpu=False, saves=1)
        phases.append(found.phases["forward and backward"])
    assert phases[1] - phases[0] == copies * found.parts["gradients"]


def test_offloaded_encoders_rest_in_host_memory(write_toml: Toml) -> None:
    config, files = sizes(write_toml())
    offloaded = estimate.memory(config, files, on_cpu=False, saves=1)
    config, files = sizes(write_toml(), "--policy.diffusers.offload=false")
    resident = estimate.memory(config, files, on_cpu=False, saves=1)
    frozen = sum(resident.parts[name] for name in ("text encoders and other frozen parts", "VAE"))
    assert resident.phases["optimiser step"] - offloaded.phases["optimiser step"] == frozen
    assert offloaded.host - resident.host == frozen


CACHE = "--train.train_policy.cache.text=true"


def test_encoders_take_turns_with_each_other_and_with_a_cache_of_texts_with_the_transformer(
    write_toml: Toml,
) -> None:
    options = ["--policy.diffusers.inference_size=[8, 8]"]  # so that media take less than texts
    config, files = sizes(write_toml(), *options)
    each = [4 * files.pipeline.count(f"text_encoder{number}") for number in ("", "_2", "_3")]
    without = estimate.memory(config, files, on_cpu=False, saves=1)
    between = without.phases["export"]
    media = without.parts["VAE"] + 4 * 4 * 64 * files.pipeline.configs["vae"]["block_out_channels"][0] * 2
    assert without.phases["encoding"] == between + max(*each, media)
    config, files = sizes(write_toml(), *options, CACHE)
    cached = estimate.memory(config, files, on_cpu=False, saves=1)
    transformer = sum(cached.parts[name] for name in ("trained weights", "frozen transformer weights"))
    assert cached.phases["encoding"] == between + max(sum(each) - transformer, media)
    config, files = sizes(write_toml(), *options, CACHE, "--policy.parallelism.dp_shard_size=2")
    sharded = estimate.memory(config, files, on_cpu=False, saves=1)
    shards = sum(sharded.parts[name] for name in ("trained weights", "frozen transformer weights"))
    assert shards < transformer
    assert sharded.phases["encoding"] == sharded.phases["export"] + max(sum(each) - shards, media)
    config, files = sizes(write_toml(), *options, CACHE, "--policy.parallelism.dp_replicate_size=2")
    replicated = estimate.memory(config, files, on_cpu=False, saves=1)
    assert replicated.phases["encoding"] == between + max(sum(each) - transformer, media)


def test_text_encoders_that_come_by_block_count_their_largest_block_next_to_the_transformer(write_toml: Toml) -> None:
    options = ["--policy.diffusers.inference_size=[8, 8]", "--train.train_policy.mini_batch=1"]
    by_block = [*options, "--policy.diffusers.offload_text_blocks=true"]
    config, files = sizes(write_toml(), *by_block)
    encoders = [files.pipeline.parts[f"text_encoder{number}"] for number in ("", "_2", "_3")]
    blocks = [Counter[str]() for _ in encoders]
    for found, shapes in zip(blocks, encoders, strict=True):
        for name, shape in shapes.items():
            found[re.sub(r"(\.\d+)\..*", r"\1", name)] += math.prod(shape)
    largest, whole = 4 * max(max(found.values()) for found in blocks), 4 * sum(found.total() for found in blocks)
    media = 4 * 4 * 64 * files.pipeline.configs["vae"]["block_out_channels"][0]
    for cache in ([], [CACHE]):  # the transformer stays where texts are encoded first, too
        config, files = sizes(write_toml(), *by_block, *cache)
        found = estimate.memory(config, files, on_cpu=False, saves=1)
        assert found.phases["encoding"] == found.phases["export"] + max(largest, media + found.parts["VAE"])
        assert sum(found.at_peak.values()) == found.peak
    resident = "--policy.diffusers.offload=false"
    config, files = sizes(write_toml(), *by_block, resident)
    found = estimate.memory(config, files, on_cpu=False, saves=1)
    config, files = sizes(write_toml(), *options, resident)
    plain = estimate.memory(config, files, on_cpu=False, saves=1)
    assert plain.phases["export"] - found.phases["export"] == whole == found.host - plain.host
    assert found.phases["encoding"] == found.phases["export"] + max(largest, media)
    assert sum(found.at_peak.values()) == found.peak
    on_cpu = [
        estimate.memory(sizes(write_toml(), *given)[0], files, on_cpu=True, saves=1) for given in (options, by_block)
    ]
    assert on_cpu[0] == on_cpu[1]


LORA_OF_ALL = ["--policy.lora.r=64", "--policy.lora.target_modules=all-linear"]


FEW_SAMPLES = ["--train.max_num_steps=3", "--train.train_batch_per_replica=2", "--train.train_policy.mini_batch=1"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("preset", "options"),
    [
        pytest.param((4, 8, 48), ["--policy.lora=none", "--train.ema_enable=true"], id="20M-full-ema"),
        pytest.param((5, 7, 64), ["--policy.lora=none", "--train.ckpt.save_freq=1"], id="35M-full"),
        pytest.param((6, 10, 64), LORA_OF_ALL, id="85M-lora"),
    ],
)
def test_the_estimate_of_memory_and_disk_is_within_15_percent(
    write_toml: Toml, tmp_path: Path, preset: tuple[int, int, int], options: list[str]
) -> None:
    expected, on_disk, measured = estimate_and_rise(write_toml(), tmp_path / "model", preset, FEW_SAMPLES + options)
    assert_memory_and_disk(expected, on_disk, measured, tmp_path / "out", step=3)


def test_check_takes_a_whole_training_command(
    write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config, here = str(write_toml()), "127.0.0.1;127.0.0.1"
    flags = ["--log-dir", "logs", "--max-restarts", "3", "--debug", "--nproc-per-node", "2", "--train.seed", "7"]
    flags += ["--train.train_batch_per_replica", "2"]
    flags += ["--num-workers", "2", "--worker-idx", "1", "--node-ip-list", here, "--rdzv-port", "4"]
    script = ["cosmos_rl.tools.dataset.diffusers_dataset", "--own", "1"]
    code, report, errors = check(capsys, *flags, "--config", config, *script)
    assert (code, errors) == (0, "")
    assert "4 ranks: dp_shard_size 4 2 on each of 2 nodes" in report
    assert "train.seed = 7" in report
    assert check(capsys, *flags, "--config", config, "--worker-idx", "2")[0] == 2
    assert not Path("logs").exists()


def test_an_optimiser_that_is_not_installed_here_is_a_note(
    write_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run may be meant for another machine; `check --env` and a launch refuse it."""
    options = ["--config", str(write_toml()), "--train.optm_name=nowhere.Lion"]
    assert main(["check", *options]) == 0
    _, notes = " ".join(capsys.readouterr().out.split()).split(" Notes ")
    assert 'train.optm_name: found "nowhere.Lion"; there is no module nowhere here' in notes
    assert main(["check", "--env", *options]) == 2
