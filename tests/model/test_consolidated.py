"""Consolidated `.pt` checkpoints of Cosmos-Predict2.5: their names, what is refused, there and back."""

import io
import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CosmosTransformer3DModel
from safetensors.torch import load_file

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.model.consolidated import read_consolidated, to_consolidated, write_consolidated
from tests.support.family_runs import TARGETS, Clips, TrainedFamily, family_toml, folder_of, stock_pipeline
from tests.support.trainer_runs import train

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
NAMES = {  # all layers of the published 2 B and 14 B files, of one block
    "x_embedder.proj.1.weight": "patch_embed.proj.weight",
    "t_embedder.1.linear_1.weight": "time_embed.t_embedder.linear_1.weight",
    "t_embedder.1.linear_2.weight": "time_embed.t_embedder.linear_2.weight",
    "t_embedding_norm.weight": "time_embed.norm.weight",
    "crossattn_proj.0.weight": "crossattn_proj.0.weight",
    "crossattn_proj.0.bias": "crossattn_proj.0.bias",
    "final_layer.adaln_modulation.1.weight": "norm_out.linear_1.weight",
    "final_layer.adaln_modulation.2.weight": "norm_out.linear_2.weight",
    "final_layer.linear.weight": "proj_out.weight",
    "blocks.1.adaln_modulation_self_attn.1.weight": "transformer_blocks.1.norm1.linear_1.weight",
    "blocks.1.adaln_modulation_self_attn.2.weight": "transformer_blocks.1.norm1.linear_2.weight",
    "blocks.1.adaln_modulation_cross_attn.1.weight": "transformer_blocks.1.norm2.linear_1.weight",
    "blocks.1.adaln_modulation_cross_attn.2.weight": "transformer_blocks.1.norm2.linear_2.weight",
    "blocks.1.adaln_modulation_mlp.1.weight": "transformer_blocks.1.norm3.linear_1.weight",
    "blocks.1.adaln_modulation_mlp.2.weight": "transformer_blocks.1.norm3.linear_2.weight",
    "blocks.1.self_attn.q_proj.weight": "transformer_blocks.1.attn1.to_q.weight",
    "blocks.1.self_attn.k_proj.weight": "transformer_blocks.1.attn1.to_k.weight",
    "blocks.1.self_attn.v_proj.weight": "transformer_blocks.1.attn1.to_v.weight",
    "blocks.1.self_attn.q_norm.weight": "transformer_blocks.1.attn1.norm_q.weight",
    "blocks.1.self_attn.k_norm.weight": "transformer_blocks.1.attn1.norm_k.weight",
    "blocks.1.self_attn.output_proj.weight": "transformer_blocks.1.attn1.to_out.0.weight",
    "blocks.1.cross_attn.q_proj.weight": "transformer_blocks.1.attn2.to_q.weight",
    "blocks.1.cross_attn.k_proj.weight": "transformer_blocks.1.attn2.to_k.weight",
    "blocks.1.cross_attn.v_proj.weight": "transformer_blocks.1.attn2.to_v.weight",
    "blocks.1.cross_attn.q_norm.weight": "transformer_blocks.1.attn2.norm_q.weight",
    "blocks.1.cross_attn.k_norm.weight": "transformer_blocks.1.attn2.norm_k.weight",
    "blocks.1.cross_attn.output_proj.weight": "transformer_blocks.1.attn2.to_out.0.weight",
    "blocks.1.mlp.layer1.weight": "transformer_blocks.1.ff.net.0.proj.weight",
    "blocks.1.mlp.layer2.weight": "transformer_blocks.1.ff.net.2.weight",
}


def test_names_are_mapped_there_and_back_and_none_of_the_model_is_forgotten() -> None:
    assert {to_consolidated(name): name for name in NAMES.values()} == NAMES
    with torch.device("meta"):
        model = CosmosTransformer3DModel(
            num_attention_heads=1,
            attention_head_dim=12,
            num_layers=2,
            extra_pos_embed_type=None,
            use_crossattn_projection=True,
        )
    assert {name for name in model.state_dict() if not name.startswith("transformer_blocks.0.")} == set(NAMES.values())


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), float(i)) for i, name in enumerate(NAMES)}


