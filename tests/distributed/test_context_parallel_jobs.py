"""Whole jobs whose samples are shared by context-parallel ranks: the numbers of one rank."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cosmos_rl.tracking.metrics import read_metrics
from tests.support.family_runs import TrainedFamily, family_toml, folder_of
from tests.support.nft_runs import PROMPTS, Job, prompt_file, run_forked
from tests.support.states import drop_steps_after, saved_state
from tests.support.videos import write_video

pytestmark = [pytest.mark.zoo, pytest.mark.process]

FRAMES, STEPS = 9, 2
TRAINERS = ("nft", "flow_grpo", "ddrl")
REWARD = """
from tests.support.nft_rewards import smooth

def noted(to_be_evaluated, prompt):
    with open({file!r}, "a") as log:
        log.write(prompt + "\\n")
    return round(smooth(to_be_evaluated), 3)  # a pixel that is rounded to the other side changes nothing
"""
STOCHASTIC = (
    "--policy.diffusers.weight_copy_decay_type=0",
    "--policy.diffusers.sample.solver=flow",
    "--policy.diffusers.sample.noise_level=0.7",
    "--policy.diffusers.sample.deterministic_sampling=false",
)
GUIDED = (
    "--policy.diffusers.sample.guidance_scale=3.0",
    "--train.ema_enable=true",
    "--validation.enable=true",
    "--validation.freq=1",
    "--validation.n_generation=1",
)


@dataclass(frozen=True)
class Kind:
    """A job on all numbers of ranks."""

    family: str
    trainer: str
    """``sft``, ``dpo``, or one of reinforcement learning."""
    lora: bool = False
    more: tuple[str, ...] = ()
    heads: int | None = None
    """Of the transformer; None: the two that it has."""
    ranks: tuple[int, ...] = (2, 4)
    peers: int = 2
    replicas: int = 1
    """Of four ranks: groups that each hold all weights."""
    frames: int | None = FRAMES
    """None: images."""
    validated: int = 0
    """Samples of a validation, after every step."""
    within: float = 1e-5
    """Relative; of DPO more, whose beta multiplies differences of errors that are nearly equal in float32."""

    @property
    def learns_online(self) -> bool:
        return self.trainer in TRAINERS


KINDS = {
    "wan sft": Kind("wan", "sft"),
    "wan dpo": Kind("wan", "dpo", lora=True, ranks=(2,), within=1e-4),
    "wan nft": Kind("wan", "nft", ranks=(4,), replicas=2),
    "wan flow_grpo": Kind("wan", "flow_grpo", ranks=(2,)),
    "wan ddrl": Kind("wan", "ddrl", ranks=(4,)),
    "flux nft": Kind("flux", "nft", lora=True, more=GUIDED, ranks=(2,), frames=None, validated=2),
    "cosmos sft": Kind("cosmos-predict2.5", "sft", ranks=(2,)),
    "cosmos ddrl": Kind("cosmos-predict2.5", "ddrl", lora=True, ranks=(2,)),
    "moved": Kind(
        "wan", "flow_grpo", more=("--train.train_policy.batch_size_per_optimize=2",), heads=4, ranks=(4,), peers=4
    ),
}
"""``moved``: two optimiser steps on the samples of one rollout, so that the ratio of the second is not 1."""
CASES = [(name, ranks) for name, kind in KINDS.items() for ranks in kind.ranks]


def options_of(kind: Kind, folder: Path, log: Path) -> list[str]:
    """AdamW with a large epsilon, which does not make the rounding of a gradient of 0 a step of full size."""
    options = [
        f"--train.max_num_steps={STEPS}",
        f"--train.ckpt.save_freq={1 if kind.trainer == 'sft' else STEPS}",
        "--train.ckpt.export_safetensors=false",
        "--train.global_batch_size=4",
        "--train.train_policy.mini_batch=1",
        "--train.epsilon=1.0",
        "--train.optm_lr=0.3",
        *kind.more,
    ]
    if kind.trainer == "dpo":
        options += ["--train.train_policy.type=dpo", f"--train.train_policy.dataset.rejected_dir={folder / 'others'}"]
    if kind.learns_online:
        reward = log.with_suffix(".py")
        reward.write_text(REWARD.format(file=str(log)))
        options += [
            "--rollout.n_generation=2",
            f'--train.train_policy.local_reward.reward_fns=[{{function = "{reward}:noted"}}]',
        ]
    if kind.validated:
        prompts = prompt_file(log.parent, PROMPTS[: kind.validated], "held_out.txt")
        options.append(f"--validation.dataset.local_dir={prompts}")
    if kind.trainer in ("flow_grpo", "ddrl"):
        options += [*STOCHASTIC, f"--train.train_policy.trainer_type={kind.trainer}"]
    if kind.trainer == "ddrl":
        term = f'{{beta = 0.5, local_dir = "{folder / "videos"}", batch_size = 2}}'
        options += ["--train.train_policy.kl_beta=0.0", f"--train.train_policy.data_term={term}"]
    return options


def job_of(folder: Path, name: str, ranks: int) -> Job:
    kind = KINDS[name]
    family = TrainedFamily(kind.family, frames=None if kind.frames is None else ("num_frames", kind.frames))
    form = "nft" if kind.learns_online else "sft"
    place = folder / name / "toml"
    place.mkdir(parents=True, exist_ok=True)
    config = family_toml(place, family, job=form, lora=kind.lora, images=folder / "videos")
    options = options_of(kind, folder, folder / name / f"{ranks}.log")
    options.append(f"--policy.parallelism.cp_size={kind.peers}")  # one rank has none
    if ranks == 4:
        options.append(f"--policy.parallelism.dp_replicate_size={kind.replicas}")
    if kind.heads is not None:
        options.append(f"--policy.model_name_or_path={with_heads(folder, kind)}")
    return Job(config, folder / name / f"{ranks}", tuple(options))


def with_heads(folder: Path, kind: Kind) -> Path:
    """The tiny pipeline whose attention has other heads, of the same width together."""
    changed = folder / f"{kind.family} of {kind.heads} heads"
    if not changed.exists():
        shutil.copytree(folder_of(kind.family), changed)
        file = changed / "transformer" / "config.json"
        config = json.loads(file.read_text())
        width = config["num_attention_heads"] * config["attention_head_dim"]
        config |= {"num_attention_heads": kind.heads, "attention_head_dim": width // (kind.heads or 1)}
        file.write_text(json.dumps(config))
    return changed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every job on one rank and on several."""
    folder = tmp_path_factory.mktemp("peers")
    for number in range(4):
        for place, frames in (("videos", FRAMES + 1 + number), ("others", FRAMES + 3 + number)):
            write_video(folder / place / f"{number}.mp4", frames, size=(32, 32 if place == "videos" else 48))
            (folder / place / f"{number}.json").write_text(f'{{"prompt": "clip {number}"}}')
    for ranks in (1, 2, 4):
        jobs = [job_of(folder, name, ranks) for name, kind in KINDS.items() if ranks in (1, *kind.ranks)]
        run_forked(jobs, ranks, folder)
    return folder


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_peers_train_like_one_rank(folder: Path, name: str, ranks: int) -> None:
    ours, theirs = folder / name / f"{ranks}", folder / name / "1"
    rows = [read_metrics(run / "metrics.jsonl") for run in (ours, theirs)]
    assert len(rows[0]) == len(rows[1]) == STEPS
    for one, other in zip(*rows, strict=True):
        named = {key for key in other if key.startswith(("reward/", "adv/", "train/", "val/", "optim/grad"))}
        named -= {"train/loss_max"}  # of the means of the ranks
        assert len(named) >= (10 if KINDS[name].learns_online else 3)
        assert other["optim/grad_norm"] > 1e-3
        for key in named:
            assert one[key] == pytest.approx(other[key], rel=KINDS[name].within, abs=1e-6), key
    found, expected = saved_state(ours, STEPS), saved_state(theirs, STEPS)
    assert found.keys() == expected.keys()
    if name == "flux nft":
        assert {"model", "ema", "old"} <= {key.split(".")[0] for key in expected}
        assert len([key for key in rows[0][0] if key.startswith("val/")]) > 0
    for key in (key for key in expected if key.startswith(("model.", "ema.", "old."))):
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.trainer in ("flow_grpo", "ddrl")])
def test_the_ratio_is_one_exactly_where_the_trained_policy_made_the_samples(folder: Path, name: str) -> None:
    for ranks in (1, *KINDS[name].ranks):
        rows = read_metrics(folder / name / f"{ranks}" / "metrics.jsonl")
        found = [row["train/ratio_deviation_max"] for row in rows]
        if name == "moved":
            assert min(found) > 1e-5
        else:
            assert found == [0.0] * STEPS


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.learns_online])
def test_every_sample_is_scored_once(folder: Path, name: str) -> None:
    for ranks in (1, *KINDS[name].ranks):
        asked, alone = (Counter((folder / name / f"{count}.log").read_text().splitlines()) for count in (ranks, 1))
        assert asked == alone
        assert asked.total() == (4 + KINDS[name].validated) * STEPS


def test_a_run_of_peers_continues_on_one_rank_and_the_other_way_round(folder: Path) -> None:
    undisturbed = saved_state(folder / "wan sft" / "1", STEPS)
    for before, after in ((2, 1), (1, 2)):
        job = job_of(folder, "wan sft", after)
        resumed = folder / "wan sft" / f"{before} to {after}"
        shutil.copytree(folder / "wan sft" / f"{before}", resumed)
        drop_steps_after(resumed, 1)
        run_forked([Job(job.config, resumed, job.overrides, 1)], after, folder)
        found = saved_state(resumed, STEPS)
        assert found.keys() == undisturbed.keys()
        for key, value in undisturbed.items():
            np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-5, err_msg=f"{before} to {after} {key}")
