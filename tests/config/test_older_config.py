"""The older configuration: its schema, and what the published recipes become in the present one."""

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import (
    Config,
    ConfigError,
    data_ranks,
    load_config,
    translate_file,
    unsupported_settings,
    world_size,
)
from cosmos_rl.policy.config.keys import describe_allowed, dotted_keys, find_field
from cosmos_rl.policy.config.plan import plan_online
from cosmos_rl.policy.config.problems import validate
from cosmos_rl.policy.config.wfm import RewardConfig, RLConfig
from cosmos_rl.policy.config.wfm.notes import Translation
from cosmos_rl.policy.config.wfm.rules import EXPECTED, FOR_ALL, FOR_RL, IGNORED
from cosmos_rl.policy.config.wfm.schema import older_config
from cosmos_rl.policy.config.wfm.translate import translate
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs"
MOCK, GRPO, DDRL_2B, DDRL_14B = (
    f"cosmos-predict2-5-{name}.toml"
    for name in (
        "2b-480-grpo-mock-data",
        "2b-480-grpo",
        "2b-720-reason-embedding-ddrl",
        "14b-720-reason-embedding-ddrl",
    )
)
OLDER = (MOCK, GRPO, DDRL_2B, DDRL_14B)
JOB = {"name": "x"}
VIDEO = {"ratio": 1, "dataset_dir": "videos", "batch_size": 1, "num_workers": 2}
LOCAL = {"type": "local", "video_dataloader": VIDEO}


def translated(**tables: Any) -> Translation:
    tree = {"model": {}, "job": JOB, "dataloader_train": LOCAL, **tables}
    config, problems = validate(older_config(), tree)
    assert problems == []
    assert config is not None
    return translate(config, tree)


def web_data(name: str, **dataset: Any) -> dict[str, Any]:
    return {"video_dataloader": {"ratio": 1, "dataloader": {"dataset": {"dataset_name": name, **dataset}}}}


def value(translation: Translation, dotted: str) -> Any:
    found: Any = translation.tables
    for name in dotted.split("."):
        found = found[name]
    return found


def write(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / "older.toml"
    path.write_text(tomli_w.dumps(tree))
    return path


# ---- the recipes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "gpus", "steps", "prompts", "trainer"),
    [
        (MOCK, 8, list(range(8)), 1, "flow_grpo"),
        (GRPO, 8, list(range(8)), 1, "flow_grpo"),
        (DDRL_2B, 256, list(range(0, 19, 2)), 16, "ddrl"),
        (DDRL_14B, 1024, list(range(0, 19, 2)), 16, "ddrl"),
    ],
)
def test_the_published_recipes_translate(recipe: str, gpus: int, steps: list[int], prompts: int, trainer: str) -> None:
    config = load_config(CONFIGS / "cosmos-predict2-5" / recipe)
    job: Any = config.train.train_policy
    sample, plan = config.policy.diffusers.sample, plan_online(config)
    assert world_size(config.policy.parallelism) == gpus
    assert (job.trainer_type, job.steps.choose, list(job.steps.indices)) == (trainer, "list", steps)
    assert (plan.items, plan.group, plan.sigmas) == (prompts, 8, len(steps))
    assert (sample.guidance_scale, sample.solver, sample.noise_level) == (1.0, "2ab", 1.0)
    assert config.policy.diffusers.train_frames == 93
    assert config.policy.model_name_or_path == f"nvidia/Cosmos-Predict2.5-{'14B' if '14b' in recipe else '2B'}"
    assert data_ranks(config.policy.parallelism) == prompts * plan.group  # a sample on each, and its peers
    assert unsupported_settings(config) == []


