"""The configuration: defaults, overrides, and one report of everything that is wrong."""

import contextlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import (
    Config,
    ConfigError,
    dump_toml,
    load_config,
)
from cosmos_rl.policy.config.aliases import PRESENT_NAMES
from cosmos_rl.policy.config.base import Support
from cosmos_rl.policy.config.keys import dotted_keys, find_field, list_branches, read_support


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [re.sub(r" \(from --.*\)$", "", line) for line in caught.value.problems]


def test_the_defaults_are_valid_and_say_what_the_design_says() -> None:
    config = Config()
    assert config.train.compile is False
    assert config.policy.parallelism.tp_size == 1
    assert config.train.train_policy.mini_batch == 1
    assert config.train.ckpt.enable_checkpoint is True
    assert config.policy.lora is None
    assert config.model_json_schema()["properties"]["train"]


def test_every_key_explains_itself() -> None:
    silent = [
        key for key in dotted_keys(Config) if not (find_field(Config, key.split(".")) or pytest.fail(key)).description
    ]
    assert silent == []


def test_a_loaded_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().train.epoch = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_the_configuration_imports_no_torch_and_nothing_heavy() -> None:
    code = (
        "import sys, cosmos_rl.policy.config; print([m for m in ('torch', 'numpy', 'diffusers') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("--train.epoch=3", lambda c: c.train.epoch == 3),
        ("train.optm_lr=1e-4", lambda c: c.train.optm_lr == 1e-4),
        ("--train.optm_lr=.5", lambda c: c.train.optm_lr == 0.5),
        ("--policy.is_diffusers=True", lambda c: c.policy.is_diffusers is True),
        ("--train.output_dir=a = b/c d", lambda c: c.train.output_dir == "a = b/c d"),
        ('--train.output_dir="quoted"', lambda c: c.train.output_dir == "quoted"),
        ("--policy.model_name_or_path=2025", lambda c: c.policy.model_name_or_path == "2025"),
        ("--policy.model_name_or_path=true", lambda c: c.policy.model_name_or_path == "true"),
        ("--policy.model_name_or_path=2025-01-01", lambda c: c.policy.model_name_or_path == "2025-01-01"),
        ("--train.timestamp=20250101000000", lambda c: c.train.timestamp == "20250101000000"),
        ("--train.resume=true", lambda c: c.train.resume is True),
        ("--train.resume=some/path", lambda c: c.train.resume == "some/path"),
        ("--policy.lora.r=4", lambda c: c.policy.lora.r == 4 and c.policy.lora.lora_alpha == 8.0),
        ('--policy.lora.target_modules=["a","b"]', lambda c: c.policy.lora.target_modules == ("a", "b")),
        ("--policy.lora={r=2}", lambda c: c.policy.lora.r == 2),
        ("--policy.diffusers.inference_size=[32, 64]", lambda c: c.policy.diffusers.inference_size == (32, 64)),
        ("--train.max_num_steps=none", lambda c: c.train.max_num_steps is None),
        ("--mode=colocated", lambda c: c.mode == "colocated"),
        ("--custom.mine.deep=[1,{a=2}]", lambda c: c.custom == {"mine": {"deep": [1, {"a": 2}]}}),
        ('--logging.logger=["WandB"]', lambda c: c.logging.logger == ("wandb",)),
        ("--logging.experiment_name=None", lambda c: c.logging.experiment_name is None),
        ("--train.seed=0", lambda c: c.train.seed == 0),
    ],
)
def test_an_override_means_what_it_looks_like(
    toml: Callable[..., Path], override: str, read: Callable[[Any], bool]
) -> None:
    assert read(load_config(toml(), [override]))


def test_overrides_reach_into_lists_and_clear_tables(toml: Callable[..., Path]) -> None:
    tables = "[policy.diffusers]\ninference_size = [64, 64]\n[policy.lora]\nr = 4\n[custom]\nlist = [{}, {a = 2}]\n"
    path = toml(more=tables)
    config = load_config(path, ["--policy.diffusers.inference_size.1=32", "--policy.lora=none", "--custom.list.1.a=5"])
    assert config.policy.diffusers.inference_size == (64, 32)
    assert config.policy.lora is None
    assert config.custom["list"] == [{}, {"a": 5}]


def test_later_overrides_win(toml: Callable[..., Path]) -> None:
    assert load_config(toml(), ["--train.epoch=2", "--train.epoch=3"]).train.epoch == 3


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("--train.ckpt.save_frequency=5", "train.ckpt.save_frequency: unknown key; did you mean train.ckpt.save_freq?"),
        ("--policy.optm_lr=1e-4", "policy.optm_lr: unknown key; did you mean train.optm_lr?"),
        ("--train.optm_Lr=1e-5", "train.optm_Lr: unknown key; did you mean train.optm_lr?"),
        ("--train.save_freq=5", "train.save_freq: unknown key; did you mean train.ckpt.save_freq?"),
        ("--policy.lor.r=5", "policy.lor: unknown key; did you mean policy.lora?"),
        ("--trian.epoch=5", "trian: unknown key; did you mean train?"),
        ("--diffusers.dtype=float32", "diffusers: unknown key; did you mean policy.diffusers?"),
        ("--validation.local_dir=x", "validation.local_dir: unknown key; did you mean validation.dataset.local_dir?"),
        ("--train.epoch=0", "train.epoch: found 0; allowed: a whole number > 0"),
        ("--train.epoch=true", "train.epoch: found true; allowed: a whole number > 0"),
        ("--train.epsilon=fast", 'train.epsilon: found "fast"; allowed: a number > 0'),
        ("--train.epsilon=nan", "train.epsilon: found NaN; allowed: a number > 0"),
        (
            "--train.optm_lr=0.0",
            "train.optm_lr: found 0.0; allowed: a number > 0, alone or in a list, or a table of them",
        ),
        (
            "--train.optm_lr=[1e-4,1e-5]",
            "train.optm_lr: found [0.0001, 1e-05]; allowed: a number > 0, alone or in a list, or a table of them",
        ),
        ("--train.ckpt.upload_s3=some", 'train.ckpt.upload_s3: found "some"; allowed: one of false, "final", "all"'),
        (
            '--policy.freeze_pattern=["("]',
            'policy.freeze_pattern: found ["("]; allowed: a list of values, each a regular expression',
        ),
        ("--train.train_policy.type=kto", 'train.train_policy.type: found "kto"; allowed: "sft" or "dpo" or "grpo"'),
        (
            '--train.train_policy={type="sft",kl_beta=1.0}',
            'train.train_policy.kl_beta: belongs to type = "grpo"; here is type = "sft"',
        ),
        ("--train.ckpt.save_mode=later", 'train.ckpt.save_mode: found "later"; allowed: one of "async", "sync"'),
        ("--train=3", "train: found 3; allowed: a table"),
        ("--train.epoch.x=3", "train.epoch: found 2, which has no keys, so train.epoch.x cannot be set (line 7)"),
        ("--train.optm_betas.2=3", "train.optm_betas: has no item 2; it holds 2 items, counted from 0 (line 8)"),
        ("--train.epoch", "--train.epoch: not an override; write --train.epoch=VALUE"),
    ],
)
def test_a_slip_is_named_with_what_is_allowed(toml: Callable[..., Path], override: str, line: str) -> None:
    path = toml(more="epoch = 2\noptm_betas = [0.9, 0.99]\n")
    assert problems_of(path, override) == [line]


@pytest.mark.parametrize("key", ["train.bogus", "train.train_policy.bogus", "bogus"])
def test_an_unknown_key_without_a_near_name_lists_the_known_ones(toml: Callable[..., Path], key: str) -> None:
    [line] = problems_of(toml(), f"--{key}=1")
    assert line.startswith(f"{key}: unknown key; known")


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["train.train_policy.mini_batch=3"], "train.train_policy.mini_batch: found 3"),
        (["train.global_batch_size=8", "train.train_policy.mini_batch=3"], "train.train_policy.mini_batch: found 3"),
        (["train.global_batch_size=7", "policy.parallelism.dp_shard_size=2"], "train.global_batch_size: found 7"),
        (["validation.enable=true"], "validation.dataset.local_dir: missing"),
        (["policy.lora.primary_adapter=x"], 'policy.lora.primary_adapter: found "x"'),
        (['policy.lora.lora_names=["a","a"]'], "policy.lora.lora_names: found"),
        (["policy.lora.target_modules=[]"], "policy.lora.target_modules: found []"),
        (["policy.diffusers.inference_size=[60, 64]"], "policy.diffusers.inference_size: found [60, 64]"),
        (["policy.parallelism.dp_shard_size=0"], "policy.parallelism.dp_shard_size: found 0"),
        (["train.optm_lr={'to_q'=1e-4}"], "train.optm_lr.global: missing"),
        (["train.ckpt.upload_hf=true"], "train.ckpt.hf_repo_name: missing"),
        (["train.ckpt.upload_s3=all"], "train.ckpt.s3_bucket: missing"),
        (["policy.freeze_pattern=['a']", "policy.trainable_pattern=['b']"], "policy.trainable_pattern: given together"),
        (
            ["policy.freeze_pattern=['a']", "policy.lora.r=1"],
            "policy.freeze_pattern: given together with [policy.lora]",
        ),
        (["train.train_policy.dataloader_prefetch_factor=2"], "train.train_policy.dataloader_prefetch_factor: found 2"),
        (["train.ckpt.max_keep=0"], "train.ckpt.max_keep: found 0"),
        (["train.ckpt.max_keep=-2"], "train.ckpt.max_keep: found -2"),
        (["train.optm_warmup_steps=0.6", "train.optm_decay_ratio=0.5"], "train.optm_warmup_steps: found 0.6"),
        (
            ["train.max_num_steps=10", "train.optm_warmup_steps=6", "train.optm_decay_ratio=0.5"],
            "train.optm_warmup_steps",
        ),
        (["train.ema_decay=1.0"], "train.ema_decay: found 1.0"),
        (["train.optm_betas=[1.0, 0.9]"], "train.optm_betas: found [1.0, 0.9]"),
        (["train.optm_num_cycles=2"], "train.optm_num_cycles: found 2; allowed: 1, or with"),
        (["train.optm_name=Prodigy", "train.optm_lr={global=1.0, '^x'=1e-5}"], "train.optm_lr: found a table"),
        (["train.optm_warmup_steps=1.5"], "train.optm_warmup_steps: found 1.5"),
        (["policy.model_name_or_path="], "policy.model_name_or_path: missing"),
    ],
)
def test_a_broken_rule_is_one_line_that_starts_with_its_key(
    toml: Callable[..., Path], overrides: list[str], start: str
) -> None:
    [line] = problems_of(toml(), *overrides)
    assert line.startswith(start)


def test_all_problems_come_in_one_report(toml: Callable[..., Path]) -> None:
    path = toml(more="epoch = 0\nbogus = 1\n[train.train_policy]\nmini_batch = 3\n")
    lines = problems_of(path, "--validation.enable=true", "nonsense")
    assert [line.split(":")[0] for line in lines] == [
        "nonsense",
        "train.epoch",
        "train.bogus",
        "train.train_policy.mini_batch",
        "validation.dataset.local_dir",
    ]


def test_a_rule_stays_silent_about_a_value_that_was_rejected_already(toml: Callable[..., Path]) -> None:
    [line] = problems_of(toml(), "--train.train_batch_per_replica=no", "--train.train_policy.mini_batch=3")
    assert line.startswith("train.train_batch_per_replica: found")


def test_wrong_toml_names_file_and_line(toml: Callable[..., Path]) -> None:
    path = toml(more="epoch = \n")
    with pytest.raises(UserError, match=r"run\.toml: not valid TOML.*line 7"):
        load_config(path)
    path.write_bytes("[train]\n".encode("utf-16-le"))
    with pytest.raises(UserError, match=r"run\.toml: has null characters, as UTF-16 without a byte order mark; save"):
        load_config(path)
    path.write_bytes("[train]\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"run\.toml: is not UTF-8 text but UTF-16; save it as UTF-8$"):
        load_config(path)


def test_a_problem_in_the_file_names_its_line(toml: Callable[..., Path]) -> None:
    path = toml(
        more="epoch = 0 # none\n[train.ckpt]\n'save_freq'= 0\n[policy.lor]\nr = 1\n[validation]\nenable = true\n"
    )
    assert problems_of(path, "--train.seed=-1") == [
        "policy.lor: unknown key; did you mean policy.lora? (line 10)",
        "train.epoch: found 0; allowed: a whole number > 0 (line 7)",
        "train.seed: found -1; allowed: a whole number >= 0",
        "train.ckpt.save_freq: found 0; allowed: a whole number > 0 (line 9)",
        "validation.dataset.local_dir: missing; allowed with validation.enable = true: a folder of pairs or a .json "
        "file of prompts, any word where the script passes its own val_dataset (or hold out training samples with "
        "train.train_policy.dataset.test_size)",
    ]


def test_an_overridden_value_is_not_blamed_on_the_file(toml: Callable[..., Path]) -> None:
    def report(*overrides):
        with pytest.raises(ConfigError) as caught:
            load_config(toml(more="epoch = 1\n"), overrides)
        return str(caught.value).splitlines()

    assert report("--train.epoch=0") == [
        "1 problem in the command line:",
        "  train.epoch: found 0; allowed: a whole number > 0 (from --train.epoch=0)",
    ]
    table = "--train.ckpt={save_freq=0}"
    assert report(table)[1].endswith(f"train.ckpt.save_freq: found 0; allowed: a whole number > 0 (from {table})")
    heading, seed, missing = report("--train.seed=-1", "--validation.enable=true")
    assert re.fullmatch("2 problems in .*run.toml and the command line:", heading)
    assert seed.endswith("(from --train.seed=-1)")
    assert "(from" not in missing


def test_an_override_without_a_value_says_what_to_write(toml: Callable[..., Path]) -> None:
    assert problems_of(toml(), "--train.epch") == ["--train.epch: not an override; write --train.epoch=VALUE"]
    assert problems_of(toml(), "nonsense") == ["nonsense: not an override; write --table.key=VALUE"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml: no such file"):
        load_config(tmp_path / "none.toml")


def test_a_run_folder_stands_for_its_configuration(toml: Callable[..., Path], tmp_path: Path) -> None:
    config = load_config(toml())
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(tmp_path) == config


def test_from_dict_reads_what_toml_reads_and_names_every_problem() -> None:
    assert Config.from_dict({"train": {"epoch": 2}, "custom": {"any": [1]}}).train.epoch == 2
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"train": {"epoch": 0, "x": 1}})
    assert len(caught.value.problems) == 2


def test_old_names_are_read_with_one_warning_each(
    toml: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmos_rl.policy.config.aliases._warned", set())
    path = toml(more="enable_validation = false\nvalidation_step = 7\n[policy.lora]\nrank_pattern = {'a\\.b' = 3}\n")
    config = load_config(path)
    load_config(path)
    assert config.validation.freq == 7
    assert config.policy.lora
    assert config.policy.lora.r_pattern == {r"a\.b": 3}
    printed = capsys.readouterr().out
    assert printed.count("old name") == 3
    assert "policy.lora.rank_pattern is an old name; write policy.lora.r_pattern" in printed


def test_old_and_new_name_together_are_refused(toml: Callable[..., Path]) -> None:
    [line] = problems_of(toml(more="validation_step = 7\n[validation]\nfreq = 3\n"))
    assert line.startswith("train.validation_step: given together with validation.freq, its present name")


def test_every_present_name_exists() -> None:
    assert set(PRESENT_NAMES.values()) <= set(dotted_keys(Config))


def test_the_type_of_the_job_follows_from_its_keys() -> None:
    for key, value in {"kl_beta": 0.1, "use_remote_reward": True, "epsilon_low": 0.1, "temperature": 0.9}.items():
        assert Config.from_dict({"train": {"train_policy": {key: value}}}).train.train_policy.type == "grpo"
    assert Config.from_dict({"train": {"train_policy": {"mini_batch": 2}}}).train.train_policy.type == "sft"
    given = {"train": {"train_policy": {"type": "grpo", "mini_batch": 2}}}
    assert Config.from_dict(given).train.train_policy.type == "grpo"


def test_a_learning_rate_may_be_a_number_a_list_or_a_table_by_parameter_name() -> None:
    def train(value):
        return Config.from_dict({"train": {"optm_lr": value, "optm_impl": ["foreach"]}}).train

    assert [train(value).global_lr for value in (1e-3, [1e-3], {"^a": 1.0, "global": 1e-3})] == [1e-3] * 3
    assert train({"^b": 2.0, "global": 1e-3, "^a": 1.0}).lr_patterns == {"^b": 2.0, "^a": 1.0}
    assert train(1e-3).lr_patterns == {}
    assert train(1e-3).optimizer_impl == "foreach"


def test_the_upstream_cache_switch_means_both_caches() -> None:
    def caches(**keys):
        sft = Config.from_dict({"train": {"train_policy": keys}}).train.train_policy
        return sft.cached_latents, sft.cached_text

    assert caches() == (False, False)
    assert caches(enable_dataset_cache=True) == (True, True)
    assert caches(cache={"text": True}) == (False, True)


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
free_values = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    custom=st.dictionaries(names, free_values, max_size=3),
    patterns=st.dictionaries(names, st.floats(1e-9, 1e9), max_size=3),
    ranks=st.dictionaries(st.sampled_from([r"^blocks\.\d+\.attn", r"to_[qk]$", 'a"b']), st.integers(1, 9), max_size=2),
    output_dir=names,
    lr=st.floats(1e-12, 1e3),
    warmup=st.integers(0, 1000) | st.floats(0, 1),
    steps=st.none() | st.integers(1, 1000),
    resume=st.booleans() | names,
)
def test_a_dump_read_back_is_the_same_configuration(
    custom: dict[str, Any],
    patterns: dict[str, float],
    ranks: dict[str, int],
    output_dir: str,
    lr: float,
    warmup: float,
    steps: int | None,
    resume: bool | str,
) -> None:
    config = Config.from_dict(
        {
            "custom": custom,
            "policy": {"lora": {"alpha_pattern": patterns, "r_pattern": ranks, "target_modules": ["to_q"]}},
            "train": {
                "output_dir": output_dir,
                "optm_lr": lr,
                "optm_warmup_steps": warmup,
                "max_num_steps": steps,
                "resume": resume,
            },
        }
    )
    again = Config.from_dict(tomllib.loads(dump_toml(config)))
    assert again == config
    assert type(again.train.optm_warmup_steps) is type(warmup)


def test_a_key_that_may_be_left_out_takes_no_empty_value_in_place_of_that(toml: Callable[..., Path]) -> None:
    """An empty text or list looks like a value and would mean none. Empty patterns are as they say: none matches."""
    literal = {"policy.freeze_pattern", "policy.trainable_map"}
    asked, tables = set[str](), [("", Config, Support.WORKS)]
    while tables:
        prefix, table, inherited = tables.pop()
        for name, field in table.model_fields.items():
            kind = read_support(field.metadata, inherited)
            if kind in (Support.NO_EFFECT, Support.PLANNED, Support.VLM) or prefix + name in literal:
                continue
            tables += [(f"{prefix}{name}.", inner, own) for inner, own in list_branches(field.annotation, kind)]
            if field.default is not None or name == "experiment_name":  # recipes write "None" there
                continue
            marked: Any = Annotated
            accepts: Any = TypeAdapter(marked[(field.annotation, *field.metadata, None)])
            asked.add(prefix + name)
            for empty in ("", [], {}):
                with contextlib.suppress(ValidationError):
                    found = accepts.validate_python(empty)
                    assert isinstance(found, BaseModel), f"{prefix}{name} = {empty!r}"  # a table of defaults is given
    assert {"policy.lora.lora_path", "train.train_policy.dataset.sets.rewards", "validation.sets.rewards"} <= asked
    assert problems_of(toml(more='[policy.lora]\nlora_path = ""\n')) == [
        'policy.lora.lora_path: found ""; allowed: text that is not empty; or leave the key out (line 8)'
    ]
