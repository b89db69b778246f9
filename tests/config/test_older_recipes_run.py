"""The commands of the older documents reach their second step on a tiny model, with nothing but sizes changed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmos_rl.launcher.arguments import parse_launch
from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.launch import accept_command
from cosmos_rl.launcher.machine import format_bytes
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.trainer import run
from cosmos_rl.storage.run_folder import create_run
from cosmos_rl.tools.dataset.diffusion_nft import training_prompts, validation_prompts
from cosmos_rl.tracking.metrics import read_metrics
from tests.config.test_older_config import DDRL_2B, GRPO, MOCK
from tests.support.family_runs import folder_of
from tests.support.paths import ROOT
from tests.support.trainer_runs import Stop
from tests.support.videos import write_video

FRAMES = 9
COMMANDS = {
    "000": "--config ./configs/wfm/cosmos_predict2-5_2b_720_reason_embedding_ddrl.toml --wfm-mode "
    "./cosmos_rl/tools/dataset/wfm_rl.py",
    "001": "--config ./configs/diffusion/cosmos_predict2-5_2b_480_grpo_mock_data.toml --diffusion-mode "
    "./cosmos_rl/tools/dataset/diffusion_grpo.py",
    "002": "--config ./configs/wfm/cosmos_predict2-5_2b_480_grpo_mock_data.toml --wfm-mode "
    "./cosmos_rl/tools/dataset/wfm_rl.py",
    "003": "--config ./configs/cosmos-predict2-5/cosmos-predict2-5-2b-480-grpo-mock-data.toml --wfm-mode "
    "cosmos_rl.tools.dataset.wfm_rl",
}
"""By the document."""


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was found out about the pipeline serves all commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSMOS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def videos_in(folder: Path) -> Path:
    """In the layout of the documents."""
    for number in range(2):
        write_video(folder / "videos" / f"{number}.mp4", FRAMES + 1)
        (folder / "metas").mkdir(exist_ok=True)
        (folder / "metas" / f"{number}.txt").write_text(f"clip {number}")
    return folder


@pytest.mark.zoo
@pytest.mark.parametrize("recipe", [MOCK, GRPO, DDRL_2B])
def test_a_recipe_takes_the_memory_that_it_says(recipe: str) -> None:
    from tests.support.published import files_of  # builds the transformer without memory

    path = ROOT / "configs/cosmos-predict2-5" / recipe
    config = load_config(path)
    peak = estimate.memory(config, files_of(config), on_cpu=False, saves=None).peak
    assert f"# Memory: {format_bytes(peak)} on each " in path.read_text(encoding="utf-8")


@pytest.mark.zoo
@pytest.mark.parametrize("document", COMMANDS)
def test_a_documented_command_reaches_its_second_step(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    sizes = [
        f"--policy.model_name_or_path={folder_of('cosmos-predict2.5')}",
        "--policy.model_revision=none",
        "--policy.diffusers.inference_size=[32, 32]",
        f"--policy.diffusers.train_frames={FRAMES}",
        f"--policy.diffusers.inference_frames={FRAMES}",
        "--policy.diffusers.max_prompt_length=48",
        "--rollout.n_generation=2",
        "--train.train_batch_per_replica=4",
        "--train.max_num_steps=2",
        f"--train.output_dir={tmp_path / 'out'}",
        "--train.train_policy.use_remote_reward=false",
        '--train.train_policy.local_reward.reward_fns=[{function = "tests.support.nft_rewards:smooth"}]',
        '--logging.logger=["console"]',
    ]
    if document == "000":
        folder = videos_in(tmp_path / "example")
        sizes += [
            f"--train.train_policy.dataset.local_dir={folder}",
            f"--train.train_policy.data_term.local_dir={folder}",
            "--train.train_policy.data_term.batch_size=2",
        ]
    config, call = accept_command(parse_launch([*sizes, *COMMANDS[document].split()], "0", ""))
    assert call == ["-m", "cosmos_rl.tools.dataset.diffusion_nft"]
    folder = create_run(Path(config.train.output_dir))
    code = run(config, folder, dataset=training_prompts, val_dataset=validation_prompts, stop=Stop())
    rows = read_metrics(folder.metrics)
    assert (code, [row["step"] for row in rows]) == (0, [1, 2])
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    assert all(("train/data_loss_mean" in row) == (document == "000") for row in rows)
