"""Media are large: as float32 one call's at a time, as uint8 once, and gone while the policy learns."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl.data.images import are_finite, to_uint8
from cosmos_rl.launcher.check import rl_estimate
from cosmos_rl.launcher.pipeline_files import read_pipeline
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.config.plan import plan_online
from cosmos_rl.policy.model.diffusers import diffuser_model
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.trainer.rl.algorithm import Algorithm, Rows, Share
from tests.support.nft_runs import nft_toml, nft_trainer
from tests.support.storages import Storages

IMAGE = 3 * 32 * 32
"""Values of one image of the jobs below, of which a step makes 16."""
SHOWN = 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_video_becomes_bytes_a_megapixel_at_a_time(dtype: torch.dtype) -> None:
    video = (torch.rand(2, 10, 3, 320, 512, generator=torch.Generator().manual_seed(0)) * 1.2 - 0.1).to(dtype)
    with Storages(IMAGE) as made:
        found = to_uint8(video)
    assert made.largest_float <= 2**20 * 3 * 4 < video[0].numel() * 4
    whole = (video.float().clamp(0, 1) * 255).round().to(torch.uint8).movedim(-3, -1)
    assert found.is_contiguous()
    assert torch.equal(found, whole)
    video[1, 9, 2, 319, 511] = torch.nan
    with Storages(IMAGE) as made:
        assert are_finite(video).tolist() == [True, False]
    assert made.largest_float < 100


class Noticing:
    """An algorithm that calls something before each optimiser step."""

    def __init__(self, algorithm: Algorithm, notice: Callable[[], None]) -> None:
        self._algorithm, self._notice = algorithm, notice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def rows(self, share: Share, **options: Any) -> Rows:
        self._notice()
        return self._algorithm.rows(share, **options)


@pytest.mark.parametrize(("call", "copied"), [("--rollout.batch_size=none", 0), ("--rollout.batch_size=1", 4)])
def test_a_step_holds_its_media_once_and_not_while_it_learns(
    tmp_path: Path,
    tiny_sd3: Path,
    use_model: Callable[[type], type],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    copied: int,
) -> None:
    for module in (diffuser_model, rl_estimate):
        monkeypatch.setattr(module, "DECODED_PIXELS", 32 * 32)
    storages = Storages(IMAGE)
    before_decoding: list[tuple[int, int]] = []
    learning: list[int] = []

    @use_model
    class Noting(SD3Model):
        def decode(self, latents: Tensor) -> Tensor:
            floats = storages.count_bytes(torch.float32, 4 * IMAGE)
            before_decoding.append((floats, storages.count_bytes(torch.uint8, IMAGE)))
            return super().decode(latents)

    path = nft_toml(tmp_path, tiny_sd3)
    trainer = nft_trainer(path, call)
    trainer.algorithm = Noticing(trainer.algorithm, lambda: learning.append(storages.count_bytes(torch.uint8, IMAGE)))  # pyright: ignore[reportAttributeAccessIssue]
    with storages:
        report = trainer.train_step(0)
    assert len(report.gallery) == SHOWN
    assert len(before_decoding) == 16
    assert {floats for floats, _ in before_decoding} == {0}  # the image before is no longer there as floats
    assert max(size for _, size in before_decoding) == (16 + copied + 1) * IMAGE  # and the image before as bytes
    assert storages.most_images == (16 + SHOWN) * IMAGE
    assert learning == [SHOWN * IMAGE]
    config = load_config(path, [call])
    estimate = rl_estimate.rl_memory(config, read_pipeline(config.policy), trained=0, shards=1)
    assert estimate.media == storages.most_images
    latent = 4 * math.prod(trainer.model.latent_shape(32, 32))
    assert estimate.learnt == learning[0] + latent * plan_online(config).pairs
    assert estimate.latents == latent * 16