def test_what_the_ddrl_recipe_becomes() -> None:
    tables = translate_file(CONFIGS / "cosmos-predict2-5" / DDRL_2B).tables
    train = dict(tables["train"])
    job = train.pop("train_policy")
    clips = {"clip_min": -5.0, "clip_max": 5.0}
    assert job == {
        "type": "grpo",
        "trainer_type": "ddrl",
        "uncentralized_training": True,
        "dataset": {"local_dir": "datasets/example"},
        "mini_batch": 1,
        "on_policy": True,
        "epsilon_low": 1e-4,
        "logprob_weight": "ve",
        "kl_beta": 0.0,
        "advantage_transform": "identity",
        "advantage_low": -5.0,
        "advantage_high": 5.0,
        "caption_dropout": 0.2,
        "steps": {"choose": "list", "indices": [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]},
        "data_term": {
            "beta": 0.01,
            "local_dir": "datasets/example",
            "batch_size": 128,
            "levels": "trained_steps",
            "per_step": True,
            "noise": "rollout",
        },
        "reward_hacking_guard": {"enable": False},
        "use_remote_reward": True,
        "remote_reward": {
            "scale": 1.0,
            "reward_clip_min": -5.0,
            "reward_clip_max": 5.0,
            "reward_fns": [{"name": "dance_grpo", "weight": 1.0, "score_key": "overall_reward", **clips}],
        },
    }
    assert train == {
        "output_dir": "./outputs/cosmos_predict2_5/ddrl/2b_720_reason_embedding_ddrl",
        "epoch": 2001,
        "max_num_steps": 2001,
        "train_batch_per_replica": 128,
        "seed": 0,
        "param_dtype": "bfloat16",
        "ema_enable": True,
        "optm_name": "AdamW",
        "optm_lr": 1e-5,
        "optm_weight_decay": 1e-4,
        "optm_betas": [0.9, 0.99],
        "epsilon": pytest.approx(1e-9),
        "optm_grad_norm_clip": pytest.approx(0.1),
        "optm_warmup_steps": 50,
        "optm_warmup_start_factor": 1e-6,
        "optm_decay_type": "none",
        "ckpt": {"save_freq": 32, "save_mode": "sync", "max_keep": -1, "export_safetensors": False},
    }
    diffusers = tables["policy"]["diffusers"]
    assert diffusers["sample"] == {
        "num_steps": 21,
        "eval_num_steps": 21,
        "guidance_scale": 1.0,
        "solver": "2ab",
        "deterministic_sampling": False,
        "noise_level": 1.0,
        "noise_scale": 1.0,
        "noise_above": 0.0,
        "same_initial_noise": False,
        "global_std": False,
    }
    assert (diffusers["conditional_frames"], diffusers["inference_size"]) == ([0, 1], [720, 1280])
    assert tables["logging"]["logger"] == ["console", "wandb"]
    assert "lora" not in tables["policy"]


@pytest.mark.parametrize("folder", ["wfm", "diffusion"])
def test_older_names_of_the_recipes_lead_to_them(folder: str) -> None:
    found = {path.name: path.resolve() for path in (CONFIGS / folder).iterdir()}
    expected = {
        f"cosmos_predict2-5_{name.removeprefix('cosmos-predict2-5-').replace('-', '_')}": name for name in OLDER
    }
    assert found == {old: CONFIGS / "cosmos-predict2-5" / name for old, name in expected.items()}


@pytest.mark.parametrize("recipe", OLDER)
def test_a_recipe_opens_with_its_command_and_where_it_writes(recipe: str) -> None:
    path = CONFIGS / "cosmos-predict2-5" / recipe
    text = path.read_text()
    assert f"cosmos-rl --config ./configs/cosmos-predict2-5/{recipe} \\\n" in text
    assert f"# Result: {load_config(path).train.output_dir}/safetensors/step_<N>\n" in text


# ---- keys ----------------------------------------------------------------------------------------------------------


