"""The gate of the driver: what may not be driven is refused with the check's name, what may leaves no trace."""

import copy
import gc
import inspect
import itertools
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3 import pipeline_stable_diffusion_3 as sd3_module
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import DiffusersConfig
from cosmos_rl.policy.model import tiny
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.driver.contract import Level, Size
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.facts import cache_key
from cosmos_rl.policy.model.driver.loading import load_pipeline
from cosmos_rl.policy.model.driver.probe import prove
from tests.support.driven import PROMPTS, STEPS, generators

CALL = {"max_sequence_length": 16}
STEP = "latents = self.scheduler.step(noise_pred, t, latents, return_dict=False)[0]"
MIX = "noise_pred = noise_pred_uncond + self.guidance_scale * (noise_pred_text - noise_pred_uncond)"
MOMENTUM = (
    STEP,
    "self._kept = 0.9 * getattr(self, '_kept', 0.0) + noise_pred\n            "
    + STEP.replace("noise_pred", "self._kept"),
)


@pytest.fixture(scope="module")
def pipeline(tiny_sd3: Path) -> Any:
    return load_pipeline(str(tiny_sd3))


@pytest.fixture(scope="module")
def driver(pipeline: Any) -> Driver:
    made = Driver(pipeline, call=CALL)
    prove(made)
    return made


def edited(pipeline: Any, old: str, new: str) -> Any:
    """The pipeline as one of a class whose source nobody here prepared: stock but for one line."""
    source = textwrap.dedent(inspect.getsource(StableDiffusion3Pipeline.__call__))
    assert source.count(old) == 1
    names = {**vars(sd3_module)}
    exec(source.replace(old, new), names)
    edited_class = type("UnheardOfPipeline", (StableDiffusion3Pipeline,), {"__call__": names["__call__"]})
    made = copy.copy(pipeline)
    made.__class__ = edited_class
    return made


def passed(driver: Driver) -> list[str]:
    return [check.name for check in driver.facts.checks]


def test_a_changed_formula_is_driven_as_it_is(pipeline: Any, driver: Driver) -> None:
    other = Driver(edited(pipeline, MIX, MIX.replace("self.guidance_scale", "0.5 * self.guidance_scale")), call=CALL)
    prove(other)
    assert other.facts.pipeline == "UnheardOfPipeline"
    assert passed(other) == passed(driver)
    cond = driver.encode(PROMPTS, guidance=4.0)
    x, level = (
        torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0)),
        driver.training_level(torch.tensor(0.5)),
    )
    with torch.no_grad():
        torch.testing.assert_close(other.velocity(x, level, cond, 8.0), driver.velocity(x, level, cond, 4.0))


@pytest.mark.parametrize("seam", ["encode_prompt", "prepare_latents"])
def test_a_renamed_seam_is_refused_by_name(pipeline: Any, seam: str) -> None:
    renamed = type("RenamedPipeline", (StableDiffusion3Pipeline,), {seam: None, f"do_{seam}": None})
    made = copy.copy(pipeline)
    made.__class__ = renamed
    with pytest.raises(
        UserError, match=rf"RenamedPipeline cannot be driven: .*seams.*missing {seam}\..*docs/models.md"
    ):
        Driver(made)


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        pytest.param(*MOMENTUM, "velocity() repeats the loop's, bit for bit", id="momentum"),
        pytest.param(
            STEP, STEP + "\n            latents[:, :1] = 0.5", "A transition of ours stays in the loop", id="pinned"
        ),
        pytest.param(STEP, STEP.replace("noise_pred", "noise_pred.detach()"), "Gradients arrive", id="cut graph"),
        pytest.param(
            "latents = (latents / self.vae.config.scaling_factor) + self.vae.config.shift_factor",
            "latents = latents**3",
            "States are a rearrangement",
            id="tail",
        ),
        pytest.param(
            STEP,
            "noise_pred = noise_pred + 0 * torch.randn_like(noise_pred)\n            " + STEP,
            "The global random states were not touched",
            id="global randomness",
        ),
        pytest.param(
            STEP,
            STEP.replace("t, latents", "t, latents + torch.rand(())"),
            "A state can be put into the loop",
            id="noise",
        ),
        pytest.param(
            STEP,
            "raise KeyError('unheard of')",
            'A state can be put into the loop" failed: KeyError',
            id="an error of its own",
        ),
    ],
)
def test_what_cannot_be_driven_is_refused_with_the_name_of_the_check(
    pipeline: Any, old: str, new: str, check: str
) -> None:
    other = Driver(edited(pipeline, old, new), call=CALL)
    weights = copy.deepcopy(pipeline.transformer.state_dict())
    with pytest.raises(UserError, match="UnheardOfPipeline cannot be driven") as refused:
        prove(other)
    assert check in str(refused.value)
    assert "docs/models.md" in str(refused.value)
    for name, weight in pipeline.transformer.state_dict().items():
        assert torch.equal(weight, weights[name])


