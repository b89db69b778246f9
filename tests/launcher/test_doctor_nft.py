"""`cosmos-rl doctor --config` for reinforcement learning: sound jobs pass, planted faults are found."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.policies import AdapterPolicies
from tests.support.checks import marks
from tests.support.family_runs import TrainedFamily, family_toml
from tests.support.nft_runs import image_prompts, set_options

Toml = Callable[..., Path]
ALWAYS = (
    "model loads",
    "base weights",
    "prompts",
    "rollout",
    "rollout = training",
    "old policy",
    "reward sharpness",
    "forward",
    "backward",
    "export",
)


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("solver", ["dpm2", "dance"])
def test_a_sound_job_passes(write_nft_toml: Toml, capsys: pytest.CaptureFixture[str], lora: bool, solver: str) -> None:
    options = [f"--policy.diffusers.sample.solver={solver}"]
    options.append(f"--policy.diffusers.sample.deterministic_sampling={str(solver == 'dpm2').lower()}")
    code, found, out = marks(capsys, "--config", write_nft_toml(lora=lora), *options)
    assert code == 0, out
    assert {subject: found.get(subject) for subject in ALWAYS} == dict.fromkeys(ALWAYS, "ok"), out
    assert "warn" not in {mark for subject, mark in found.items() if not subject.startswith("disk")}, out
    assert ("fresh adapter" in found) == lora


@pytest.mark.parametrize("trainer", ["diffusion_nft", "online_dpo"])
def test_a_sound_job_with_even_levels_passes(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str], trainer: str
) -> None:
    options = [f"--train.train_policy.trainer_type={trainer}", "--policy.diffusers.weight_copy_decay_type=0"]
    code, found, out = marks(capsys, "--config", write_nft_toml(), "--policy.diffusers.even_levels=true", *options)
    assert code == 0, out
    assert "fail" not in found.values(), out


@pytest.mark.parametrize("trainer", ["flow_grpo", "epg"])
def test_a_sound_job_of_another_algorithm_passes(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str], trainer: str
) -> None:
    options = [
        f"--train.train_policy.trainer_type={trainer}",
        "--policy.diffusers.sample.solver=flow",
        "--policy.diffusers.sample.deterministic_sampling=false",
    ]
    code, found, out = marks(capsys, "--config", write_nft_toml(), *options)
    assert code == 0, out
    expected = [subject for subject in ALWAYS if subject != "old policy"]
    assert {subject: found.get(subject) for subject in expected} == dict.fromkeys(expected, "ok"), out


def test_a_step_that_is_trained_without_noise_is_found(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = {"solver": "1euler", "deterministic_sampling": "false", "noise_below": 0.5}
    options = [f"--policy.diffusers.sample.{key}={value}" for key, value in sampled.items()]
    code, found, out = marks(
        capsys, "--config", write_nft_toml(), "--train.train_policy.trainer_type=flow_grpo", *options
    )
    assert code == 1, out
    assert found["trained steps"] == "FAIL", out
    assert "may be trained and have no noise" in out


def test_each_set_is_sampled_and_scored_by_its_own_rewards(
    tmp_path: Path, write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ({"rewards": ["sharpness"]}, {"rewards": ["brightness"], "label": "bright"})
    both = ", ".join(f'{{function = "cosmos_rl.reward.examples:{name}"}}' for name in ("sharpness", "brightness"))
    options = (*set_options(tmp_path, *rows), f"--train.train_policy.local_reward.reward_fns=[{both}]")
    code, _, out = marks(capsys, "--config", write_nft_toml(), *options)
    assert code == 0, out
    scored = re.findall(r"^ok +reward (\w+ \(\w+\)) ", out, re.MULTILINE)
    assert scored == ["sharpness (first)", "brightness (bright)"], out


@pytest.mark.zoo
def test_samples_start_from_the_images_of_their_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = family_toml(tmp_path, TrainedFamily("wan-i2v", frames=("num_frames", 5)), job="nft")
    prompts = image_prompts(tmp_path)
    option = f"--train.train_policy.dataset.local_dir={prompts}"
    code, found, out = marks(capsys, "--config", path, option)
    assert (code, found["images and videos"]) == (0, "ok"), out
    assert {found[subject] for subject in ("rollout", "rollout = training", "old policy", "backward")} == {"ok"}, out
    assert "2 of 2 prompts name one" in out
    prompts.write_text(prompts.read_text(encoding="utf-8") + '\n{"prompt": "a cat"}', encoding="utf-8")
    lines = prompts.read_text(encoding="utf-8").splitlines()
    prompts.write_text("\n".join(reversed(lines)), encoding="utf-8")
    code, found, out = marks(capsys, "--config", path, option)
    assert (code, found["images and videos"], found["rollout = training"]) == (0, "warn", "ok"), out
    (tmp_path / "1.png").write_bytes(b"no image")
    code, found, out = marks(capsys, "--config", path, option)
    assert (code, found["images and videos"]) == (1, "FAIL")
    assert "1.png: cannot be read as an image" in out


def test_half_precision_and_guidance_pass_too(write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--train.param_dtype=bfloat16", "--policy.diffusers.sample.guidance_scale=3.0"]
    code, found, out = marks(capsys, "--config", write_nft_toml(), *options)
    assert (code, found.get("rollout = training"), found.get("export")) == (0, "ok", "ok"), out


def test_an_adapter_that_targets_nothing_is_found(write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]) -> None:
    options = ['--policy.lora.target_modules=["attn.to_q", "attn.nothing"]']
    code, found, out = marks(capsys, "--config", write_nft_toml(), *options)
    assert (code, found["model and data"]) == (1, "FAIL")
    assert "'attn.nothing' matches no layer of the transformer" in out


@pytest.mark.parametrize(
    ("function", "mark", "text"),
    [
        ("not_a_number", "FAIL", "no score for any of 6 samples: not_a_number: the function gave nan"),
        ("never", "FAIL", "no score for any of 6 samples: never: the function gave None"),
        ("constant", "FAIL", "always 0.25, also for plain and noisy images: it measures nothing"),
        ("seldom", "warn", "0 for all samples; other images get other scores"),
        ("lost_on_some_prompts", "warn", "missing for 3: lost_on_some_prompts: the function gave None"),
    ],
)
def test_a_reward_that_teaches_nothing_is_found(
    write_nft_toml: Toml, tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, mark: str, text: str
) -> None:
    path = write_nft_toml()
    (tmp_path / "prompts.txt").write_text("a lost cat\na dog\n")
    option = f'--train.train_policy.local_reward.reward_fns=[{{function = "tests.support.nft_rewards:{function}"}}]'
    code, found, out = marks(capsys, "--config", path, option)
    assert (code, found[f"reward {function}"[:22]]) == (int(mark == "FAIL"), mark), out
    assert text in out
    assert found["backward"] == "ok", out  # the rest is examined all the same


def test_a_clip_that_takes_all_difference_away_is_found(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    function = '{function = "cosmos_rl.reward.examples:sharpness", clip_min = 2.0}'
    option = f"--train.train_policy.local_reward.reward_fns=[{function}]"
    code, found, out = marks(capsys, "--config", write_nft_toml(), option)
    assert (code, found["reward sharpness"], found["reward in all"]) == (1, "ok", "FAIL"), out


def test_a_missing_address_of_the_reward_service_is_found(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for generation in ("REMOTE", "WFM", "DIFFUSION"):
        monkeypatch.delenv(f"{generation}_REWARD_ENQUEUE_URL", raising=False)
    code, found, out = marks(capsys, "--config", write_nft_toml(), "--train.train_policy.use_remote_reward=true")
    assert (code, found["rewards"]) == (1, "FAIL")
    assert "REMOTE_REWARD_ENQUEUE_URL: missing in the environment" in out


def test_rewards_of_a_script_are_not_tried(write_nft_toml: Toml, capsys: pytest.CaptureFixture[str]) -> None:
    option = "--train.train_policy.local_reward.reward_fns=[]"
    code, found, _ = marks(capsys, "--config", write_nft_toml(), option)
    assert (code, found["rewards"]) == (0, "warn")


@pytest.mark.parametrize("fault", ["timestep", "input", "levels"])
def test_a_rollout_that_calls_the_model_otherwise_than_training_is_found(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str], use_model: Callable[[type], type], fault: str
) -> None:
    @use_model
    class Own(SD3Model):
        """A family with a sampler of its own, in which one part is not what training uses."""

        is_sampling = False

        def pipeline_with_logprob(self, **keywords: Any) -> Any:
            self.is_sampling = True
            try:
                return super().pipeline_with_logprob(**keywords)
            finally:
                self.is_sampling = False

        def _differs(self, part: str) -> bool:
            return self.is_sampling and fault == part

        def timestep_from_sigma(self, sigma: torch.Tensor) -> torch.Tensor:
            return super().timestep_from_sigma(sigma) * (0.5 if self._differs("timestep") else 1.0)

        def nft_prepare_transformer_input(self, latents: torch.Tensor, *args: Any, **keywords: Any) -> dict[str, Any]:
            factor = 1.05 if self._differs("input") else 1.0
            return super().nft_prepare_transformer_input(factor * latents, *args, **keywords)

        def sampling_sigmas(self, *args: Any) -> torch.Tensor:
            return super().sampling_sigmas(*args) ** (1.2 if self._differs("levels") else 1.0)

    code, found, out = marks(capsys, "--config", write_nft_toml())
    assert (code, found["rollout = training"]) == (1, "FAIL"), out
    assert "pipeline_with_logprob must call the transformer as training does" in out


def test_an_old_policy_that_is_not_the_trained_one_is_found(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str], use_model: Callable[[type], type]
) -> None:
    class Forgetful(AdapterPolicies):
        def update_old(self, decay: float) -> None:
            """The old policy stays where it began."""

    @use_model
    class WithForgetfulPolicies(SD3Model):
        def policies(self, *, keep_old: bool, keep_reference: bool) -> Forgetful:
            return Forgetful(self.transformer, self.primary_adapter, "old", copy_reference=False)

    options = ["--policy.lora.init_lora_weights=false"]
    code, found, out = marks(capsys, "--config", write_nft_toml(), *options)
    assert (code, found["old policy"]) == (1, "FAIL"), out


def test_samples_that_are_all_alike_are_found(
    write_nft_toml: Toml, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmos_rl.distributed.randomness.generator", lambda *key: torch.Generator().manual_seed(0))
    code, found, out = marks(capsys, "--config", write_nft_toml())
    assert (code, found["rollout"]) == (1, "FAIL"), out
    assert "backward" not in found


def test_prompts_that_are_not_there_are_found(
    write_nft_toml: Toml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_nft_toml()
    (tmp_path / "prompts.txt").unlink()
    code, found, _ = marks(capsys, "--config", path)
    assert (code, found["prompts"]) == (1, "FAIL")