def test_the_documented_classes_have_the_documented_keys_and_defaults() -> None:
    rl = RLConfig()
    assert isinstance(rl.reward_config, RewardConfig)
    text = (ROOT / "examples" / "ddrl.md").read_text()
    named = re.findall(r"^    (\w+): ", text.partition("class RLConfig:")[2].partition("```")[0], re.MULTILINE)
    assert set(named) == set(RLConfig.model_fields)
    assert RLConfig.model_validate({"s_t_max": "inf", "s_churn": "0.5"}) == RLConfig(s_churn=0.5)
    assert rl.model_dump(exclude={"reward_config"}) == {
        "enabled": True,
        "num_rollout": 8,
        "on_policy": True,
        "sample_steps": 10,
        "min_num_conditional_frames": 1,
        "max_num_conditional_frames": 1,
        "use_same_seed": True,
        "solver_option": "2ab",
        "s_churn": 1.0,
        "s_t_max": math.inf,
        "s_t_min": 0.0,
        "s_noise": 1.0,
        "guidance": 0.0,
        "train_on": tuple(range(8)),
        "update_ref_every_iter": 16,
        "clip_ratio": 1e-4,
        "kl_beta": 0.01,
        "data_beta": 0.0,
        "use_rl_sigma_and_noise": True,
        "data_on_first_only": False,
        "exp_reward": False,
    }
    rewards = rl.reward_config
    enabled = {name: getattr(rewards, name).enabled for name in rewards.ALL_REWARD_MODELS}
    assert enabled == {"aesthetic": False, "image_reward": False, "remote_reward": True, "fake_reward": False}
    assert (rewards.adv_clip_min, rewards.adv_clip_max) == (-5.0, 5.0)
    remote = rewards.remote_reward
    assert (remote.reward_fn, remote.score_key, remote.scale) == ("dance_grpo", "overall_reward", 1.0)
    assert (remote.reward_clip_min, remote.reward_clip_max) == (-5.0, 5.0)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (
            {"rl": {"num_rollouts": 4}},
            "model.rl.num_rollouts: unknown key; did you mean model.rl.num_rollout?",
        ),
        ({"shard_size": 4}, "model.shard_size: unknown key; did you mean model.fsdp_shard_size?"),
        (
            {"scaling": "flow"},
            'model.scaling: found "flow"; allowed: one of "rectified_flow", "edm"',
        ),
    ],
)
def test_an_error_names_key_line_and_what_was_meant(model: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, {"model": model, "job": JOB}))
    [line] = caught.value.problems
    assert re.fullmatch(rf"{re.escape(problem)} \(line \d\)", line)


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"scheduler": {"f_max": []}}, "scheduler.f_max: found []"),
        ({"scheduler": {"f_max": [0.0]}}, "scheduler.f_max: found [0.0]"),
        ({"model": {"loss_scale": 0}}, "model.loss_scale: found 0; allowed: a number > 0"),
        ({"model": {"rl": {"num_rollout": 0}}}, "model.rl.num_rollout: found 0; allowed: a whole number > 0"),
        (
            {"trainer": {"callbacks": [{"name": "grad_clip", "args": {"clip_norm": "x"}}]}},
            "trainer.callbacks: clip_norm",
        ),
        ({"trainer": {"callbacks": [{"args": {}}]}}, "trainer.callbacks.0.name: missing; allowed: text"),
        ({"job": {}}, "job.name: missing; allowed: text"),
    ],
)
def test_values_that_cannot_be_translated_are_named(tables: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(key)):
        translate_file(write(tmp_path, {"model": {}, "job": JOB, **tables}))


@pytest.mark.parametrize(
    ("key", "allowed", "default"),
    [
        ("model.fsdp_shard_size", "a whole number > 0", 8),
        ("model.loss_scale", "a number > 0", 10.0),
        ("model.context_parallel_size", "a whole number > 0", None),
        ("model.scaling", 'one of "rectified_flow", "edm"', "rectified_flow"),
        ("checkpoint.type", 'one of "distributed", "None"', None),
        ("optimizer.betas", "a list of 2 values: a number, a number", [0.9, 0.99]),
        ("scheduler.f_max", "a list of one or more values, each a number > 0", [1.0]),
        ("checkpoint.keys_not_to_resume", "a list of values, each text", []),
        ("trainer.callbacks", "a list of tables", ()),
        ("trainer.callbacks.args", "a table", {}),
        ("trainer.grad_scaler_args", "a table of values, each true or false", {}),
        ("dataloader_val.image_dataloader.dataloader.dataset.len_t5", "a whole number", None),
        ("dataloader_train.video_dataloader.dataloader.num_workers", "a whole number", 0),
        ("model_parallel.timers", "a value", None),
        ("job.wandb_mode", 'one of "online", "offline", "disabled"', "online"),
    ],
)
def test_what_a_key_may_hold_is_read_from_its_default(key: str, allowed: str, default: object) -> None:
    field = find_field(older_config(), key.split("."))
    assert field is not None
    assert (describe_allowed(field.annotation, field.metadata), field.default) == (allowed, default)


