"""Every shipped recipe reaches its second step on a tiny model of its family, with nothing but sizes changed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmos_rl.policy.config import load_config
from cosmos_rl.tracking.metrics import read_metrics
from tests.config.test_recipes import CONFIGS, NAMED
from tests.support.driven import CONDITIONED
from tests.support.family_runs import folder_of
from tests.support.nft_runs import image_prompts, nft_train, prompt_file
from tests.support.pairs import edit_folder
from tests.support.trainer_runs import train
from tests.support.videos import write_video

FAMILIES = {
    "stable-diffusion-3-5": "sd3",
    "sana-image": "sana",
    "sana-video": "sana-video",
    "cosmos-predict2-5": "cosmos-predict2.5",
    "cosmos-predict2-2b": "cosmos-predict2",
    "flux-1": "flux",
    "flux-2-klein": "flux2-klein",
    "wan-2-1-i2v": "wan-i2v",
    "wan-2-2-i2v": "wan2.2-i2v",
    "wan-2-1": "wan",
    "wan-2-2-5b": "wan2.2-5b",
    "wan-2-2-a14b": "wan2.2",
}
FRAMES = {"ltx": 9, "ltx-i2v": 9, "mochi": 7}
"""Of families that cannot make 5."""
FROM_AN_IMAGE = {
    "wan2.2-5b-i2v": "wan/wan-2-2-5b",
    "sana-video-i2v": "sana/sana-video",
    "ltx-i2v": "ltx/ltx-video",
    "hunyuan-video-i2v": "hunyuan-video/hunyuan-video",
    "flux-kontext": "flux/flux-1-dev",
}
"""Families that take the recipes of another one."""


def family_of(recipe: str) -> str:
    """The tiny family of a recipe; that of its folder where no other is named."""
    return next((family for name, family in FAMILIES.items() if name in recipe), recipe.partition("/")[0])


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was found out about a pipeline serves both recipes of a family."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSMOS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def rejected_folder(images: Path, folder: Path) -> Path:
    """The same images in the opposite order."""
    (folder / "rejected").mkdir()
    files = sorted(images.glob("*.png"))
    for file, other in zip(files, reversed(files), strict=True):
        shutil.copy(file, folder / "rejected" / other.name)
    return folder / "rejected"


RUNS = [(recipe, family_of(recipe)) for recipe in NAMED]
RUNS += [(f"{recipe}-{job}.toml", family) for family, recipe in FROM_AN_IMAGE.items() for job in ("sft-lora", "nft")]


@pytest.mark.zoo
@pytest.mark.parametrize(("recipe", "family"), RUNS)
def test_a_recipe_reaches_its_second_step(recipe: str, family: str, tmp_path: Path, image_folder: Path) -> None:
    frames = FRAMES.get(family, 5)
    options = [
        f"--policy.model_name_or_path={folder_of(family)}",
        "--policy.model_revision=none",
        "--policy.parallelism.dp_shard_size=1",
        "--policy.diffusers.inference_size=[32, 32]",
        f"--policy.diffusers.train_frames={frames}",
        f"--policy.diffusers.inference_frames={frames}",
        "--policy.diffusers.max_prompt_length=48",
        f"--train.output_dir={tmp_path / 'out'}",
        "--train.max_num_steps=2",
    ]
    if "i2v" in family:
        options.append("--policy.diffusers.conditional_frames=[1, 1]")
    if "nft" in recipe:
        prompts = prompt_file(tmp_path)
        if family in CONDITIONED:
            prompts = image_prompts(tmp_path)
        source = f"--train.train_policy.dataset.local_dir={prompts}"
        held_out = f"--validation.dataset.local_dir={prompts}"
        if "multi-reward" in recipe:
            own = [f'{{local_dir = "{prompts}", label = "{name}", rewards = ["smooth"]}}' for name in ("a", "b")]
            source = f"--train.train_policy.dataset.sets=[{', '.join(own)}]"
            held_out = f'--validation.sets=[{{dataset = {{local_dir = "{prompts}"}}}}]'
        run = nft_train(
            CONFIGS / recipe,
            *options,
            source,
            held_out,
            "--train.train_policy.use_remote_reward=false",
            '--train.train_policy.local_reward.reward_fns=[{function = "tests.support.nft_rewards:smooth"}]',
            "--rollout.n_generation=2",
            "--train.train_policy.mini_batch=2",
            "--train.train_batch_per_replica=4",
        )
    else:
        folder = image_folder
        if family == "flux-kontext":
            folder = edit_folder(tmp_path / "edits")
        if load_config(CONFIGS / recipe).policy.diffusers.is_video:
            folder = tmp_path / "clips"
            for number in range(4):
                write_video(folder / f"{number}.mp4", frames + 1)
                (folder / f"{number}.txt").write_text(f"clip {number}")
        if "dpo" in recipe:
            options.append(f"--train.train_policy.dataset.rejected_dir={rejected_folder(image_folder, tmp_path)}")
        run = train(
            CONFIGS / recipe,
            *options,
            f"--train.train_policy.dataset.local_dir={folder}",
            f"--validation.dataset.local_dir={folder}",
            "--policy.diffusers.sample.num_steps=2",
        )
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "optim/grad_norm" in row] == [1, 2]
