"""Cosmos with the package of its guardrail installed, which fails without further packages or turns off gradients."""

import json
import os
import sys
from pathlib import Path

import diffusers
import pytest

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.base import ModelRegistry
from tests.support import patience
from tests.support.family_runs import TrainedFamily, family_toml
from tests.support.paths import ROOT
from tests.support.videos import write_video

CHECKER = """
class CosmosSafetyChecker: ...
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
