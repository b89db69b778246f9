"""What `cosmos-rl check` and a launch say of context-parallel ranks."""

from pathlib import Path

import pytest

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.accept import read_model
from cosmos_rl.launcher.arguments import parse_launch
from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.launch import accept_command
from cosmos_rl.policy.config import Config, load_config
from tests.support.family_runs import TrainedFamily, family_toml, folder_of
from tests.support.videos import write_video

PEERS = "--policy.parallelism.cp_size={}"
CLIP = ["--policy.diffusers.train_frames=9", "--policy.diffusers.inference_frames=9"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Fine-tuning of the tiny Wan, which has two attention heads, on videos of 3 x 2 x 2 tokens."""
    videos = tmp_path / "videos"
    for number in range(4):
        write_video(videos / f"{number}.mp4", 10)
        (videos / f"{number}.json").write_text('{"prompt": "a clip"}')
    return family_toml(tmp_path, TrainedFamily("wan", frames=("num_frames", 9)), job="sft", images=videos)


def test_check_says_what_peers_are(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "--nproc-per-node", "4", "--config", str(job), PEERS.format(2), "--train.global_batch_size=4"]
    assert main(command) == 0
    report = capsys.readouterr().out
    assert "4 ranks: dp_shard_size 2 x cp_size 2" in report
    assert "4 samples per step = 2 x 2 (data parallel ranks x samples of a rank)" in report
    assert (
        "a data parallel rank is 2 ranks with the same samples, each with a part of their tokens "
        "(policy.parallelism.cp_size): 2 x 2 = 4 ranks" in report
    )
    assert "12 tokens (6 at most on each of 2 ranks), and at most 48 of its prompt" in report
    assert main([*command[:-2], "--train.global_batch_size=4", "--train.train_policy.mini_batch=1"]) == 0
    assert "with the same samples" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([PEERS.format(3)], "policy.parallelism.cp_size = 3: each rank computes as many attention heads"),
        (
            [PEERS.format(2), "--policy.model_name_or_path={sana}", "--policy.diffusers.is_video=false"],
            "policy.parallelism.cp_size = 2: the tokens of SanaTransformer2DModel cannot be split over ranks",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_by_check_and_by_a_launch(
    job: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    options = [option.replace("{sana}", str(folder_of("sana"))) for option in options]
    command = ["--nproc-per-node", options[0][-1], "--config", str(job), *options, "--train.global_batch_size=4"]
    assert main(["check", *command]) == 2
    assert message in capsys.readouterr().err
    if "Sana" in message:  # its data are images, which are looked for first
        return
    with pytest.raises(UserError, match=message):
        accept_command(parse_launch(command, "0", ""))


@pytest.mark.parametrize(("peers", "own"), [(1, 12), (2, 6), (5, 3)])
def test_activations_are_those_of_the_own_tokens_and_weights_are_sharded(job: Path, peers: int, own: int) -> None:
    def load(*options: str) -> Config:
        return load_config(job, [*CLIP, *options])

    config = load(PEERS.format(peers), "--policy.parallelism.dp_shard_size=2")
    files, alone = read_model(config), load("--policy.parallelism.dp_shard_size=2")
    assert estimate.tokens(config, files.pipeline) == own + 48
    found, whole = (estimate.memory(one, files, on_cpu=False, saves=None) for one in (config, alone))
    for part in (estimate.TRAINED, estimate.FROZEN, estimate.GRADIENTS, estimate.MOMENTS):
        assert found.parts[part] == pytest.approx(whole.parts[part] / peers, abs=2), part
    shares = [estimate._activations(one, files.pipeline) for one in (config, alone)]
    assert shares[0] / shares[1] == pytest.approx((own + 48) / 60, rel=1e-3)


def test_one_rank_of_peers_reads_the_same_batches(job: Path) -> None:
    """On a CPU without `--nproc-per-node` there is one rank, with the batch of one data parallel rank."""
    config, _ = accept_command(parse_launch(["--config", str(job), PEERS.format(2)], "0", ""))
    sizes = config.policy.parallelism
    assert (sizes.cp_size, sizes.dp_shard_size) == (1, 1)
