"""Names that documents and users' scripts rely on. A change here is a change of the public surface."""

import importlib
import inspect
import re

import pytest

from tests.support.paths import ROOT

NAMES = {
    "cosmos_rl.policy.config": ["Config", "DiffusersConfig"],
    "cosmos_rl.policy.config.wfm": ["RLConfig", "RewardConfig"],
    "cosmos_rl.policy.model.base": ["ModelRegistry"],
    "cosmos_rl.policy.model.diffusers": ["DiffuserModel"],
    "cosmos_rl.policy.model.diffusers.weight_mapper": ["DiffuserModelWeightMapper"],
    "cosmos_rl.policy.model.diffusers.sd3_model": ["SD3Model"],
    "cosmos_rl.policy.model.diffusers.sana_model": ["SanaModel"],
    "cosmos_rl.policy.model.diffusers.cosmos_predict2_5_model": ["CosmosPredict2_5Model"],
    "cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer": ["SFTTrainer"],
    "cosmos_rl.policy.trainer.diffusers_trainer.nft_trainer": ["DiffusionNft", "OnlineTask"],
    "cosmos_rl.launcher.worker_entry": ["main"],
    "cosmos_rl.tools.dataset.diffusers_dataset": ["training_pairs", "validation_data"],
    "cosmos_rl.tools.dataset.diffusion_nft": ["training_prompts", "validation_prompts"],
    "cosmos_rl.tools.dataset.wfm_rl": ["training_prompts", "validation_prompts"],
    "cosmos_rl.tools.dataset.diffusion_grpo": ["training_prompts", "validation_prompts"],
    "cosmos_rl.reward": ["batch_reward"],
    "cosmos_rl.utils.logging": ["logger"],
    "cosmos_rl.diffusion.sampling": ["run_sampling"],
}
MODEL_METHODS = [
    "supported_model_types",
    "text_embedding",
    "visual_embedding",
    "set_scheduler_timestep",
    "add_noise",
    "training_sft_step",
    "velocity",
    "init_output_process",
    "pipeline_with_logprob",
    "nft_prepare_transformer_input",
    "sde_step_with_logprob",
]
FLAGS = ["--config", "--log-dir", "--nproc-per-node", "--max-restarts", "--debug", "--version", "--help"]
FLAGS += ["--wfm-mode", "--diffusion-mode", "--lenient"]


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_where_the_documents_say(module: str) -> None:
    imported = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(imported, name)] == []


def test_the_extension_interface_keeps_its_names() -> None:
    from cosmos_rl.policy.model.base import ModelRegistry
    from cosmos_rl.policy.model.diffusers import DiffuserModel

    assert [name for name in MODEL_METHODS if not callable(getattr(DiffuserModel, name, None))] == []
    assert callable(ModelRegistry.register)
    assert callable(ModelRegistry.build_diffusers_model)


def test_worker_entry_takes_the_documented_arguments() -> None:
    from cosmos_rl.launcher import worker_entry

    parameters = inspect.signature(worker_entry.main).parameters
    taken = {"dataset", "val_dataset", "custom_logger_fns", "hook_fns", "reward_fns", "val_reward_fns", "args"}
    assert taken <= set(parameters)
    assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def test_the_flags_are_the_documented_ones(capsys: pytest.CaptureFixture[str]) -> None:
    from cosmos_rl.launcher.cli import main

    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert sorted(set(re.findall(r"--[a-z-]+", printed)) & set(FLAGS)) == sorted(FLAGS)
    assert all(verb in printed for verb in ("export", "sample", "tiny-model"))


def test_the_class_in_the_documents_is_the_tested_one() -> None:
    page = (ROOT / "docs/new-model.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    tested = (ROOT / "tests/support/my_sana_model.py").read_text().split('"""', 2)[2]
    assert re.sub(r"\s+|#.*", "", code.group(1)) == re.sub(r"\s+|#.*", "", tested)


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []
