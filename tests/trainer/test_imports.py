"""A worker imports only what its job needs of the libraries, and what it left out is there for others."""

import gc
import json
import sys

import pytest

from cosmos_rl.policy.model.imports import disable_gc
from tests.support import patience

LEFT_OUT = """
import json, sys
import cosmos_rl.policy.trainer.diffusers_trainer.build
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

found = {"loaded": [name for name in ("scipy", "torchao", "boto3", "onnxruntime") if name in sys.modules]}
scheduler = FlowMatchEulerDiscreteScheduler(use_beta_sigmas=True)
scheduler.set_timesteps(5)
found["sigmas"] = scheduler.sigmas.tolist()
from transformers.loss.loss_for_object_detection import linear_sum_assignment
found["assigned"] = [place.tolist() for place in linear_sum_assignment([[1.0, 0.0], [0.0, 1.0]])]
import scipy.stats
found["median"] = scipy.stats.norm.ppf(0.5)
print(json.dumps(found))
"""


@pytest.mark.process
def test_what_is_left_out_of_the_libraries_is_imported_when_it_is_used() -> None:
    done = patience.run([sys.executable, "-c", LEFT_OUT])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loaded"] == []
    code = "from diffusers import FlowMatchEulerDiscreteScheduler as S; s = S(use_beta_sigmas=True); s.set_timesteps(5)"
    stock = patience.run([sys.executable, "-c", f"{code}; print(s.sigmas.tolist())"])
    assert found["sigmas"] == json.loads(stock.stdout.splitlines()[-1])
    assert found["assigned"] == [[0, 1], [1, 0]]
    assert found["median"] == 0.0


@pytest.mark.process
def test_a_script_may_import_diffusers_first() -> None:
    code = "import diffusers, cosmos_rl.policy.model.diffusers as ours; print(ours.DiffuserModel.__name__)"
    done = patience.run([sys.executable, "-c", code])
    assert (done.stdout, done.returncode) == ("DiffuserModel\n", 0), done.stderr


def test_objects_are_looked_for_again_after_the_imports() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), disable_gc():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with disable_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
