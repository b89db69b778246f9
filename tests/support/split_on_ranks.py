"""Ranks over which the tokens of denoisers are split, compared with the same denoisers as a whole."""

import copy
import inspect
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cosmos_rl.policy.config import LoraConfig
from cosmos_rl.policy.model import lora
from cosmos_rl.policy.model.checkpointing import checkpoint_blocks
from cosmos_rl.policy.model.context_parallel import split_over_peers
from cosmos_rl.policy.model.driver.loading import load_pipeline
from cosmos_rl.policy.model.tiny.parts import randomise_zeros
from tests.support.driven import CONDITIONED, ORDINARY, ZOO
from tests.support.patience import wait_until
from tests.support.ranks import free_port

PROMPTS = ["a cat", "two red circles & a très odd (prompt)!!"]
FORWARD, BACKWARD = 1e-6, 1e-5
"""Largest differences, as parts of the largest number: of float32 sums in another order."""


class _Caught(Exception):
    pass


def catch_inputs(pipeline: Any, **call: Any) -> dict[str, Any]:
    """What the pipeline's own call gives to its denoiser first, by name, with a time of its own for each row."""
    transformer, caught = pipeline.transformer, {}

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.update(inspect.signature(transformer.forward).bind(*args, **kwargs).arguments)
        raise _Caught

    handle = transformer.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        size = {"height": 32, "width": 32, "num_inference_steps": 2}
        pipeline(generator=torch.Generator().manual_seed(0), **size, **call)
    except _Caught:
        return caught
    finally:
        handle.remove()
    raise AssertionError("the denoiser was not called")


def call_of(family: str) -> dict[str, Any]:
    """Arguments of a call of the family without guidance, of those that need one with an image."""
    if family in CONDITIONED:
        image = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
        call: dict[str, Any] = {"prompt": PROMPTS, "image": image, "guidance_scale": 1.0, "num_frames": 5}
        if family == "flux-kontext":
            return {"prompt": PROMPTS, "image": image, "_auto_resize": False, "max_area": 32 * 32}
        if family == "hunyuan-video-i2v":  # does not take several prompts
            return {**call, "prompt": PROMPTS[:1]}
        return call
    one = next(one for one in (*ORDINARY, *ZOO) if one.name == family)
    call = {"prompt": PROMPTS, one.guidance: one.off, **one.call}
    if one.frames is not None:
        call[one.frames[0]] = one.frames[1]
    return call


def changed(transformer: Any, **changes: Any) -> Any:
    """The same kind of denoiser with another configuration."""
    return randomise_zeros(type(transformer).from_config({**transformer.config, **changes}))


def compare(name: str, denoiser: Any, inputs: dict[str, Any], other: dict[str, Any] | None = None) -> None:
    """Split ``denoiser`` and compare it with itself as it was. ``other``: of a call before the backward pass."""
    group, whole = dist.group.WORLD, copy.deepcopy(denoiser)
    assert group is not None
    split_over_peers(denoiser, group)
    with torch.no_grad():
        outputs = {"output": _call(denoiser, inputs)}, {"output": _call(whole, inputs)}
        _require_equal(f"{name} no_grad", *outputs)
    for kind in ("plain", "checkpointed"):
        if kind == "checkpointed":
            checkpoint_blocks([whole.train(), denoiser.train()], offload=False)
        found = _gradients(denoiser, inputs, other)
        for key, grad in found.items():
            if key not in ("output", "input"):
                dist.all_reduce(grad)
        _require_equal(f"{name} {kind}", found, _gradients(whole, inputs))


def _call(denoiser: Any, inputs: dict[str, Any]) -> Tensor:
    found = denoiser(**{**inputs, "return_dict": False})[0]
    return torch.stack(found) if isinstance(found, list) else found


def _gradients(denoiser: Any, inputs: dict[str, Any], other: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """The output, and the gradients of weights and of the state, of a loss that no two elements enter alike."""
    denoiser.zero_grad(set_to_none=True)
    key = next(iter(inputs))
    state = tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(True), inputs[key])
    output = _call(denoiser, {**inputs, key: state})
    if other is not None:
        with torch.no_grad():
            _call(denoiser, other)
    output.mul(torch.linspace(0, 1, output.numel()).view_as(output)).sum().backward()
    first = state[0] if isinstance(state, list) else state
    found = {name: w.grad.detach().clone() for name, w in denoiser.named_parameters() if w.grad is not None}
    return {**found, "output": output.detach(), "input": first.grad}


