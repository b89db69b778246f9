"""Every shipped recipe reaches its second step on a tiny model of its family, with nothing but sizes changed."""

from pathlib import Path

import pytest

from cosmos_rl.tracking.metrics import read_metrics
from tests.config.test_recipes import CONFIGS, NAMED
from tests.support.family_runs import folder_of
from tests.support.nft_runs import nft_train, prompt_file
from tests.support.trainer_runs import train
from tests.support.videos import write_video

FAMILIES = {
    "stable-diffusion-3-5": "sd3",
    "sana-image": "sana",
    "sana-video": "sana-video",
    "cosmos-predict2-5": "cosmos-predict2.5",
}


def family_of(recipe: str) -> str:
    return next(family for name, family in FAMILIES.items() if name in recipe)


@pytest.mark.zoo
@pytest.mark.parametrize("recipe", NAMED)
def test_a_recipe_reaches_its_second_step(recipe: str, tmp_path: Path, image_folder: Path) -> None:
    options = [
        f"--policy.model_name_or_path={folder_of(family_of(recipe))}",
        "--policy.model_revision=",
        "--policy.parallelism.dp_shard_size=1",
        "--policy.diffusers.inference_size=[32, 32]",
        "--policy.diffusers.train_frames=5",
        "--policy.diffusers.inference_frames=5",
        "--policy.diffusers.max_prompt_length=48",
        f"--train.output_dir={tmp_path / 'out'}",
        "--train.max_num_steps=2",
    ]
    if "nft" in recipe:
        prompts = prompt_file(tmp_path)
        run = nft_train(
            CONFIGS / recipe,
            *options,
            f"--train.train_policy.dataset.local_dir={prompts}",
            f"--validation.dataset.local_dir={prompts}",
            "--train.train_policy.use_remote_reward=false",
            '--train.train_policy.local_reward.reward_fns=[{function = "tests.support.nft_rewards:smooth"}]',
            "--rollout.n_generation=2",
            "--train.train_policy.mini_batch=2",
            "--train.train_batch_per_replica=4",
        )
    else:
        folder = image_folder
        if "video" in recipe:
            folder = tmp_path / "clips"
            for number in range(4):
                write_video(folder / f"{number}.mp4", 6)
                (folder / f"{number}.txt").write_text(f"clip {number}")
        run = train(
            CONFIGS / recipe,
            *options,
            f"--train.train_policy.dataset.local_dir={folder}",
            f"--validation.dataset.local_dir={folder}",
            "--policy.diffusers.sample.num_steps=2",
        )
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "optim/grad_norm" in row] == [1, 2]