class BackwardsFlowMatch(FlowMatchEulerDiscreteScheduler):
    """Wants the velocity with the other sign."""

    def step(self, model_output: Any, *args: Any, **kwargs: Any) -> Any:
        return super().step(-model_output, *args, **kwargs)


def test_a_scheduler_that_wants_the_other_sign_is_refused(pipeline: Any) -> None:
    made = copy.copy(pipeline)
    made.__dict__["scheduler"] = BackwardsFlowMatch.from_config(pipeline.scheduler.config)
    with pytest.raises(UserError, match='change of the state per sigma" failed: the first stock step differs.*2.0e'):
        prove(Driver(made, call=CALL))


def test_a_scheduler_without_velocities_is_refused(pipeline: Any) -> None:
    made = copy.copy(pipeline)
    made.__dict__["scheduler"] = DDIMScheduler()
    with pytest.raises(UserError, match='flow-matching one" failed: DDIMScheduler, prediction_type epsilon'):
        prove(Driver(made, call=CALL))


def test_zero_outputs_are_perturbed_for_the_probe_only(tmp_path: Path) -> None:
    """The preset of the quickstart starts with closed gates: every answer is zero."""
    pipeline = load_pipeline(str(tiny.build("sd3", tmp_path / "digits", "digits", seed=0)))
    before = {name: weight.clone() for name, weight in pipeline.transformer.state_dict().items()}
    driver = Driver(pipeline, call=CALL)
    assert prove(driver).perturbed
    cond = driver.encode(PROMPTS)
    with torch.no_grad():
        velocity = driver.velocity(torch.randn(3, 4, 8, 8), driver.training_level(torch.tensor(0.5)), cond)
    assert not velocity.any()
    for name, weight in pipeline.transformer.state_dict().items():
        assert torch.equal(weight, before[name])
    broken = Driver(edited(pipeline, *MOMENTUM), call=CALL)
    with pytest.raises(UserError, match="repeats the loop's"):
        prove(broken)
    for name, weight in pipeline.transformer.state_dict().items():
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_the_hand_written_sd3_has_the_same_velocity(driver: Driver, tiny_sd3: Path, guidance: float) -> None:
    model = SD3Model(DiffusersConfig(max_prompt_length=16, inference_size=(32, 32)), model_str=str(tiny_sd3))
    x = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    theirs = model.encode_prompts(PROMPTS, "" if guidance > 1 else None, each=True)
    ours = driver.encode(PROMPTS, guidance=guidance)
    for sigma in (torch.tensor([0.3, 0.3, 0.3]), torch.tensor([0.1, 0.95, 0.5])):
        with torch.no_grad():
            wanted = model.velocity(x, model.training_level(sigma), theirs, guidance=guidance)
            assert torch.equal(driver.velocity(x, driver.training_level(sigma), ours, guidance), wanted)
    images = 2 * torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2)) - 1
    torch.testing.assert_close(driver.encode_media(images), model.encode_visuals(list(images), 32, 32))


