"""What a DiffusionNFT run exports gives its averaged policy's images in plain diffusers."""

from pathlib import Path

import pytest

from tests.support.exports import noise_for, policy_image, snippet
from tests.support.nft_runs import nft_toml, nft_train_task


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_the_documented_snippet_gives_the_policys_image(tmp_path: Path, tiny_sd3: Path, lora: bool) -> None:
    options = ("--policy.diffusers.max_prompt_length=256", "--train.ema_enable=true", "--train.ema_decay=0.5")
    rate = f"--train.optm_lr={3e-2 if lora else 3e-3}"
    config = nft_toml(tmp_path, tiny_sd3, lora=lora)
    run, trainer = nft_train_task(config, *options, rate, "--train.ckpt.save_freq=3")
    noise, export = noise_for(trainer.model), run / "safetensors/step_3"
    theirs = snippet(str(tiny_sd3), export / "lora", noise) if lora else snippet(str(export), None, noise)
    assert (policy_image(trainer, noise) - theirs).abs().max() <= 1e-5
    others = [trainer.model.sample(["a photo of the number 3"], noise, num_steps=4, guidance=4.5)]
    with trainer.policies.using("old"):
        others.append(trainer.model.sample(["a photo of the number 3"], noise, num_steps=4, guidance=4.5))
    others.append(snippet(str(tiny_sd3), None, noise))
    assert all((other - theirs).abs().max() > 1e-4 for other in others)  # not the live, the old, the untrained one
