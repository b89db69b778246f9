"""Names, rates and schedules of optimisers in the configuration."""

from pathlib import Path

import pytest

from cosmos_rl.policy.config import ConfigError, load_config, notes
from cosmos_rl.policy.trainer.same_run import collect_settings


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[policy]\nmodel_name_or_path = "model"\nis_diffusers = true\n[train]\noutput_dir = "out"\n')
    return path


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("optm_name", "prodigy", "Prodigy"),
        ("optm_name", "adamw8bit", "AdamW8bit"),
        ("optm_name", "schedule_free", "AdamWScheduleFree"),
        ("optm_decay_type", "constant", "none"),
        ("optm_decay_type", "cosine_restarts", "cosine_with_restarts"),
        ("param_dtype", "bf16", None),
        ("param_dtype", "bfloat", "bfloat16"),
    ],
)
def test_the_nearest_name_is_suggested(toml: Path, key: str, value: str, near: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(toml, [f"train.{key}={value}"])
    assert f'train.{key}: found "{value}"; allowed: one of' in str(caught.value)
    assert ("did you mean" in str(caught.value)) == (near is not None)
    assert near is None or f'; did you mean "{near}"?' in str(caught.value)


@pytest.mark.parametrize(
    ("options", "remark"),
    [
        (["train.optm_name=Prodigy", "train.optm_lr=1e-4"], "warning: train.optm_lr = 0.0001 with Prodigy"),
        (["train.optm_lr=1.0"], "warning: train.optm_lr = 1.0 with AdamW"),
        (["train.optm_lr={global=1e-4, '^x'=0.1}"], "warning: train.optm_lr = 0.1 with AdamW"),
        (["train.optm_name=Prodigy", "train.optm_lr=1.0"], None),
        (["train.optm_name=Adafactor", "train.optm_lr=0.1"], None),
        (["train.optm_name=Adafactor", "train.optm_lr=1e-3"], None),
        (["train.optm_name=Adafactor", "train.optm_lr=1e-4"], "warning: train.optm_lr = 0.0001 with Adafactor, of"),
        (["train.optm_name=schedulefree.SGDScheduleFree", "train.optm_decay_type=cosine"], "train.optm_decay_type"),
    ],
)
def test_a_rate_or_schedule_for_another_optimiser_is_remarked(
    toml: Path, options: list[str], remark: str | None
) -> None:
    found = notes(load_config(toml, options))
    assert [note[: len(remark or "")] for note in found] == ([] if remark is None else [remark])


def test_a_class_that_is_untried_on_parts_of_weights_is_refused_with_several_ranks(toml: Path) -> None:
    options = ["train.optm_name=torch.optim.NAdam", "policy.parallelism.dp_replicate_size=2"]
    refusal = (
        r'train.optm_name: found "torch.optim.NAdam" with policy.parallelism.dp_shard_size = 2, on whose parts of the '
        "weights it may be wrong; allowed: .*Prodigy, or .*dp_replicate_size = 4, where"
    )
    with pytest.raises(ConfigError, match=refusal):
        load_config(toml, [*options, "policy.parallelism.dp_shard_size=2"])
    assert load_config(toml, [*options, "policy.parallelism.dp_shard_size=1"]).train.optm_name == "torch.optim.NAdam"
    peers = [*options, "policy.parallelism.dp_shard_size=1", "policy.parallelism.cp_size=2"]
    refusal = (
        r'found "torch.optim.NAdam" with policy.parallelism.cp_size = 2 .weights.*= 1 and cp_size = 1 with '
        "dp_replicate_size = 4"
    )
    with pytest.raises(ConfigError, match=refusal):
        load_config(toml, peers)


@pytest.mark.parametrize("name", ["torch.optim.Adafactor", "Prodigy"])
@pytest.mark.parametrize("ranks", ["dp_shard_size=4", "cp_size=2"])
def test_adafactor_and_prodigy_are_accepted_on_parts_of_weights(toml: Path, name: str, ranks: str) -> None:
    config = load_config(toml, [f"train.optm_name={name}", f"policy.parallelism.{ranks}"])
    assert config.train.optm_name == name


def test_slices_of_prodigy_are_refused_on_parts_of_weights(toml: Path) -> None:
    options = ["train.optm_name=prodigyopt.Prodigy", "train.optm_kwargs.slice_p=11"]
    refusal = (
        "train.optm_kwargs.slice_p: found 11 with policy.parallelism.dp_shard_size = 2; allowed: 1 there, as parts"
    )
    with pytest.raises(ConfigError, match=refusal):
        load_config(toml, [*options, "policy.parallelism.dp_shard_size=2"])
    replicas = ["policy.parallelism.dp_shard_size=1", "policy.parallelism.dp_replicate_size=2"]
    assert load_config(toml, [*options, *replicas]).train.optm_kwargs == {"slice_p": 11}
    parts = ["train.optm_kwargs.slice_p=1.0", "policy.parallelism.dp_shard_size=2"]
    assert load_config(toml, [options[0], *parts]).train.optm_kwargs == {"slice_p": 1.0}


def test_a_warm_up_that_is_longer_than_the_run_is_remarked_and_its_change_shows_in_a_resume(toml: Path) -> None:
    def remarks(*options: str) -> list[str]:
        return [line for line in notes(load_config(toml, options)) if "warmup" in line]

    [line] = remarks("train.max_num_steps=5")
    assert line.startswith("train.optm_warmup_steps = 20 is more than train.max_num_steps = 5 and is cut ")
    for options in (["20"], ["5", "train.optm_warmup_steps=5"], ["5", "train.optm_warmup_steps=1.0"]):
        assert remarks(f"train.max_num_steps={options[0]}", *options[1:]) == []
    short, long = (collect_settings(load_config(toml), steps)["steps of the warm-up"] for steps in (5, 40))
    assert (short, long) == (5, 20)