def test_half_precision_keeps_the_pipelines_own_state_dtype(tiny_sd3: Path) -> None:
    driver = Driver(load_pipeline(str(tiny_sd3), dtype=torch.bfloat16), call=CALL)
    prove(driver)
    cond = driver.encode(PROMPTS, guidance=3.0)
    loop = driver.rollout(cond, generators(3), STEPS, 3.0, keep_velocities=True, decode=False)
    assert loop.velocities is not None
    assert {state.dtype for state in loop.states} == {torch.bfloat16} == {driver.state_dtype}
    with torch.no_grad():
        again = driver.velocity(loop.states[1].float(), loop.levels[1], cond, 3.0)
    assert torch.equal(again, loop.velocities[1])


def test_the_pipeline_is_left_as_it_was(pipeline: Any, driver: Driver) -> None:
    before = {**vars(pipeline)}
    states = [{**vars(part)} for part in (pipeline.scheduler, pipeline.transformer, pipeline.vae)]
    cond = driver.encode(PROMPTS, guidance=3.0)
    loop = driver.rollout(cond, generators(3), STEPS, 3.0)
    driver.velocity(loop.states[1], loop.levels[1], cond, 3.0)
    driver.encode_media(torch.zeros(1, 3, 32, 32))
    assert type(pipeline) is StableDiffusion3Pipeline
    assert vars(pipeline) == before
    assert [vars(part) for part in (pipeline.scheduler, pipeline.transformer, pipeline.vae)] == states
    assert not pipeline.transformer._forward_pre_hooks


def test_other_exceptions_pass_through_and_leave_nothing_behind(pipeline: Any, driver: Driver) -> None:
    cond, x = driver.encode(PROMPTS), torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    level = driver.training_level(torch.tensor(0.5))
    with torch.no_grad():
        wanted = driver.velocity(x, level, cond)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    handle = pipeline.transformer.transformer_blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        driver.velocity(x, level, cond)
    with pytest.raises(RuntimeError, match="out of luck"):
        driver.rollout(cond, generators(3), STEPS)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(driver.velocity(x, level, cond), wanted)
    with pytest.raises(ValueError, match="conditions made without guidance"):
        driver.velocity(x, level, cond, 4.0)


def test_threads_do_not_meet(driver: Driver) -> None:
    cond = driver.encode(PROMPTS, guidance=3.0)
    x = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    levels = [driver.training_level(torch.tensor(s)) for s in (0.2, 0.5, 0.8)]
    levels.append(driver.training_level(torch.tensor([0.1, 0.5, 0.9])))
    with torch.no_grad():
        wanted = [driver.velocity(x, level, cond, 3.0) for level in levels]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(5):
            with torch.no_grad():
                if not torch.equal(driver.velocity(x, levels[k], cond, 3.0), wanted[k]):
                    wrong.append(k)
            driver.pack(torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(k)), driver.size)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def tensors_alive() -> int:
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


@pytest.mark.slow
def test_no_tensor_is_kept_over_many_calls(driver: Driver) -> None:
    """Without a run of the garbage collector: a cycle would keep activations until it comes."""
    cond = driver.encode(PROMPTS, guidance=3.0)
    x = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    sigmas = torch.rand(300, 3, generator=torch.Generator().manual_seed(1))

    def call(k: int) -> None:
        with torch.enable_grad():
            driver.velocity(x, driver.training_level(sigmas[k]), cond, 3.0).sum().backward()

    for k in range(100):  # inputs are kept for a bounded number of levels, here fewer than these 300
        call(k)
    gc.collect()
    gc.disable()
    try:
        before = tensors_alive()
        for k in range(100, 300):
            call(k)
        assert tensors_alive() <= before
    finally:
        gc.enable()
        driver.pipeline.transformer.zero_grad(set_to_none=True)


def test_many_sizes_are_not_all_kept(driver: Driver) -> None:
    cond, level = driver.encode(["a"]), driver.training_level(torch.tensor(0.5))
    for high, across in itertools.product(range(1, 5), repeat=2):
        with torch.no_grad():
            driver.velocity(torch.zeros(1, 4, 4 * high, 4 * across), level, cond, size=Size(16 * high, 16 * across))
    assert len(driver._prepared) <= 8


