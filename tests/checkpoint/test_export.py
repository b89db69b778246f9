"""Exports are proved: loaded by the documents' own snippet they give the trainer's images."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import export_to_video
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cosmos_rl.data.videos import count_frames
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model import lora
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.model.lora import adapter_state
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from tests.support.exports import PROMPT, noise_for, policy_image, snippet
from tests.support.family_runs import Clips, TrainedFamily, family_toml, folder_of
from tests.support.states import saved_state
from tests.support.trainer_runs import train, train_task

LORAS = {
    "alpha is the rank": "r = 4\nlora_alpha = 4",
    "rank and alpha differ": "r = 4\nlora_alpha = 16",
    "rslora": "r = 4\nlora_alpha = 6\nuse_rslora = true",
    "patterns": 'r = 4\nlora_alpha = 8\nr_pattern = { "attn.to_q" = 2, "transformer_blocks.1.attn.to_v" = 6 }\n'
    'alpha_pattern = { "attn.to_k" = 20 }',
}


def loaded_by_the_other_rule(base: str, adapter_dir: Path, latents: torch.Tensor) -> torch.Tensor:
    """As ComfyUI and what follows it load: base + up @ down x (alpha tensor / r where there is one, else 1)."""
    pipe: Any = DiffusionPipeline.from_pretrained(base, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    state = load_file(adapter_dir / "model.safetensors")
    names = [key.removesuffix(".lora_A.weight") for key in state if key.endswith(".lora_A.weight")]
    assert len(names) == 8
    for name in names:
        down, up = state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"]
        alpha = state.get(f"{name}.alpha")
        weight = pipe.transformer.get_submodule(name.removeprefix("transformer.")).weight
        weight.data += up @ down * (1.0 if alpha is None else float(alpha) / len(down))
    result = pipe(
        prompt=PROMPT, num_inference_steps=4, guidance_scale=4.5, latents=latents, height=32, width=32, output_type="pt"
    )
    return result.images


@pytest.mark.slow
@pytest.mark.parametrize("ema", [False, True], ids=["live", "ema"])
@pytest.mark.parametrize("name", LORAS)
def test_the_lora_snippet_gives_the_trainers_image(
    write_toml: Callable[..., Path], tiny_sd3: Path, name: str, ema: bool
) -> None:
    table = f'[policy.lora]\n{LORAS[name]}\ntarget_modules = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]\n'
    config = write_toml(table + 'init_lora_weights = "gaussian"', lora=False)
    run, trainer = train_task(
        build_sft,
        config,
        "--policy.diffusers.max_prompt_length=256",  # what the pipeline call of the snippet uses
        f"--train.ema_enable={str(ema).lower()}",
        "--train.ema_decay=0.5",
    )
    noise = noise_for(trainer.model)
    ours = policy_image(trainer, noise)
    theirs = snippet(str(tiny_sd3), run / "safetensors/step_6/lora", noise)
    assert (ours - theirs).abs().max() <= 1e-5
    assert (theirs - snippet(str(tiny_sd3), None, noise)).abs().max() > 1e-3
    others = loaded_by_the_other_rule(str(tiny_sd3), run / "safetensors/step_6/lora", noise)
    assert (ours - others).abs().max() <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("ema", [False, True], ids=["live", "ema"])
def test_the_full_pipeline_snippet_gives_the_trainers_image(
    write_toml: Callable[..., Path], tiny_sd3: Path, ema: bool
) -> None:
    run, trainer = train_task(
        build_sft,
        write_toml(lora=False),
        "--policy.diffusers.max_prompt_length=256",
        f"--train.ema_enable={str(ema).lower()}",
        "--train.ema_decay=0.5",
        "--train.ckpt.save_freq=3",
    )
    noise = noise_for(trainer.model)
    export = run / "safetensors/step_6"
    theirs = snippet(str(export), None, noise)
    assert (policy_image(trainer, noise) - theirs).abs().max() <= 1e-5
    assert (theirs - snippet(str(tiny_sd3), None, noise)).abs().max() > 1e-3
    index: Any = DiffusionPipeline.load_config(export)
    assert index["_class_name"] == "StableDiffusion3Pipeline"
    # frozen parts of a run's exports share their bytes, the transformers do not
    vae, transformer = "vae/diffusion_pytorch_model.safetensors", "transformer/diffusion_pytorch_model.safetensors"
    assert (export / vae).samefile(run / "safetensors/step_3" / vae)
    assert (export / vae).read_bytes() == (tiny_sd3 / vae).read_bytes()
    assert not (export / vae).samefile(tiny_sd3 / vae)
    assert not (export / transformer).samefile(run / "safetensors/step_3" / transformer)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_the_snippets_write_the_video_of_a_video_model(tmp_path: Path, lora: bool) -> None:
    family = TrainedFamily("sana-video", frames=("frames", 5))
    config = family_toml(tmp_path, family, job="sft", lora=lora, images=tmp_path)
    run = train(config, "--train.max_num_steps=1", dataset=Clips(5))
    base = folder_of(family.name) if lora else run / "safetensors/step_1"
    pipe: Any = DiffusionPipeline.from_pretrained(str(base), torch_dtype=torch.float32)
    if lora:
        adapter = str(run / "safetensors/step_1/lora")
        pipe.load_lora_weights(adapter, weight_name="model.safetensors", adapter_name="default")
        pipe.set_adapters("default")
    result = pipe(**family.call(["the sea"], 4.5))
    assert not hasattr(result, "images")
    export_to_video(result.frames[0], str(tmp_path / "sample.mp4"), fps=16)
    assert count_frames(tmp_path / "sample.mp4") == 5


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_bf16_export_holds_the_bf16_cast_policy(write_toml: Callable[..., Path], lora: bool) -> None:
    run, trainer = train_task(build_sft, write_toml(lora=lora), "--train.param_dtype=bfloat16")
    assert {p.dtype for p in trainer.params.values()} == {torch.float32}  # bf16 weights would not feel small steps
    export = run / "safetensors/step_6"
    if lora:
        stored = load_file(export / "lora/model.safetensors")
        own = {f"transformer.{k}": v for k, v in adapter_state(trainer.model.transformer, "default").items()}
        own = {k: v * 2 if ".lora_B." in k else v for k, v in own.items()}  # alpha / r = 8 / 4, folded
    else:
        stored = load_file(export / "transformer/diffusion_pytorch_model.safetensors")
        own = trainer.model.transformer.state_dict()
    assert stored.keys() == own.keys()
    assert all(torch.equal(stored[k], own[k].to(torch.bfloat16)) for k in own)


def test_the_adapter_file_says_how_strongly_it_acts(write_toml: Callable[..., Path], tiny_sd3: Path) -> None:
    run = train(write_toml(), "--train.max_num_steps=1", '--policy.lora.r_pattern={"attn.to_q" = 2}')
    folder = run / "safetensors/step_1/lora"
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
        keys = list(file.keys())
    assert (metadata["transformer.r"], metadata["transformer.lora_alpha"]) == (4, 4)
    assert metadata["transformer.rank_pattern"] == metadata["transformer.alpha_pattern"] == {"attn.to_q": 2}
    assert not metadata["transformer.use_rslora"]
    assert len(keys) == 2 * 2 * 4
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 4)
    assert config["base_model_name_or_path"] == str(tiny_sd3)


def test_without_checkpoints_the_last_step_is_exported_all_the_same(write_toml: Callable[..., Path]) -> None:
    run = train(write_toml(), "--train.ckpt.enable_checkpoint=false", "--train.max_num_steps=2")
    assert not list((run / "checkpoints").iterdir())
    assert (run / "safetensors/step_2/lora/model.safetensors").is_file()


def test_export_safetensors_false_writes_the_last_step_only(write_toml: Callable[..., Path]) -> None:
    run = train(write_toml(lora=False), "--train.ckpt.export_safetensors=false", "--train.ckpt.save_freq=2")
    assert [p.name for p in (run / "safetensors").iterdir()] == ["step_6"]
    pipe: Any = DiffusionPipeline.from_pretrained(run / "safetensors/step_6")
    assert all(part is not None for name, part in pipe.components.items() if not name.startswith(("image", "feature")))


@pytest.mark.slow
@pytest.mark.parametrize("name", LORAS)
def test_a_warm_start_from_an_export_keeps_its_strength(
    write_toml: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """From an export of today, whatever alpha trains it further; and from one as older versions wrote them."""
    table = f'[policy.lora]\n{LORAS[name]}\ntarget_modules = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]\n'
    config = write_toml(table + 'init_lora_weights = "gaussian"', lora=False)
    run = train(config, "--train.max_num_steps=3")
    folder, trained = run / "safetensors/step_3/lora", saved_state(run, 3)

    def products(model: DiffuserModel) -> dict[str, torch.Tensor]:
        """Layer -> factor x up @ down."""
        state, factors = adapter_state(model.transformer, "default"), lora.scales(model.transformer, "default")
        return {k: f * state[f"{k}.lora_B.weight"] @ state[f"{k}.lora_A.weight"] for k, f in factors.items()}

    def built(path: Path, *options: str) -> DiffuserModel:
        overrides = [f"--policy.lora.lora_path={path}", *options]
        return ModelRegistry.build_diffusers_model(load_config(config, overrides))

    same = built(folder)
    own = adapter_state(same.transformer, "default")
    before = {k.removeprefix("model.").replace(".default.", "."): v for k, v in trained.items() if k[:6] == "model."}
    assert before.keys() == own.keys()
    for key, value in before.items():
        torch.testing.assert_close(own[key], value, rtol=1e-6, atol=0)
    expected = products(same)
    stronger = built(folder, "--policy.lora.lora_alpha=32", "--policy.lora.use_rslora=false")
    for key, value in products(stronger).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-8)

    older = tmp_path / "older.safetensors"
    table_then = {f"transformer.{k}": v for k, v in same.transformer.peft_config["default"].to_dict().items()}
    table_then["transformer.target_modules"] = sorted(table_then["transformer.target_modules"])
    weights = {f"transformer.{k}": v.detach().clone() for k, v in own.items()}
    save_file(weights, older, metadata={lora.METADATA_KEY: json.dumps(table_then)})
    for key, value in products(built(older)).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=0)


def test_an_adapter_of_another_name_is_exported_alone_and_loads(
    write_toml: Callable[..., Path], tiny_sd3: Path
) -> None:
    names = ('--policy.lora.lora_names=["first", "second"]', '--policy.lora.primary_adapter="second"')
    run, trainer = train_task(build_sft, write_toml(), *names, "--policy.diffusers.max_prompt_length=256")
    assert all(".second." in name for name in trainer.params)
    noise = noise_for(trainer.model)
    theirs = snippet(str(tiny_sd3), run / "safetensors/step_6/lora", noise)
    assert (policy_image(trainer, noise) - theirs).abs().max() <= 1e-5
    assert (theirs - snippet(str(tiny_sd3), None, noise)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["attn", "to_q", "a.b", ""])
def test_adapter_names_that_collide_with_modules_are_refused(write_toml: Callable[..., Path], name: str) -> None:
    with pytest.raises(UserError, match="cannot name an adapter"):
        train(write_toml(), f'--policy.lora.lora_names=["{name}"]')


def test_initialisations_that_change_the_base_are_refused(write_toml: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="not supported yet: policy.lora.init_lora_weights"):
        train(write_toml(), '--policy.lora.init_lora_weights="pissa"')


def test_an_export_without_hard_links_copies(write_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    run = train(write_toml(lora=False), "--train.ckpt.save_freq=3")
    vae = "vae/diffusion_pytorch_model.safetensors"
    assert (run / "safetensors/step_6" / vae).read_bytes() == (run / "safetensors/step_3" / vae).read_bytes()


@pytest.mark.parametrize("step", [2, 6])
def test_the_end_of_a_resumed_run_is_always_exported(write_toml: Callable[..., Path], step: int) -> None:
    config = write_toml()
    run = train(config, "--train.ckpt.export_safetensors=false", "--train.ckpt.save_freq=2")
    train(config, f"--train.max_num_steps={step}", "--train.ckpt.export_safetensors=false", resume=(run, step))
    assert (run / f"safetensors/step_{step}/lora/model.safetensors").is_file()
    with pytest.raises(UserError, match="is step 6, but this run ends after 3 steps"):
        train(config, "--train.max_num_steps=3", resume=(run, 6))


def lora_weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"safetensors/step_{step}/lora/model.safetensors")


def test_every_key_of_an_exported_adapter_is_one_of_a_pair(write_toml: Callable[..., Path]) -> None:
    for names in ('["default"]', '["default", "old"]'):
        weights = lora_weights(train(write_toml(), "--train.max_num_steps=1", f"--policy.lora.lora_names={names}"), 1)
        assert all(re.fullmatch(r"transformer\.[\w.]+\.lora_[AB]\.weight", key) for key in weights)
        assert not any(part in key for key in weights for part in ("default", "old", "_orig_mod", "_fsdp"))
        assert len(weights) == 2 * 2 * 4  # two matrices, two blocks, four layers
