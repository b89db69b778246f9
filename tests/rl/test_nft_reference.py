"""The KL reference is the model as the run found it, an adapter that was loaded included."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.check.rl_estimate import rl_memory
from cosmos_rl.launcher.pipeline_files import read_pipeline
from cosmos_rl.policy.config import load_config
from tests.support.exports import export_policy
from tests.support.nft_runs import moved_away, nft_toml, nft_train, nft_trainer
from tests.support.states import assert_same_state, drop_steps_after, saved_state


@pytest.fixture(scope="module")
def adapter(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that does something, as a fine-tuning run exports it."""
    folder = tmp_path_factory.mktemp("adapter")
    export_policy(moved_away(nft_trainer(nft_toml(folder, tiny_sd3), start=False)), folder)
    return folder / "lora"


def starts(adapter: Path) -> dict[str, str]:
    return {"loaded": f"--policy.lora.lora_path={adapter}", "drawn": "--policy.lora.init_lora_weights=false"}


@pytest.mark.parametrize("start", ["loaded", "drawn"])
def test_the_distance_is_exactly_zero_at_the_start(tmp_path: Path, tiny_sd3: Path, adapter: Path, start: str) -> None:
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), starts(adapter)[start], "--train.optm_lr=1e-2")
    model, policies = trainer.model, trainer.policies
    cond, level = model.encode_prompts(["a hat"]), model.training_level(torch.tensor([0.5]))
    noise = torch.randn(1, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def velocity(name: str) -> torch.Tensor:
        with policies.using(name), model.eval_mode():  # type: ignore[arg-type]
            return model.velocity(noise, level, cond)

    first = velocity("default")
    model.transformer.disable_adapters()
    with torch.no_grad(), model.eval_mode():
        base = model.velocity(noise, level, cond)
    model.transformer.enable_adapters()
    assert not torch.allclose(base, first)
    distances = [trainer.train_step(step).metrics["train/kl_loss_mean"] for step in range(3)]
    assert distances[0] == 0.0
    assert 0.0 < distances[1] < distances[2]
    assert torch.equal(velocity("reference"), first)
    assert not torch.equal(velocity("default"), first)
    assert not torch.equal(velocity("old"), first)
    names = {name for name, p in model.transformer.named_parameters() if p.requires_grad}
    assert names == set(trainer.params)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_reference_whatever_became_of_the_file(
    tmp_path: Path, tiny_sd3: Path, adapter: Path
) -> None:
    file = tmp_path / "start" / "model.safetensors"
    file.parent.mkdir()
    weights = load_file(adapter / "model.safetensors")
    (file.parent / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    save_file(weights, file)
    config, options = nft_toml(tmp_path, tiny_sd3), (f"--policy.lora.lora_path={file.parent}",)
    run = nft_train(config, *options)
    state = saved_state(run, 3)
    kept = {key.removeprefix("reference."): value for key, value in state.items() if key.startswith("reference.")}
    assert kept.keys() == {key.removeprefix("model.") for key in state if key.startswith("model.")}
    save_file({key: value + 0.01 for key, value in weights.items()}, file)
    drop_steps_after(run, 1)
    nft_train(config, *options, resume=(run, 1))
    assert_same_state(saved_state(run, 3), state)
    drop_steps_after(run, 1)
    nft_train(config, *options, "--train.train_policy.kl_beta=0.0", resume=(run, 1))  # needs none


def test_a_fresh_adapter_needs_no_copy(tmp_path: Path, tiny_sd3: Path, adapter: Path) -> None:
    config = nft_toml(tmp_path, tiny_sd3)
    assert nft_trainer(config, start=False).policies.reference_state() == {}
    off = (starts(adapter)["loaded"], "--train.train_policy.kl_beta=0.0")
    assert nft_trainer(config, *off, start=False).policies.reference_state() == {}
    run = nft_train(config, *off, "--train.max_num_steps=1")
    with pytest.raises(UserError, match="and whether kl_beta is 0 must be as in the saved run"):
        nft_train(config, *off[:1], resume=(run, 1))


def test_the_memory_estimate_counts_the_copy(write_nft_toml: Callable[..., Path]) -> None:
    sizes = []
    for options in ([], ["--policy.lora.init_lora_weights=false"]):
        config = load_config(write_nft_toml(), options)
        found = rl_memory(config, read_pipeline(config.policy), trained=1000, shards=2)
        sizes.append((found.copies.get("reference", 0), found.saved))
    assert sizes[0][0] == 0
    assert sizes[1][0] == 2000
    assert sizes[1][1] - sizes[0][1] == 4000