@pytest.mark.slow
def test_a_compiled_denoiser_is_not_compiled_again(tiny_sd3: Path) -> None:
    driver = Driver(load_pipeline(str(tiny_sd3)), call=CALL)
    prove(driver)
    cond, x = driver.encode(PROMPTS), torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = driver.velocity(x, driver.training_level(torch.tensor([0.1, 0.5, 0.9])), cond)
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()  # pyright: ignore
    driver.pipeline.transformer.compile(backend=backend)
    with torch.no_grad():
        driver.velocity(x, driver.training_level(torch.tensor(0.5)), cond)
        driver.velocity(x, driver.training_level(torch.tensor([0.2, 0.4, 0.6])), cond)  # times of another stride
        made = len(graphs)
        for sigma in (0.1, 0.3, 0.7):
            driver.velocity(x, driver.training_level(torch.tensor(sigma)), cond)
        mixed = driver.velocity(x, driver.training_level(torch.tensor([0.1, 0.5, 0.9])), cond)
        driver.rollout(cond, generators(3), STEPS, decode=False)
    assert len(graphs) == made
    assert 0 < made <= 2
    torch.testing.assert_close(mixed, wanted)


def test_facts_are_kept_by_what_they_depend_on(pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prove(Driver(pipeline, call=CALL), cache=tmp_path)
    second_driver = Driver(pipeline, call=CALL)
    with monkeypatch.context() as patch:
        patch.setattr(type(pipeline.transformer), "forward", None)  # nothing is run
        seen: list[str] = []
        second = prove(second_driver, cache=tmp_path, report=lambda check: seen.append(check.name))
    assert second == first
    assert seen == [check.name for check in first.checks]
    assert second_driver.state_dtype == torch.float32
    keys = {
        cache_key(pipeline, CALL, Size(32, 32)),
        cache_key(pipeline, {}, Size(32, 32)),
        cache_key(pipeline, CALL, Size(64, 32)),
        cache_key(edited(pipeline, STEP, STEP), CALL, Size(32, 32)),
    }
    assert len(keys) == 4
    (tmp_path / f"{cache_key(pipeline, CALL, second_driver.size)}.json").write_text("{")
    assert prove(Driver(pipeline, call=CALL), cache=tmp_path) == first


def test_check_model_prints_facts(tiny_sd3: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path))
    assert main(["check-model", str(tiny_sd3), "--max-prompt-length", "16", "--size", "32", "64"]) == 0
    printed = capsys.readouterr().out
    assert "passed  velocity() repeats the loop's, bit for bit" in printed
    for line in ("checked at              32 x 64", "guidance                guidance_scale: one batch; off at 1"):
        assert line in printed
    assert list((tmp_path / "facts").glob("*.json"))


def test_check_model_refuses_with_exit_code_2(tiny_sd3: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["check-model", str(tmp_path)]) == 2
    assert "model_index.json" in capsys.readouterr().err
    assert main(["check-model", str(tiny_sd3), "--size", "32"]) == 2
    assert "H W FRAMES" in capsys.readouterr().err
    folder = tmp_path / "other"
    pipeline = load_pipeline(str(tiny_sd3))
    pipeline.scheduler = DDIMScheduler()
    pipeline.save_pretrained(folder)
    assert main(["check-model", str(folder)]) == 2
    captured = capsys.readouterr()
    assert (
        'StableDiffusion3Pipeline cannot be driven: the check "The scheduler is a flow-matching one" failed'
        in captured.err
    )
    assert "Traceback" not in captured.err


def test_sigmas_may_be_anything_that_broadcasts(driver: Driver) -> None:
    cond, x = driver.encode(PROMPTS), torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one = driver.velocity(x, Level(torch.tensor(500.0), torch.tensor(0.5)), cond)
        rows = driver.velocity(x, Level(torch.full((3,), 500.0), torch.full((3,), 0.5)), cond)
    assert torch.equal(one, rows)
    with pytest.raises(ValueError, match="3 states and 2 conditions"):
        driver.velocity(x, Level(torch.tensor(500.0), torch.tensor(0.5)), cond.rows(torch.tensor([0, 1])))
