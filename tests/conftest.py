"""Fixtures of more than one test file. One thread per process: two on loaded cores are many times slower."""

import contextlib
import json
import os
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.launched import CONFIG, WORKER, Place
from tests.support.open_tasks import close_all
from tests.support.patience import HANG_S


@pytest.fixture(autouse=True)
def _tasks_are_closed() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def closed_folder() -> Iterator[Path]:
    """A folder that nobody but root may enter, in one where all may write; `tmp_path` is closed itself."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        folder = Path(name) / "closed"
        folder.mkdir(mode=0)
        yield folder
        folder.chmod(0o700)


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny SD3 pipeline made of the real classes."""
    import torch

    from cosmos_rl.policy.model.tiny import build

    torch.set_num_threads(1)
    return build("sd3", tmp_path_factory.mktemp("tiny") / "sd3", "unit", seed=0)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve captioned 40 x 48 images as pairs."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for i in range(12):
        noise = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((48, 40)).save(folder / f"{i:03d}.png")
        (folder / f"{i:03d}.json").write_text(json.dumps({"prompt": f"a photo of the number {i % 4}"}))
    return folder


@pytest.fixture
def write_toml(tmp_path: Path, tiny_sd3: Path, image_folder: Path) -> Callable[..., Path]:
    """Writes a small SFT configuration; keyword arguments are TOML lines by table, or more text."""

    def write(extra: str = "", lora: bool = True, train: str = "", name: str = "config.toml") -> Path:
        path = tmp_path / name
        path.write_text(
            f"""
[policy]
model_name_or_path = "{tiny_sd3}"
is_diffusers = true
[policy.diffusers]
max_prompt_length = 16
inference_size = [32, 32]
sample = {{ num_steps = 3, guidance_scale = 3.0 }}
{LORA if lora else ""}
[train]
output_dir = "{tmp_path / "out"}"
epoch = 100
max_num_steps = 6
train_batch_per_replica = 4
param_dtype = "float32"
optm_lr = 1e-2
optm_warmup_steps = 0
{train}
[train.train_policy]
type = "sft"
mini_batch = 2
dataset.local_dir = "{image_folder}"
{extra}
"""
        )
        return path

    return write


@pytest.fixture
def write_nft_toml(tmp_path: Path, tiny_sd3: Path) -> Callable[..., Path]:
    """Writes a small DiffusionNFT configuration: 2 prompts x 4 samples a step, 2 of 4 noise levels."""

    def write(extra: str = "", lora: bool = True, name: str = "nft.toml") -> Path:
        (tmp_path / "prompts.txt").write_text("a cat\na dog\na bird\na boat\n")
        path = tmp_path / name
        path.write_text(
            f"""
mode = "colocated"
[policy]
model_name_or_path = "{tiny_sd3}"
is_diffusers = true
model_gradient_checkpointing = false
[policy.diffusers]
max_prompt_length = 16
inference_size = [32, 32]
timesteps_fraction = 0.5
weight_copy_decay_type = 1
sample = {{ num_steps = 4, guidance_scale = 1.0, deterministic_sampling = true }}
{LORA + 'lora_names = ["default", "old"]' if lora else ""}
[rollout]
n_generation = 4
[train]
output_dir = "{tmp_path / "out"}"
epoch = 100
max_num_steps = 2
train_batch_per_replica = 8
param_dtype = "float32"
optm_lr = 1e-3
optm_warmup_steps = 0
[train.train_policy]
type = "grpo"
trainer_type = "diffusion_nft"
uncentralized_training = true
mini_batch = 4
kl_beta = 1e-3
dataset.local_dir = "{tmp_path / "prompts.txt"}"
local_reward.reward_fns = [{{ function = "cosmos_rl.reward.examples:sharpness" }}]
reward_hacking_guard.samples = 4
{extra}
"""
        )
        return path

    return write


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A working folder with spaces in its path and a configuration, and a writer of worker scripts."""
    folder = tmp_path / "my work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "model").mkdir()
    (folder / "model" / "model_index.json").write_text("{}")
    (folder / "run.toml").write_text(CONFIG.replace("MODEL", str(folder / "model")))

    def script(body: str, name: str = "worker.py") -> None:
        (folder / name).write_text(WORKER + body)

    return folder, script


@pytest.fixture
def use_model() -> Iterator[Callable[[type], type]]:
    """Registers a model class for the tiny pipeline, as a user's script would; the shipped one is back at the end."""
    from cosmos_rl.policy.model.base import ModelRegistry, WeightMapper
    from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model

    register = ModelRegistry.register(WeightMapper, allow_override=True)
    yield register
    register(SD3Model)


@pytest.fixture
def rewards_of() -> Iterator[Callable[..., Any]]:
    """Makes the rewards of functions and of the table of local ones; all are closed at the end."""
    from tests.support.scored import make

    with contextlib.ExitStack() as stack:
        yield lambda *given, **job: stack.enter_context(contextlib.closing(make(*given, **job)))


LORA = """
[policy.lora]
r = 4
lora_alpha = 8
target_modules = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
init_lora_weights = "gaussian"
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that start processes or train the time that a busy machine takes for them: they wait by
    `tests.support.patience`, which knows a hang from a busy machine, and this is for what hangs in spite of it."""
    for item in items:
        is_long = item.get_closest_marker("process") or item.get_closest_marker("slow")
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(HANG_S))