def _require_equal(what: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    for name, kinds, most in (("forward", ["output"], FORWARD), ("backward", found.keys() - {"output"}, BACKWARD)):
        if kinds:
            largest = max(float(expected[key].abs().max()) for key in kinds)
            worst = max(kinds, key=lambda key: float((found[key] - expected[key]).abs().max()))
            off = float((found[worst] - expected[worst]).abs().max()) / largest
            print(f"{what} {name} {off:.1e} ({worst})", flush=True)
            assert largest > 1e-4, (what, name, largest)
            assert off <= most, (what, name, worst, off)


def _rows_of_two_times(inputs: dict[str, Any]) -> dict[str, Any]:
    key = "timestep" if "timestep" in inputs else "t"
    time = inputs[key].clone()
    time[1:] = time[1:] / 2
    return {**inputs, key: time}


def _prompts_of_two_lengths(inputs: dict[str, Any]) -> dict[str, Any]:
    """Qwen-Image's inputs with a mask of texts, and half of the image an image that is edited, as of 2511."""
    rows, length, _ = inputs["encoder_hidden_states"].shape
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[0, length // 3 :] = False
    (frames, height, width), *_ = inputs["img_shapes"][0]
    shapes = [[(frames, height // 2, width)] * 2] * rows
    return {**inputs, "encoder_hidden_states_mask": mask, "img_shapes": shapes}


def compare_family(folder: Path, family: str, heads: int) -> None:
    """All weights and an adapter of the tiny model of a family."""
    pipeline = load_pipeline(str(folder))
    inputs = _rows_of_two_times(catch_inputs(pipeline, **call_of(family)))
    denoiser = pipeline.transformer
    if heads:
        denoiser = changed(denoiser, num_attention_heads=heads)
    if family == "sd3":
        denoiser = changed(denoiser, dual_attention_layers=[0])  # as 3.5 medium
    if family == "cosmos-predict2.5":
        denoiser = changed(denoiser, extra_pos_embed_type="learnable")  # as 1.0
    if family == "qwen-image":
        denoiser, inputs = changed(denoiser, zero_cond_t=True), _prompts_of_two_lengths(inputs)
    adapted = copy.deepcopy(denoiser)
    other = None
    if family == "wan":  # lengths that no number of ranks divides, and another one before the backward pass
        other = dict(inputs, hidden_states=inputs["hidden_states"][..., :2])
        one = dict(inputs, hidden_states=torch.randn(2, 16, 1, 2, 2, generator=torch.Generator().manual_seed(2)))
        compare(f"{family} one token, on one rank", copy.deepcopy(denoiser), one)
        inputs = dict(inputs, hidden_states=torch.randn(2, 16, 21, 2, 2, generator=torch.Generator().manual_seed(1)))
    compare(f"{family} all", denoiser, inputs, other)
    adapted.requires_grad_(False)
    names, targets = ("default", "old"), ("to_q", "to_v", "to_out.0")
    lora.add_adapters(adapted, LoraConfig(r=2, lora_names=names, target_modules=targets))
    for parameter_name, weight in adapted.named_parameters():
        if "lora_" in parameter_name:
            nn.init.normal_(weight, std=0.1)
    lora.activate(adapted, "default")
    compare(f"{family} adapter", adapted, inputs)


def compare_on_ranks(ranks: int, families: Sequence[str], folder: Path) -> None:
    """Compare each of ``families`` (name, or name:heads), of which the folder has the tiny models, on so many ranks."""
    context, port = multiprocessing.get_context("forkserver"), free_port()
    context.set_forkserver_preload(["tests.support.split_on_ranks"])
    logs = [folder / f"rank_{rank}.log" for rank in range(ranks)]
    processes = [
        context.Process(target=_as_rank, args=(rank, ranks, port, families, folder, log), daemon=True)
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            wait_until(lambda process=process: process.exitcode is not None, "the end of a rank")
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)


def _as_rank(rank: int, ranks: int, port: int, families: Sequence[str], folder: Path, log: Path) -> None:
    with log.open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    place = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
    for family in families:
        name, _, heads = family.partition(":")
        compare_family(folder / name, name, int(heads or 0))
    dist.destroy_process_group()
