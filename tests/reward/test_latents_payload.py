"""Samples that go to the reward service as latents: what it decodes is what the trainer decodes."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from cosmos_rl_reward.decode import LatentDecoder

from cosmos_rl.distributed.context import Context
from cosmos_rl.launcher.acceptance.accept import find_problems, read_model
from cosmos_rl.launcher.acceptance.length import run_length
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.policy.config.model_rules import latents_problem
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model
from tests.support.family_runs import ORDINARY, ZOO, TrainedFamily, family_toml, folder_of
from tests.support.nft_runs import nft_trainer
from tests.support.reward_server import RewardServer

REMOTE = (
    "--train.train_policy.use_remote_reward=true",
    "--train.train_policy.local_reward={reward_fns = []}",
    '--train.train_policy.remote_reward.reward_fns=[{name = "a"}]',
)
AS_LATENTS = '--train.train_policy.remote_reward.payload="latents"'
FAMILIES = {one.name: one for one in (*ORDINARY, *ZOO)}
WITH_THE_VAE = [
    pytest.param(FAMILIES[name], id=name, marks=pytest.mark.slow if name == "wan" else pytest.mark.zoo)
    for name in ("wan", "wan2.2", "wan2.2-5b", "sana-video", "cosmos-predict2.5")
]


@pytest.mark.parametrize("family", WITH_THE_VAE)
def test_the_service_decodes_the_pixels_of_the_trainer(tmp_path: Path, family: TrainedFamily) -> None:
    config = load_config(family_toml(tmp_path, family, job="nft"), [*REMOTE, AS_LATENTS])
    model = build_model(config, Context(torch.device("cpu")), rest_on_cpu=False)
    model.check_reward_latents("payload")
    noise = torch.randn(3, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    states = model.start_state(noise)
    pixels, latents = model.to_media(model.decode(states)), model.reward_latents(states)
    assert latents.dtype == torch.float16
    assert latents.std() == pytest.approx(1.0, abs=0.1)  # normalised
    decoder = LatentDecoder(str(folder_of(family.name)), "", "float32", "cpu", 2**30)
    decoder.set_up()
    seen = np.stack([decoder.pixels(one) for one in latents])  # [N, 3, T, H, W]
    apart = np.abs(np.moveaxis(seen, 1, -1).astype(int) - pixels.numpy().astype(int))
    assert apart.max() <= 2
    assert apart.mean() < 0.1
    assert pixels.float().std() > 1  # and there is something to see
    shuffled = np.abs(np.moveaxis(seen, 1, -1)[[1, 2, 0]].astype(int) - pixels.numpy().astype(int))
    assert shuffled.mean() > 10 * apart.mean()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> RewardServer:
    server = RewardServer()
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", f"{server.url}/enqueue")
    monkeypatch.setenv("REMOTE_REWARD_FETCH_URL", f"{server.url}/pull")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", "t")
    return server


@pytest.mark.slow
def test_a_step_sends_the_latents_of_its_samples(tmp_path: Path, server: RewardServer) -> None:
    options = ("--validation.enable=true", f"--validation.dataset.local_dir={tmp_path / 'prompts.txt'}")
    task = nft_trainer(family_toml(tmp_path, FAMILIES["wan"], job="nft"), *REMOTE, AS_LATENTS, *options)
    own, pending = task._roll_out(0, task._new_conditions())
    for future in pending:
        assert future is not None
        assert future.result(60).total_N.isfinite().all()
    expected = task.model.reward_latents(own.latents).numpy()
    sent = sorted(server.jobs, key=lambda job: job.number)
    assert {job.line["media_type"] for job in sent} == {"latent"}
    assert {info["video_fps"] for job in sent for info in job.line["video_infos"]} == {own.fps}
    assert sum(len(job.array) for job in sent) == len(expected) == 8
    rows = {sample.prompt: [] for sample in own.samples}
    for sample, row in zip(own.samples, expected, strict=True):
        rows[sample.prompt].append(row.tobytes())
    for job in sent:
        for prompt, row in zip(job.line["prompts"], job.array, strict=True):
            assert row.tobytes() in rows[prompt]
    task.validate(1, lambda *_: None)
    assert server.jobs[-1].line["media_type"] == "latent"


def test_a_family_without_the_vae_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = family_toml(tmp_path, FAMILIES["sana"], job="nft")
    as_pixels, as_latents = load_config(path, [*REMOTE]), load_config(path, [*REMOTE, AS_LATENTS])
    assert list(problems_of(as_pixels)) == []
    (line,) = problems_of(as_latents)
    assert "train.train_policy.remote_reward.payload" in line
    assert 'takes latents of videos only; set it to "pixels"' in line


def problems_of(config: Config) -> list[str]:
    length = run_length(config, own_data=False)
    return list(find_problems(config, "prompts", read_model(config), length, own_script=False))


def test_the_rule_names_the_vae() -> None:
    def problem(vae: str, channels: int, is_video: bool = True) -> str | None:
        return latents_problem("k.payload", "the/model", vae, channels, is_video=is_video)

    assert problem("AutoencoderKLWan", 16) is None
    assert problem("AutoencoderKLWan", 48) is None
    refused = r'k\.payload = "latents": .*AutoencoderKLWan with 16 or 48 .*the/model has another one \(AutoencoderKLLTX'
    assert re.match(refused, problem("AutoencoderKLLTXVideo", 128) or "")
    assert "has another one" in (problem("AutoencoderKLWan", 8) or "")
    assert "latents of videos only" in (problem("AutoencoderKLWan", 16, is_video=False) or "")
