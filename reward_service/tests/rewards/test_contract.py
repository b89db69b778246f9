"""What holds for every reward that comes with the service."""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from cosmos_rl_reward.handler import NotReady, RewardRegistry
from cosmos_rl_reward.rewards import MODULES

ROOT = Path(__file__).parents[2]
PLUG_IN = tomllib.loads((ROOT / "examples" / "rewards" / "pyproject.toml").read_text())
EXAMPLES = PLUG_IN["project"]["entry-points"]["cosmos_rl_reward.rewards"]
PLACES = {
    **{name: f"cosmos_rl_reward.rewards.{module}" for name, module in MODULES.items()},
    **{name: value.partition(":")[0] for name, value in EXAMPLES.items()},
}
HEAVY = ("torch", "transformers", "onnxruntime", "rapidocr", "huggingface_hub", "cv2")
WEIGHTLESS = (
    "brightness_target",
    "jpeg_compressibility",
    "jpeg_incompressibility",
    "motion_smoothness",
    "ocr",
    "sharpness",
    "ssim_to_reference",
)


def handler(name):
    importlib.import_module(PLACES[name])
    return RewardRegistry.get_reward_class(name)


def test_importing_the_modules_loads_nothing_heavy():
    code = (
        "import importlib, json, sys\n"
        "from cosmos_rl_reward.rewards import MODULES\n"
        "for module in set(MODULES.values()): importlib.import_module('cosmos_rl_reward.rewards.' + module)\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(result.stdout) == []


@pytest.mark.parametrize("name", sorted(PLACES))
def test_every_reward_describes_itself(name):
    kind = handler(name)
    assert kind.reward_name == name
    assert kind.score_keys
    assert kind.reward_version
    assert set(kind.media_types) <= {"image", "video"}
    assert kind.__doc__
    with pytest.raises(NotReady, match="no_such_option"):
        kind(options={"no_such_option": 1})
    for image, metadata in kind().probes():
        assert isinstance(image, np.ndarray)
        assert image.dtype == np.uint8
        assert len(image) == 1
        assert image.ndim == (4 if "image" in kind.media_types else 5)
        assert set(kind.required_metadata) <= set(metadata)


@pytest.mark.parametrize("name", WEIGHTLESS)
def test_probes_of_a_reward_without_weights_differ(name):
    reward = handler(name)(device="cpu")
    reward.set_up()
    key = reward.score_keys[0]
    scores = [reward.calculate_reward(*probe)["scores"][key][0] for probe in reward.probes()]
    assert np.isfinite(scores).all()
    assert scores[0] != scores[1]
    json.dumps(reward.provenance())


@pytest.mark.parametrize("name", sorted(PLACES))
def test_the_page_of_rewards_names_its_keys(name):
    page = (ROOT / "docs" / "rewards.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    for key in handler(name).score_keys:
        assert f"`{key}`" in row or (key == name and "**same name**" in row)
    for option in handler(name).OPTIONS:
        assert f"`{option}`" in page or f"`{option} = " in page or f"options.{option}" in page