def test_rules_and_reasons_are_about_keys_of_the_older_form() -> None:
    known = set(dotted_keys(older_config()))
    reasons = " ".join([*EXPECTED.values(), *IGNORED.values()]).split()
    items = ("trainer.callbacks.", "model.conditioner.")  # by their names
    named = [key for key in reasons if not key.startswith(items)]
    assert {*named, *(rule.old for rule in (*FOR_ALL, *FOR_RL))} <= known


def test_a_list_of_tables_in_a_key_without_effect_is_named() -> None:
    translation = translated(model_parallel={"timers": [{"a": 1}]})
    assert "ignored (it had no effect): model_parallel.timers" in translation.describe()


def test_lenient_leaves_out_unknown_keys_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, {"model": {"rl": {"num_rollouts": 4, "sample_steps": 6}, "resolution": "720"}, "job": JOB})
    assert value(translate_file(path, lenient=True), "policy.diffusers.sample.num_steps") == 7
    path = write(tmp_path, {"model": {"rl": {"num_rollouts": 4, "sample_steps": "many"}}, "job": JOB})
    with pytest.raises(ConfigError, match="model.rl.sample_steps"):
        translate_file(path, lenient=True)


def test_keys_of_published_recipes_that_had_no_effect_are_known() -> None:
    translated(
        model_parallel={"pipeline_parallel_size": 1}, trainer={"callbacks": [{"name": "heart_beat", "step_size": 1}]}
    )


@pytest.mark.parametrize("rl", [{}, {"data_beta": 0.01, "kl_beta": 0.0}, {"enabled": False}])
def test_every_key_of_the_schema_is_explained(rl: dict[str, Any]) -> None:
    callbacks = ("grad_clip", "low_prec", "iter_speed", "every_n_sample_reg", "wandb", "wandb_10x", "manual_gc")
    tree: dict[str, Any] = {"model": {"rl": rl}, "job": JOB, "dataloader_train": LOCAL}
    config = older_config().model_validate(tree)
    full = config.model_dump()
    full["trainer"]["callbacks"] = [{"name": name} for name in callbacks]
    names = ("fps", "padding_mask", "text", "use_video_condition")
    full["model"]["conditioner"] = [{"name": name} for name in names]
    translation = translate(older_config().model_validate(full), full)
    noted = {note.old: note.text for note in translation.notes}
    assert translation.given <= noted.keys()
    assert [key for key, text in noted.items() if text == "of no use here"] == []
    assert len(translation.given) > 250


def test_every_key_that_it_sets_is_one_of_the_present_configuration() -> None:
    known = set(dotted_keys(Config))
    for rl in ({}, {"data_beta": 0.01}, {"enabled": False}, {"on_policy": False}):
        news = {note.new for note in translated(model={"rl": rl}).notes if note.new}
        assert news <= known