def shapes() -> dict[str, torch.Size]:
    return dict.fromkeys(NAMES.values(), torch.Size([2, 3]))


@pytest.mark.parametrize("wrap", [lambda table: table, lambda table: {"model": table, "step": 3}])
def test_a_checkpoint_as_published_is_read_without_what_is_no_weight(tmp_path: Path, wrap: Any) -> None:
    counters = {"net.accum_iteration": torch.tensor(7), "net.pos_embedder.seq": torch.arange(4)}
    states = {"net.blocks.1.self_attn.q_norm._extra_state": io.BytesIO(b"state"), "net.x_embedder._extra_state": None}
    torch.save(wrap({f"net.{name}": value for name, value in weights().items()} | counters | states), tmp_path / "x.pt")
    found = read_consolidated(tmp_path / "x.pt", shapes())
    assert found.keys() == shapes().keys()
    assert all(torch.equal(found[NAMES[name]], value) for name, value in weights().items())


def test_tensors_that_differ_from_the_model_are_counted_and_the_first_ones_named(tmp_path: Path) -> None:
    changed = weights()
    for name in [name for name in changed if ".cross_attn." in name]:
        del changed[name]
    changed |= {"logvar.0.freqs": torch.zeros(1), "t_embedding_norm.weight": torch.zeros(2)}
    torch.save({f"net.{name}": value for name, value in changed.items()}, tmp_path / "x.pt")
    with pytest.raises(UserError) as error:
        read_consolidated(tmp_path / "x.pt", shapes())
    assert str(error.value).splitlines() == [
        f"{tmp_path / 'x.pt'}: 22 of the 29 tensors of the model can be loaded:",
        "  6 missing:",
        "    blocks.1.cross_attn.q_proj.weight",
        "    blocks.1.cross_attn.k_proj.weight",
        "    blocks.1.cross_attn.v_proj.weight",
        "    blocks.1.cross_attn.q_norm.weight",
        "    blocks.1.cross_attn.k_norm.weight",
        "    and 1 more",
        "  1 unexpected:",
        "    logvar.0.freqs",
        "  1 of another shape:",
        "    t_embedding_norm.weight is [2], in the model [2, 3]",
    ]


