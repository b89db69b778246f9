"""docs/metrics.md names every metric that a run logs, and no other."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cosmos_rl.tracking.console import _SHOWN
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "metrics.md"
LOGGED_BY = ("policy/trainer", "optim")
NAMESPACES = "train|val|reward|adv|rollout|optim|guard|time|data"
NO_METRICS = {"val/images"}  # images


def documented() -> set[str]:
    """The names in the first column of the page's tables."""
    cells = re.findall(r"^\| (`[^|]*) \|", PAGE.read_text(), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def pattern(name: str) -> str:
    """A documented name as a regular expression: a placeholder stands for anything."""
    return re.sub(r"<\w+>", "[^/]+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))


def is_documented(name: str) -> bool:
    return any(re.fullmatch(pattern(known), name) for known in documented())


def names_in_the_code() -> Iterator[str]:
    """Texts that look like metrics; ``*`` for what is put in when it runs."""
    for room in LOGGED_BY:
        for path in (ROOT / "cosmos_rl" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_every_metric_in_the_code_is_on_the_page() -> None:
    found = {name for name in names_in_the_code() if re.fullmatch(rf"({NAMESPACES})/[\w/*]+", name)}
    found -= NO_METRICS
    assert len(found) > 30
    known = "\n".join(documented())
    missing = [name for name in found if not re.search("^" + re.escape(name).replace(r"\*", ".+"), known, re.MULTILINE)]
    assert missing == []


def test_what_the_progress_line_shows_is_on_the_page() -> None:
    assert [name for name in _SHOWN if not is_documented(name)] == []


@pytest.mark.slow
def test_the_page_has_the_metrics_of_a_few_runs_and_no_others(
    tmp_path: Path, write_toml: Callable[..., Path], write_nft_toml: Callable[..., Path], image_folder: Path
) -> None:
    from tests.support.nft_runs import nft_train
    from tests.support.trainer_runs import train

    validation = ("--validation.enable=true", "--validation.freq=1", "--train.ckpt.enable_checkpoint=false")
    short = ("--train.max_num_steps=1", "--train.ckpt.export_safetensors=false")
    held_out = f'--validation.sets=[{{name = "pairs", dataset = {{local_dir = "{image_folder}"}}}}]'
    sft = train(write_toml(), *validation, *short, held_out)
    table, rejected = tmp_path / "preferences.jsonl", str(image_folder / "000.png")
    chosen = [str(image_folder / f"{number:03d}.png") for number in range(1, 9)]
    table.write_text("\n".join(json.dumps({"prompt": "one", "chosen": c, "rejected": rejected}) for c in chosen))
    places = [f"--{key}.dataset.local_dir={table}" for key in ("train.train_policy", "validation")]
    rates = ('--train.optm_name="Prodigy"', "--train.optm_lr=1.0")  # for optim/effective_learning_rate
    follows = "--train.train_policy.dpo_auto_beta.target_factor=0.2"
    dpo = train(write_toml(), *validation, *short, "--train.train_policy.type=dpo", follows, *places, *rates)
    untrained = '--validation.local_reward.reward_fns=[{function = "cosmos_rl.reward.examples:brightness"}]'
    job = "--train.train_policy."
    nft = nft_train(
        write_nft_toml(),
        *validation,
        f"--validation.dataset.local_dir={tmp_path}/prompts.txt",
        untrained,
        "--train.max_num_steps=2",
        "--train.param_dtype=float16",
        f"{job}reward_hacking_guard.freq=1",
        f"{job}reward_hacking_guard.action=warn",
        f"{job}data_term.beta=0.1",
        f"{job}data_term.batch_size=4",
        f"{job}data_term.local_dir={image_folder}",
    )
    flow = (
        *short,
        "--train.ckpt.enable_checkpoint=false",
        f"{job}trainer_type=flow_grpo",
        f"{job}norm_penalty=0.1",
        "--policy.diffusers.sample.solver=flow",
        "--policy.diffusers.sample.deterministic_sampling=false",
        f"{job}reward_hacking_guard.enable=false",
    )
    clipped, masked = (nft_train(write_nft_toml(), *flow, *more) for more in ((), (f"{job}kl_mask_threshold=1e-5",)))
    functions = ("cosmos_rl.reward.examples:brightness", "cosmos_rl.reward.examples:sharpness")
    rewards = f'{{function = "{functions[0]}"}}, {{function = "{functions[1]}", weight = 0.0}}'
    gated = (
        f"{job}kl_gate.rewards=['sharpness']",
        f"{job}diversity_features=cosmos_rl.reward.features:thumbnails",
        f"{job}local_reward.reward_fns=[{rewards}]",
        f"{job}dataset.local_dir=",
        f'{job}dataset.sets=[{{local_dir = "{tmp_path}/prompts.txt"}}]',
    )
    moving = (f"{job}kl_beta=0.1", f"{job}reference_reset_kl=0.1")
    plain = (*short, "--train.ckpt.enable_checkpoint=false")
    sets = f'[{{name = "seen", dataset = {{local_dir = "{tmp_path}/prompts.txt", limit = 1}}}}]'
    several = ("--validation.enable=true", f"--validation.sets={sets}")
    forward = nft_train(write_nft_toml(), *plain, f"{job}trainer_type=epg", *moving, *gated, *several)
    runs = (sft, dpo, nft, clipped, masked, forward)
    logged = {name for run in runs for line in read_metrics(run / "metrics.jsonl") for name in line} - {"step"}
    assert [name for name in sorted(logged) if not is_documented(name)] == []
    logged |= {"data/fps_mean"}  # of videos: tests/trainer/test_video_folders.py
    logged |= {"train/one/kl_loss_mean"}  # of several prompt sets: tests/rl/test_teachers_of_sets.py
    stale = [name for name in documented() if not any(re.fullmatch(pattern(name), other) for other in logged)]
    assert stale == []