def test_the_page_lists_what_becomes_what() -> None:
    """The rows are those of runs of every kind."""
    reward = {"reward_config": {"fake_reward": {"enabled": True}, "remote_reward": {"enabled": False}}}
    entry = {**VIDEO, "video_size": [32, 32], "num_frames": 5, "offline_text_embedding": True}
    web = {"video_dataloader": {"ratio": 1, "dataloader": {"dataset": {"len_t5": 512}}}}
    falling = {"f_min": [0.1], "cycle_lengths": [2000.0], "warm_up_steps": [5]}
    callbacks = [{"name": "grad_clip"}, {"name": "wandb"}, {"name": "every_n_sample_reg", "args": {"every_n": 2}}]
    runs = [
        translated(model={"rl": {**reward, "on_policy": False, "s_t_max": 50.0}}, dataloader_train=web),
        translated(model={"rl": {"data_beta": 0.1, "kl_beta": 0.0}, "conditioner": [{"name": "text"}]}),
        translated(model={"rl": {"enabled": False}, "context_parallel_size": 2}, scheduler=falling),
        translated(model={"rl": {"data_beta": 0.1, "kl_beta": 0.0}}, dataloader_train=web_data("shards/wdinfo.json")),
        translated(
            model={"resize_online": False},
            dataloader_train={"type": "local", "video_dataloader": entry},
            trainer={"callbacks": callbacks},
            job={**JOB, "timestamp": "20261129000000"},
            checkpoint={"load_path": "owner/model"},
        ),
    ]
    news: dict[str, list[str]] = {}
    for note in (note for run in runs for note in run.notes if note.new):
        found = news.setdefault(note.old, [])
        if note.new not in found:
            found.append(note.new)
    rows = [f"| `{old}` | {', '.join(f'`{new}`' for new in found)} |" for old, found in sorted(news.items())]
    page = (ROOT / "docs" / "legacy.md").read_text(encoding="utf-8")
    table = page.partition("## The keys")[2].partition("|---|---|\n")[2].partition("\n\n")[0]
    assert table.split("\n") == rows


# ---- what single keys become ---------------------------------------------------------------------------------------


def test_local_tars_are_read_and_an_object_store_is_not() -> None:
    for name in ("shards/wdinfo.json", "wdinfo.json", "my_shards/", "one.tar"):
        translation = translated(dataloader_train=web_data(name))
        assert value(translation, "train.train_policy.dataset.local_dir") == name
    for data in (web_data("video_720p"), web_data("a/wdinfo.json", object_store="s3"), {"video_dataloader": {}}):
        translation = translated(dataloader_train=data)
        assert "local_dir" not in translation.tables["train"]["train_policy"].get("dataset", {})
        (note,) = [note for note in translation.notes if note.old == "dataloader_train.type"]
        assert note.lost
        assert "S3 is not supported yet; set train.train_policy.dataset.local_dir to tars or a wdinfo" in note.text


def test_effects_that_are_lost_are_named() -> None:
    rl = {"reward_config": {"aesthetic": {"enabled": True}}}
    translation = translated(model={"rl": rl, "sde": {"sigma_max": 80}, "net": {"model_channels": 64}})
    lost = {note.old for note in translation.notes if note.lost}
    assert lost == {
        "model.rl.reward_config.aesthetic.enabled",
        "model.sde.sigma_max",
        "model.net.model_channels",
    }


def test_addresses_and_token_are_never_shown() -> None:
    secrets = {"token": "s3cret", "enqueue_url": "http://u:s3cret@host", "fetch_url": "http://s3cret"}
    translation = translated(model={"rl": {"reward_config": {"remote_reward": secrets}}})
    assert "s3cret" not in repr(translation)
    lines = "\n".join(translation.describe())
    assert "s3cret" not in lines
    assert all(f"REMOTE_REWARD_{name.upper()}" in lines for name in secrets)


def test_a_learning_rate_that_falls_ends_where_the_cycle_was() -> None:
    schedule = {"warm_up_steps": [20], "cycle_lengths": [220], "f_start": [0.1], "f_max": [0.5], "f_min": [0.1]}
    train = value(translated(scheduler=schedule, trainer={"max_iter": 120}, optimizer={"lr": 1e-4}), "train")
    assert train["optm_lr"] == pytest.approx(5e-5)
    assert train["optm_warmup_start_factor"] == pytest.approx(0.2)
    assert train["optm_decay_type"] == "linear"
    assert train["optm_min_lr_factor"] == pytest.approx((0.5 + (0.1 - 0.5) * 0.5) / 0.5)  # half of the cycle
    schedule["scheduler_type"], schedule["cycle_lengths"] = "lambda_warmup_cos", [120]
    train = value(translated(scheduler=schedule, trainer={"max_iter": 120}), "train")
    assert (train["optm_decay_type"], train["optm_min_lr_factor"]) == ("cosine", pytest.approx(0.2))