class RunsCode:
    """What a pickle may hold: a call that its reader makes."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def test_nothing_in_a_file_is_run_and_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    file, harm = tmp_path / "x.pt", tmp_path / "harm"
    torch.save({"net.x": RunsCode(harm)}, file)
    refuse(file, "cannot be read as weights alone")
    assert not harm.exists()
    torch.save(weights(), file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refuse(file, "not a whole checkpoint of torch")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 10**6)
    refuse(file, "which are not compressed")
    torch.save([torch.zeros(1)], file)
    refuse(file, "holds no table of tensors by name")
    torch.save({"net.x": [1, 2]}, file)
    refuse(file, "x is a list, not a tensor")


def refuse(file: Path, why: str) -> None:
    with pytest.raises(UserError, match=f"{re.escape(str(file))}: .*{why}"):
        read_consolidated(file, shapes())


def test_what_is_written_is_read_back_with_the_same_bits(tmp_path: Path) -> None:
    ours = {NAMES[name]: (value + 0.1).bfloat16().T for name, value in weights().items()}
    write_consolidated(tmp_path / "new/x.pt", ours)
    found = read_consolidated(tmp_path / "new/x.pt", dict.fromkeys(ours, torch.Size([3, 2])))
    assert all(torch.equal(found[name], value) and found[name].dtype == torch.bfloat16 for name, value in ours.items())
    assert set(torch.load(tmp_path / "new/x.pt", weights_only=True)) == {f"net.{name}" for name in NAMES}
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["x.pt"]


def test_a_whole_checkpoint_of_random_weights_is_a_model_and_the_same_checkpoint_again(tmp_path: Path) -> None:
    """Of eleven blocks, so that a number of two digits is among them."""
    generator = torch.Generator().manual_seed(0)
    model = CosmosTransformer3DModel(
        in_channels=5,  # with the mask of given frames; the padding mask is added by the model
        out_channels=4,
        num_attention_heads=1,
        attention_head_dim=12,
        num_layers=11,
        mlp_ratio=2.0,
        text_embed_dim=8,
        adaln_lora_dim=4,
        extra_pos_embed_type=None,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=16,
        encoder_hidden_states_channels=8,
    )
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    inside = {name: ours for name, ours in NAMES.items() if name.startswith("blocks.1.")}
    older = {name: ours for name, ours in NAMES.items() if name not in inside}
    for block in range(11):
        older |= {
            name.replace("blocks.1.", f"blocks.{block}."): ours.replace("blocks.1.", f"blocks.{block}.")
            for name, ours in inside.items()
        }
    file = {f"net.{name}": torch.randn(shapes[ours], generator=generator) for name, ours in older.items()}
    torch.save({"model": file}, tmp_path / "older.pt")
    found = read_consolidated(tmp_path / "older.pt", shapes)
    loaded = model.load_state_dict(found, strict=True)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    assert all(torch.equal(found[ours], file[f"net.{name}"]) for name, ours in older.items())
    write_consolidated(tmp_path / "again.pt", model.state_dict())
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again.keys() == file.keys()
    assert all(torch.equal(again[name], value) for name, value in file.items())


def test_command_lines_that_cannot_work_end_before_torch_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "x"), "--format", "cosmos-pt"]) == 2
    assert "--format cosmos-pt writes one file, name it <name>.pt" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "x.pt"), "--base", "a/b", "--out", str(tmp_path / "x")]) == 2
    assert f"{tmp_path / 'x.pt'}: no such file" in capsys.readouterr().err


def test_a_file_is_for_cosmos_alone(tmp_path: Path, tiny_sd3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_consolidated(tmp_path / "x.pt", {"a.weight": torch.zeros(1)})
    assert main(["import", str(tmp_path / "x.pt"), "--base", str(tiny_sd3), "--out", str(tmp_path / "x")]) == 2
    assert (
        "a StableDiffusion3Pipeline; .pt checkpoints are only for Cosmos2_5_PredictBasePipeline"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.zoo
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_trained_policy_leaves_and_comes_back_as_a_base(
    tmp_path: Path, lora: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    family = TrainedFamily("cosmos-predict2.5", frames=("num_frames", 5))
    config = family_toml(tmp_path, family, job="sft", lora=lora, images=tmp_path)
    run = train(config, "--train.max_num_steps=2", dataset=Clips(5), val_dataset=None)
    shutil.copyfile(config, run / "config.toml")  # as a launch leaves it
    file, back = tmp_path / "policy.pt", tmp_path / "back"
    assert main(["export", str(run / "checkpoints/step_2"), "--out", str(file), "--format", "cosmos-pt"]) == 0
    base = str(folder_of("cosmos-predict2.5"))
    assert main(["import", str(file), "--base", base, "--out", str(back)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(back)
    assert json.loads((back / "model_index.json").read_text())["safety_checker"] == [None, None]
    made, before = load_file(back / WEIGHTS), load_file(Path(base) / WEIGHTS)
    changed = {name for name, value in made.items() if not torch.equal(value, before[name])}
    if lora:
        assert changed == {name for name in before if name.endswith(tuple(f"{end}.weight" for end in TARGETS))}
        merged = stock_pipeline(base)
        merged.load_lora_weights(str(run / "safetensors/step_2/lora"), weight_name="model.safetensors")
        merged.fuse_lora()
        merged.unload_lora_weights()
        expected = merged.transformer.state_dict()
        assert all((made[name] - value).abs().max() <= 1e-6 for name, value in expected.items())
    else:
        expected = load_file(run / "safetensors/step_2" / WEIGHTS)
        assert changed
        assert all(torch.equal(made[name], value) for name, value in expected.items())
    assert made.keys() == expected.keys()
    train(config, "--train.max_num_steps=1", f"--policy.model_name_or_path={back}", dataset=Clips(5), val_dataset=None)
