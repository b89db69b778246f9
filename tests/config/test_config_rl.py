"""The configuration of reinforcement learning: rules between keys, and how they are reported."""

from pathlib import Path
from typing import get_args

import pytest

from cosmos_rl.diffusion.churn import build_transitions, karras_sigmas
from cosmos_rl.policy.config import Config, ConfigError, cross_check, load_config, notes, unsupported_settings
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.config.plan import plan_online
from cosmos_rl.policy.config.policy import Solver
from cosmos_rl.policy.config.reward_names import list_rewards

NFT = """
mode = "colocated"
[policy]
model_name_or_path = "model"
is_diffusers = true
[policy.lora]
lora_names = ["default", "old"]
[policy.diffusers.sample]
num_steps = 10
deterministic_sampling = true
[policy.parallelism]
dp_shard_size = 8
[rollout]
n_generation = 24
[train]
train_batch_per_replica = 1152
[train.train_policy]
type = "grpo"
trainer_type = "diffusion_nft"
uncentralized_training = true
mini_batch = 9
use_remote_reward = true
[[train.train_policy.remote_reward.reward_fns]]
name = "pickscore"
[[train.train_policy.remote_reward.reward_fns]]
name = "ocr"
weight = 0.5
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "nft.toml"
    path.write_text(NFT)
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [line.partition(" (from --")[0] for line in caught.value.problems]


@pytest.mark.parametrize("noise_level", [0.5, 1.5])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("solver", get_args(Solver))
def test_the_configuration_takes_the_solvers_that_can_be_built(
    path: Path, solver: str, deterministic: bool, noise_level: float
) -> None:
    sample = f"policy.diffusers.sample.deterministic_sampling={str(deterministic).lower()}"
    overrides = [
        sample,
        f"policy.diffusers.sample.solver={solver}",
        f"policy.diffusers.sample.noise_level={noise_level}",
    ]
    try:
        build_transitions(solver, karras_sigmas(4), noise_level=noise_level, deterministic=deterministic)
    except ValueError:
        assert any("policy.diffusers.sample" in problem for problem in problems_of(path, *overrides))
    else:
        load_config(path, overrides)


def test_a_solver_that_can_only_sample_is_refused_with_the_reason(path: Path) -> None:
    (line,) = problems_of(path, "policy.diffusers.sample.solver=3kutta_naive")
    assert line.endswith(
        '; "3kutta_naive" calls the model 3 times in a step, so the mean of the step is not affine in one velocity, as '
        'training needs; of its kind "2ab" (second order, one call) and "1euler" are trained'
    )
    assert len(problems_of(path, 'policy.diffusers.sample.solver=["2mid"]')) == 1


def test_the_former_name_of_the_guard_is_refused_with_its_present_one(path: Path) -> None:
    [problem] = problems_of(path, "train.train_policy.watch.samples=4")
    assert problem == "train.train_policy.watch: is now called train.train_policy.reward_hacking_guard"


def test_a_diffusion_nft_job_is_valid_and_runnable(path: Path) -> None:
    config = load_config(path)
    assert unsupported_settings(config) == []
    others = load_config(path, ["train.train_policy.trainer_type=ppo"])
    [line] = unsupported_settings(others)
    assert line.startswith('train.train_policy.trainer_type = "ppo"; use "diffusion_nft" or "flow_grpo" or "ddrl"')
    assert notes(config) == []
    assert online_table(config).remote_reward.reward_fns[1].weight == 0.5


def test_a_batch_that_does_not_divide_is_refused_with_the_arithmetic(path: Path) -> None:
    assert problems_of(path, "train.train_batch_per_replica=1000") == [
        "train.train_batch_per_replica: found 1000; allowed: a multiple of rollout.n_generation = 24 and of the 8 data "
        "parallel ranks, the nearest 984 or 1008"
    ]


def test_the_samples_of_a_prompt_may_lie_on_several_ranks(path: Path) -> None:
    options = ["train.train_batch_per_replica=24", "train.train_policy.mini_batch=1"]
    plan = plan_online(load_config(path, options))
    assert (plan.items, plan.samples, plan.chunk) == (1, 3, 3)


def test_a_micro_batch_that_does_not_divide_is_refused_with_the_arithmetic(path: Path) -> None:
    assert problems_of(path, "train.train_policy.mini_batch=10") == [
        "train.train_policy.mini_batch: found 10; allowed: a divisor of the samples of a rank, "
        "train.train_batch_per_replica / ranks = 1152 / 8 = 144"
    ]


def test_the_global_batch_replaces_the_replica_batch(path: Path) -> None:
    overrides = ["policy.parallelism.dp_shard_size=1", "train.train_policy.mini_batch=48"]
    load_config(path, ["train.global_batch_size=48", *overrides])
    [line] = problems_of(path, "train.global_batch_size=60")
    assert line.startswith("train.global_batch_size: found 60; allowed: a multiple of rollout.n_generation")


def test_the_rules_count_with_the_ranks_that_will_run(path: Path) -> None:
    def on_one(config):
        one = config.policy.parallelism.model_copy(update={"dp_shard_size": 1})
        return config.model_copy(update={"policy": config.policy.model_copy(update={"parallelism": one})})

    load_config(path, ["train.train_batch_per_replica=72"], fit=on_one)


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["mode=disaggregated"], 'mode: found "disaggregated"; allowed: "colocated"'),
        (["train.train_policy.uncentralized_training=false"], "train.train_policy.uncentralized_training: found false"),
        (["train.train_policy.variant=dapo"], 'train.train_policy.variant: found "dapo"; allowed: "grpo"'),
        (
            ['policy.lora.lora_names=["default"]'],
            "policy.lora.lora_names: found ['default']; allowed: a list with \"def",
        ),
        (
            ['policy.lora.lora_names=["old", "default"]'],
            "policy.lora.primary_adapter: found unset with policy.lora.lora_names = ['old', 'default']; allowed: \"def",
        ),
        (["policy.lora.primary_adapter=old"], 'policy.lora.primary_adapter: found "old" with'),
        (
            ["rollout.parallelism.dp_shard_size=4"],
            "rollout.parallelism.dp_shard_size: found 4; allowed: 8 as in policy",
        ),
        (
            ["policy.diffusers.sample.deterministic_sampling=false"],
            "policy.diffusers.sample.deterministic_sampling: found false; allowed: true with policy.diffusers.sam",
        ),
        (["policy.diffusers.sample.solver=dance"], "policy.diffusers.sample.deterministic_sampling: found true"),
        (
            [
                "policy.diffusers.sample.solver=flow",
                "policy.diffusers.sample.deterministic_sampling=false",
                "policy.diffusers.sample.noise_level=0.0",
            ],
            "policy.diffusers.sample.noise_level: found 0.0; allowed: more than 0",
        ),
        (
            [
                "policy.diffusers.sample.solver=ddim",
                "policy.diffusers.sample.deterministic_sampling=false",
                "policy.diffusers.sample.noise_level=1.5",
            ],
            "policy.diffusers.sample.noise_level: found 1.5; allowed: 0 to 1 with policy.diffusers.sample.solver",
        ),
        (
            ["policy.diffusers.sample.noise_scale=1.3"],
            'policy.diffusers.sample.noise_scale: found 1.3; allowed: 1.0 with policy.diffusers.sample.solver = "',
        ),
        (
            ["policy.diffusers.sample.solver=2ab", "policy.diffusers.sample.noise_scale=1.3"],
            "policy.diffusers.sample.noise_scale: found 1.3; allowed: 1.0 with policy.diffusers.sample.determin",
        ),
        (
            ["policy.diffusers.sample.noise_above=0.1"],
            "policy.diffusers.sample.noise_above: found 0.1; allowed: 0.0 with policy.diffusers.sample.solver = ",
        ),
        (
            ["policy.diffusers.sample.solver=1euler", "policy.diffusers.sample.noise_below=50"],
            "policy.diffusers.sample.noise_below: found 50.0; allowed: unset with policy.diffusers.sample.determin",
        ),
        (
            [
                "policy.diffusers.sample.solver=1euler",
                "policy.diffusers.sample.deterministic_sampling=false",
                "policy.diffusers.sample.noise_above=2",
                "policy.diffusers.sample.noise_below=2",
            ],
            "policy.diffusers.sample.noise_below: found 2.0; allowed: more than policy.diffusers.sample.noise_above =",
        ),
        (["train.train_policy.data_term.beta=0.1"], "train.train_policy.data_term.local_dir: missing; the folder of"),
        (
            [
                "train.train_policy.data_term.beta=0.1",
                "train.train_policy.data_term.local_dir=images",
                "train.train_policy.data_term.batch_size=20",
            ],
            "train.train_policy.data_term.batch_size: found 20; allowed: a multiple of the 8 data parallel ranks, the "
            "nearest 16 or 24",
        ),
        (
            [
                "train.train_policy.data_term.beta=0.1",
                "train.train_policy.data_term.local_dir=images",
                "train.train_policy.data_term.noise=rollout",
                "policy.diffusers.buckets={sizes = [[1024, 1024], [384, 640]]}",
            ],
            'train.train_policy.data_term.noise: found "rollout"; allowed: "fresh" with policy.diffusers.buckets',
        ),
        (
            ["train.train_policy.reward_hacking_guard.action=rewind", "train.ckpt.enable_checkpoint=false"],
            'train.train_policy.reward_hacking_guard.action: found "rewind", which needs checkpoints',
        ),
        (
            [
                "train.train_policy.reward_hacking_guard.action=rewind",
                "train.train_policy.reward_hacking_guard.freq=101",
            ],
            "train.ckpt.max_keep: found 5; allowed: at least 6 with train.ckpt.save_freq = 20",
        ),
        (
            ["validation.enable=true", "train.train_policy.dataset.test_size=4"],
            "validation.dataset.local_dir: missing; allowed with validation.enable = true: a file of prompts",
        ),
        (["policy.diffusers.timesteps_fraction=0.05"], "policy.diffusers.timesteps_fraction: found 0.05; of policy"),
        (
            ["policy.diffusers.timesteps_fraction=0.0"],
            "policy.diffusers.timesteps_fraction: found 0.0; allowed: a number",
        ),
        (
            ["policy.diffusers.weight_copy_decay_type=3"],
            "policy.diffusers.weight_copy_decay_type: found 3; allowed: one of 0",
        ),
        (
            ["policy.diffusers.sample.solver=2mid"],
            'policy.diffusers.sample.solver: found "2mid"; allowed: one of "flow", "flow_linear", ',
        ),
        (
            ["policy.diffusers.sample.solver=nope"],
            'policy.diffusers.sample.solver: found "nope"; allowed: one of "flow"',
        ),
        (["policy.diffusers.nft_beta=0.0"], "policy.diffusers.nft_beta: found 0.0"),
        (["train.train_policy.kl_beta=-0.1"], "train.train_policy.kl_beta: found -0.1; allowed: a number >= 0"),
        (["rollout.n_generation=1"], "rollout.n_generation: found 1; allowed: 2 or more"),
        (["rollout.n_generation_mini_batch=25"], "rollout.n_generation_mini_batch: found 25"),
        (["train.train_policy.advantage_low=0.0"], "train.train_policy.advantage_low: found 0.0; allowed: less than 0"),
        (["train.train_policy.advantage_high=0.0"], "train.train_policy.advantage_high: found 0.0"),
        (["train.train_policy.batch_size_per_optimize=20"], "train.train_policy.batch_size_per_optimize: found 20"),
        (
            ["train.train_policy.remote_reward.reward_fns.1.clip_min=5.0"],
            "train.train_policy.remote_reward.reward_fns.1.clip_min: found 5.0; allowed: less than clip_max = 5.0",
        ),
        (
            ["train.train_policy.remote_reward.reward_clip_max=-5.0"],
            "train.train_policy.remote_reward.reward_clip_min: found -5.0",
        ),
        (
            ["train.train_policy.remote_reward.reward_fns.1.name=pickscore"],
            "train.train_policy.remote_reward.reward_fns: found",
        ),
        (["train.train_policy.remote_reward.reward_fns=[]"], "train.train_policy.remote_reward.reward_fns: found []"),
        (
            ["train.train_policy.remote_reward.reward_fns.1.wieght=2.0"],
            "train.train_policy.remote_reward.reward_fns.1.wieght: unknown key; did you mean "
            "train.train_policy.remote_reward.reward_fns.weight?",
        ),
        (
            ["train.train_policy.remote_reward.reward_fns.1={}"],
            "train.train_policy.remote_reward.reward_fns.1.name: missing; allowed: text",
        ),
        (["train.train_policy.remote_reward.reward_fns.0.name=gen_eval"], "train.train_policy.dataset.name: found"),
        (
            ["train.train_policy.local_reward.reward_fns=[{function='a:b'}, {function='c:b'}]"],
            "train.train_policy.local_reward.reward_fns: found ['b', 'b']; allowed: each of them once",
        ),
        (
            ["train.train_policy.local_reward.reward_fns=[{function='a:ocr'}]"],
            'train.train_policy.local_reward.reward_fns: found the name "ocr", which remote_reward also has',
        ),
        (
            [
                "train.train_policy.remote_reward.reward_fns.0={name='ocr', score_key='words'}",
                "train.train_policy.local_reward.reward_fns=[{function='a:b', name='ocr.words'}]",
            ],
            'train.train_policy.local_reward.reward_fns: found the name "ocr.words", which remote_reward also has',
        ),
        (
            [
                "validation.enable=true",
                "validation.dataset.name=ocr",
                "validation.local_reward.reward_fns=[{function='a:ocr'}]",
            ],
            'validation.local_reward.reward_fns: found the name "ocr", which remote_reward also has',
        ),
        (
            ["train.train_policy.remote_reward.reward_fns.0={name='ocr', score_key='ocr_reward'}"],
            "train.train_policy.remote_reward.reward_fns: found ['ocr.ocr_reward', 'ocr.ocr_reward']; allowed: each of",
        ),
        (
            ["train.train_policy.local_reward.reward_fns=[{function='a.b'}]"],
            'train.train_policy.local_reward.reward_fns.0.function: found "a.b"; allowed: "package.module:function" or',
        ),
        (
            ["validation.local_reward.reward_fns=[{function='a:b', clip_min=7.0}]"],
            "validation.local_reward.reward_fns.0.clip_min: found 7.0; allowed: less than clip_max = 5.0",
        ),
        (
            ["train.train_policy.on_missing_reward=zero"],
            'train.train_policy.on_missing_reward: found "zero"; allowed: one of "neutral", "drop_group", "raise"',
        ),
        (["train.train_policy.max_missing_frac=2.0"], "train.train_policy.max_missing_frac: found 2.0"),
        (["train.train_policy.learnt_share=0.0"], "train.train_policy.learnt_share: found 0.0"),
        (
            ["train.train_policy.trainer_type=online_dpo", "train.train_policy.learnt_share=0.5"],
            'train.train_policy.learnt_share: found 0.5; allowed: 1.0 with "online_dpo"',
        ),
        (
            [
                "train.train_policy.trainer_type=flow_grpo",
                "policy.diffusers.sample.solver=flow",
                "policy.diffusers.sample.deterministic_sampling=false",
                "policy.diffusers.timesteps_fraction=0.5",
                "policy.diffusers.even_levels=true",
            ],
            'policy.diffusers.even_levels: found true; allowed: false with "flow_grpo"',
        ),
        (["validation.use_remote_reward=false"], "validation.use_remote_reward: found false; allowed: true"),
        (
            ["train.train_policy.conversation_column_name=x"],
            'train.train_policy.conversation_column_name: belongs to type = "sft"; here is type = "grpo"',
        ),
    ],
)
def test_a_broken_rule_is_one_line_that_starts_with_its_key(path: Path, overrides: list[str], start: str) -> None:
    [line] = [line for line in problems_of(path, *overrides) if not line.startswith("train.train_batch")]
    assert line.startswith(start)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_solver_without_noise_is_one_problem_of_a_trainer_on_steps(path: Path, deterministic: bool) -> None:
    sampled = f"policy.diffusers.sample.deterministic_sampling={str(deterministic).lower()}"
    [found] = problems_of(path, "train.train_policy.trainer_type=flow_grpo", sampled)
    assert 'policy.diffusers.sample.solver: found "dpm2"; allowed: one with noise ("flow", "cps", ...)' in found


def test_all_broken_rules_come_in_one_report(path: Path) -> None:
    lines = problems_of(
        path, "mode=disaggregated", "rollout.n_generation=5", "train.train_policy.advantage_low=1.0", "train.bogus=1"
    )
    assert [line.split(":")[0] for line in lines] == [
        "train.bogus",
        "mode",
        "train.train_policy.advantage_low",
        "train.train_batch_per_replica",
    ]


def test_a_problem_in_a_list_of_tables_names_the_line_of_its_own_table(path: Path) -> None:
    path.write_text(NFT + "clip_min = 9.0\n")
    [line] = problems_of(path)
    assert line.endswith(f"allowed: less than clip_max = 5.0 (line {len(NFT.splitlines()) + 1})")


def test_rewards_may_be_of_the_script_alone(path: Path) -> None:
    """Whether there is any reward at all is known only once the script is."""
    config = load_config(path, ["train.train_policy.use_remote_reward=false"])
    assert online_table(config).local_reward.reward_fns == ()


def test_gen_eval_goes_with_its_own_prompts_or_a_file_like_them(path: Path) -> None:
    gen_eval = "train.train_policy.remote_reward.reward_fns.0.name=gen_eval"
    load_config(path, [gen_eval, "train.train_policy.dataset.name=geneval"])
    load_config(path, [gen_eval, "train.train_policy.dataset.local_dir=mine.jsonl"])
    load_config(path, [gen_eval, "train.train_policy.remote_reward.reward_fns.0.weight=0.0"])


def test_a_clip_that_is_not_given_suits_the_reward(path: Path) -> None:
    fns = "train.train_policy.remote_reward.reward_fns=[{name='hpsv3', clip_max=9.0}, {name='ocr'}]"
    wide, usual = online_table(load_config(path, [fns])).remote_reward.reward_fns
    assert (wide.lower, wide.upper, wide.has_wide_clip) == (-15.0, 9.0, True)
    assert (usual.lower, usual.upper, usual.has_wide_clip) == (-5.0, 5.0, False)


@pytest.mark.parametrize(("share", "learnt", "steps"), [(1.0, 144, 4), (0.5, 72, 2), (0.3, 44, 2), (0.0001, 1, 1)])
def test_the_plan_counts_the_share_that_is_learnt_from(path: Path, share: float, learnt: int, steps: int) -> None:
    """346 of 1152 samples on 8 ranks: the last rank fills up its 44."""
    job = "train.train_policy"
    config = load_config(path, [f"{job}.learnt_share={share}", f"{job}.batch_size_per_optimize=36"])
    plan = plan_online(config)
    assert (plan.samples, plan.learnt, plan.optimizer_steps) == (144, learnt, steps)


def test_prompts_by_name_are_read_by_reinforcement_learning_alone(path: Path) -> None:
    named = ["train.train_policy.dataset.name=pickscore", "train.train_policy.dataset.split=train"]
    config = load_config(path, [*named, "validation.enable=true", "validation.dataset.name=ocr"])
    assert unsupported_settings(config) == []
    assert notes(config) == []


def test_uneven_advantage_bounds_are_noted(path: Path) -> None:
    [note] = notes(load_config(path, ["train.train_policy.advantage_low=-1.0"]))
    assert note.startswith("train.train_policy.advantage_low = -1.0 is not -advantage_high")


def test_the_typo_of_upstreams_recipes_is_read_as_what_was_meant(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmos_rl.policy.config.aliases._warned", set())
    assert load_config(path, ["policy.diffusers.timestep_fraction=0.99"]).policy.diffusers.timesteps_fraction == 0.99
    assert "write policy.diffusers.timesteps_fraction" in capsys.readouterr().out


@pytest.mark.parametrize("trainer", ["flow_grpo", "ddrl", "diffusion_nft", "online_dpo"])
def test_schedule_free_optimisers_are_refused_where_a_ratio_to_the_sampling_policy_is_clipped(trainer: str) -> None:
    job = {"type": "grpo", "trainer_type": trainer}
    config = Config.from_dict({"train": {"optm_name": "AdamWScheduleFree", "train_policy": job}})
    found = [line for line in cross_check(config) if line.startswith("train.optm_name")]
    if trainer in ("diffusion_nft", "online_dpo"):
        assert found == []
    else:
        assert found == [
            f'train.optm_name: found "AdamWScheduleFree"; allowed with trainer_type = "{trainer}": others, as it takes '
            "the gradient at other weights than those that make the samples, so that the likelihood ratio is not 1 "
            "before the first step and the clip leaves samples out"
        ]


def test_scores_of_one_reward_with_their_keys_leave_its_name_to_a_function(path: Path) -> None:
    """They are called ocr.words and ocr.ocr_reward in metrics, so a function may be called ocr."""
    two = "train.train_policy.remote_reward.reward_fns.0={name='ocr', score_key='words'}"
    local = "train.train_policy.local_reward.reward_fns=[{function='a:ocr'}]"
    config = load_config(path, [two, local])
    assert list_rewards(config) == {"ocr.words": 1.0, "ocr.ocr_reward": 0.5, "ocr": 1.0}