def test_fine_tuning_draws_the_levels_of_the_older_trainer() -> None:
    translation = translated(model={"rl": {"enabled": False}})
    config = Config.from_dict(tomllib.loads(tomli_w.dumps(translation.tables)))
    diffusers, job = config.policy.diffusers, config.train.train_policy
    assert (job.type, job.dataset.local_dir, config.train.train_batch_per_replica) == ("sft", "videos", 1)
    # ln sigma = p_mean + p_std n + ln(state_t) / 2, and the logit of sigma / (1 + sigma) is ln sigma
    assert diffusers.logit_mean == pytest.approx(math.log(4) + math.log(24) / 2)
    assert diffusers.logit_std == 1.2
    assert diffusers.conditional_frames == (1, 2)


def test_a_flag_with_a_key_of_the_older_form_is_named_with_its_present_one(tmp_path: Path) -> None:
    path = write(tmp_path, {"model": {}, "job": JOB})
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["--model.rl.num_rollout=4", "--trainer.no_such=1"])
    known, unknown = raised.value.problems
    says = "a key of the older form; flags have the present keys"
    assert known == f"model.rl.num_rollout: {says}, here rollout.n_generation (from --model.rl.num_rollout=4)"
    assert unknown == f"trainer.no_such: {says} (from --trainer.no_such=1)"


def test_a_value_that_has_no_present_one_is_named_by_the_key_of_its_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"model": {"rl": {"solver_option": "2mid", "sample_steps": 4}}, "job": JOB})
    line = path.read_text().splitlines().index('solver_option = "2mid"') + 1
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["--train.train_policy.steps.indices=[0]"])
    [refused] = raised.value.problems
    start = 'model.rl.solver_option: as policy.diffusers.sample.solver: found "2mid"; allowed: one of "flow", '
    assert refused.startswith(start)
    assert refused.endswith(f'"2ab" (second order, one call) and "1euler" are trained (line {line})')
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["--policy.diffusers.sample.solver=3kutta_naive", "--train.train_policy.steps.indices=[0]"])
    [refused] = raised.value.problems
    assert refused.startswith('policy.diffusers.sample.solver: found "3kutta_naive"')


def test_a_rule_between_keys_names_those_of_an_older_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, {"model": {"rl": {"num_rollout": 1}}, "job": JOB}))
    [refused] = raised.value.problems
    assert refused.startswith("model.rl.num_rollout: as rollout.n_generation: found 1; allowed: 2 or more")
    assert "(line " in refused


def test_a_rank_of_fine_tuning_has_the_samples_of_all_its_gradients() -> None:
    data = {"type": "local", "video_dataloader": {**VIDEO, "batch_size": 2}}
    model, sizes = {"rl": {"enabled": False}, "fsdp_shard_size": 4}, {"grad_accum_iter": 3}
    train = value(translated(model=model, dataloader_train=data, trainer=sizes), "train")
    assert (train["train_batch_per_replica"], train["train_policy"]["mini_batch"]) == (2 * 3, 2)


def test_the_output_folder_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_OUTPUT_DIR", "/data/runs")
    path = write(tmp_path, {"model": {}, "job": {"project": "p", "group": "g", "name": "n"}})
    assert value(translate_file(path), "train.output_dir") == "/data/runs/p/g/n"


def test_a_part_of_the_rewards_can_be_bypassed() -> None:
    rewards = {"fake_reward": {"enabled": True}, "remote_reward": {"enabled": False}}
    job = value(translated(model={"rl": {"reward_config": rewards}}), "train.train_policy")
    assert (job["bypass_reward"], job["use_remote_reward"]) == (True, False)


def test_the_documented_extra_brings_where_the_older_recipes_show_metrics() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = {place for recipe in OLDER for place in load_config(CONFIGS / "cosmos-predict2-5" / recipe).logging.logger}
    assert wanted == {"console", "wandb"}
    assert wanted - {"console"} <= set(extras["wfm"])


def test_the_defaults_that_differ_from_the_tutorial_are_the_shipped_ones() -> None:
    rl, page = RLConfig(), (ROOT / "docs/legacy.md").read_text(encoding="utf-8")
    assert (rl.enabled, rl.num_rollout, rl.train_on, rl.update_ref_every_iter) == (True, 8, tuple(range(8)), 16)
    assert "shipped with it, `True`, 8, 0 to 7 and 16." in page
