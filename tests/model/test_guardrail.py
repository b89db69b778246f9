"""Cosmos with the package of its guardrail installed, which fails without further packages or turns off gradients."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.api import FinishedRun
from cosmos_rl.policy.model.base import ModelRegistry
from tests.support import patience
from tests.support.family_runs import Clips, TrainedFamily, family_toml, folder_of, stock_pipeline
from tests.support.paths import ROOT
from tests.support.trainer_runs import train
from tests.support.videos import write_video

CHECKER = """
import torch
class CosmosSafetyChecker(torch.nn.Module):
    device, dtype = torch.device("cpu"), torch.float32
    def check_text_safety(self, prompt):
        return "forbidden" not in prompt
    def check_video_safety(self, frames):
        return frames
"""
NO_GRADIENTS = "import torch\ntorch.set_grad_enabled(False)\n"  # as one of the packages that it imports does
INCOMPLETE = "import a_package_that_is_not_there\n"  # as after `pip install cosmos_guardrail --no-deps`


def run_beside(guardrail: str, folder: Path, code: str, *arguments: str) -> str:
    """Output of Python code beside an installed guardrail that begins with ``guardrail``."""
    package = folder / "installed" / "cosmos_guardrail"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(guardrail + CHECKER)
    described = package.parent / "cosmos_guardrail-0.3.2.dist-info"  # diffusers asks for the version
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: cosmos_guardrail\nVersion: 0.3.2\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(package.parent)])}
    done = patience.run([sys.executable, "-c", code, *arguments], env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.zoo
def test_cosmos_trains_with_the_guardrail_installed(tmp_path: Path) -> None:
    for number in range(4):
        write_video(tmp_path / "clips" / f"{number}.mp4", 5)
        (tmp_path / "clips" / f"{number}.json").write_text(json.dumps({"prompt": f"clip {number}"}))
    family = TrainedFamily("cosmos-predict2.5", frames=("num_frames", 5))
    config = family_toml(tmp_path, family, job="sft", images=tmp_path / "clips")
    code = "import sys; from cosmos_rl.launcher.cli import main; sys.exit(main())"
    script = "cosmos_rl.tools.dataset.diffusers_dataset"
    run_beside(NO_GRADIENTS + INCOMPLETE, tmp_path, code, "--config", str(config), "--train.max_num_steps=2", script)
    (metrics,) = (tmp_path / "out").glob("2*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["optim/grad_norm"] > 0 for step in steps] == [True, True]


@pytest.mark.zoo
def test_gradients_stay_on_in_a_script_that_imports_diffusers_first(tmp_path: Path) -> None:
    code = """
import diffusers, torch
from cosmos_rl.policy.model.base import ModelRegistry
ModelRegistry.model_class("Cosmos2_5_PredictBasePipeline")
print("cosmos_guardrail" in sys.modules, torch.is_grad_enabled())
"""
    assert run_beside(NO_GRADIENTS, tmp_path, f"import sys{code}").splitlines()[-1] == "True True"


def test_a_pipeline_class_that_diffusers_cannot_import_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = vars(diffusers)["_class_to_module"]
    monkeypatch.setitem(where, "NewPipeline", "pipelines.a_package_that_is_not_there")
    with pytest.raises(UserError, match=r"NewPipeline: diffusers cannot import it \(No module named .*install what is"):
        ModelRegistry.model_class("NewPipeline")


class OwnChecker:
    """What a user may give in the place of the guardrail."""

    def to(self, device: object) -> None: ...

    def check_text_safety(self, prompt: str) -> bool:
        return prompt != "forbidden"

    def check_video_safety(self, frames: Any) -> Any:
        return frames


SAMPLED = """
from PIL import Image
if "image" not in dir():
    image = pipe(prompt="the sea", height=32, width=32, num_frames=5, num_inference_steps=2).frames[0][-1]
print(type(pipe.safety_checker).__module__, image.size)
try:
    pipe(prompt="a forbidden place", height=32, width=32)
except ValueError as error:
    print(error)
"""


def run_card(export: Path, base: Path, folder: Path) -> list[str]:
    """What `SAMPLED` prints after the code of an export's card, with the guardrail installed."""
    card = (export / "README.md").read_text()
    assert "`pip install cosmos_guardrail`" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    code = code.replace("path/to/the/base", str(base)).replace("path/to/this/folder", str(export))
    return run_beside("", folder, code + SAMPLED).splitlines()[-2:]


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["cosmos-predict2", "cosmos-predict2.5"])
def test_an_export_of_all_weights_loads_in_diffusers_by_the_code_of_its_card(
    tmp_path: Path, image_folder: Path, name: str
) -> None:
    family = TrainedFamily(name, frames=("num_frames", 5) if name == "cosmos-predict2.5" else None)
    config = family_toml(tmp_path, family, job="sft", lora=False, images=image_folder)
    data: dict[str, Any] = {"dataset": Clips(5)} if family.frames else {}
    run = train(config, "--train.max_num_steps=1", **data)
    export = run / "safetensors/step_1"
    sampled, refused = run_card(export, folder_of(name), tmp_path)
    assert sampled == "cosmos_guardrail (32, 32)"
    assert "Cosmos Guardrail detected unsafe text" in refused
    with pytest.raises(ImportError, match="pip install cosmos_guardrail"):
        DiffusionPipeline.from_pretrained(str(export))
    finished = FinishedRun(run, stopped=False, base=str(folder_of(name)))
    with pytest.raises(UserError, match=r"hides safety_checker from diffusers.*run\.pipeline\(safety_checker=\.\.\.\)"):
        finished.pipeline()
    results = []
    for pipe in (stock_pipeline(export), finished.pipeline(safety_checker=OwnChecker())):
        arguments = family.call(["the sea"], 2.0)
        result = pipe(**arguments, generator=torch.Generator().manual_seed(0), output_type="pt")
        results.append(result.frames if family.frames else result.images)
    assert torch.equal(results[0], results[1])
    with pytest.raises(ValueError, match="Guardrail detected unsafe text"):
        pipe(**family.call(["forbidden"], 2.0))


@pytest.mark.zoo
def test_an_adapter_loads_in_diffusers_by_the_code_of_its_card(tmp_path: Path) -> None:
    family = TrainedFamily("cosmos-predict2.5", frames=("num_frames", 5))
    config = family_toml(tmp_path, family, job="sft", images=tmp_path)
    run = train(config, "--train.max_num_steps=1", dataset=Clips(5))
    base = tmp_path / "base"
    shutil.copytree(folder_of(family.name), base)
    index = json.loads((base / "model_index.json").read_text())
    (base / "model_index.json").write_text(json.dumps(index | {"safety_checker": [None, None]}))
    sampled, refused = run_card(run / "safetensors/step_1/lora", base, tmp_path)
    assert sampled == "cosmos_guardrail (32, 32)"
    assert "Cosmos Guardrail detected unsafe text" in refused
