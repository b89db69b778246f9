"""Metadata of prompts travel to the reward service, and each sample is scored with its own."""

import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cosmos_rl_reward.payload.metadata import check_counts, parse_line
from cosmos_rl_reward.rewards.function_reward import function_handler

from cosmos_rl.data.prompts import locate_metadata, read_prompts, to_prompt_record
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.environment import inspect_environment
from cosmos_rl.launcher.prompt_lists import prompt_lines
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.policy.trainer.rl.build import list_sent
from cosmos_rl.reward.build import make_rewards
from cosmos_rl.reward.metadata import MAX_LINE, RESERVED, require_sendable
from cosmos_rl.reward.protocol import build_line, request_body
from cosmos_rl.reward.remote import RemoteScorer
from cosmos_rl.tools.dataset.diffusion_nft import training_prompts
from tests.support.nft_runs import nft_toml, nft_trainer, recorded
from tests.support.reward_requests import WAIT, request, table
from tests.support.reward_server import Answer, Job, RewardServer

REMOTE = (
    "--train.train_policy.use_remote_reward=true",
    "--train.train_policy.local_reward={reward_fns = []}",
    '--train.train_policy.remote_reward={batch_size = 3, reward_fns = [{name = "level"}]}',
)
ROWS = [{"level": 0.5, "reference": "a.png"}, {"level": 2, "tags": ["x", "y"]}, {}]


def level(to_be_evaluated: np.ndarray, reference: str | None, metadata: dict[str, Any]) -> float | None:
    """Depends on the metadata alone, except for a little of the image."""
    if metadata["level"] is None:
        return None
    own = metadata["level"] + 10 * len(metadata["tags"] or ()) + 100 * len(reference or "")
    return own + float(to_be_evaluated.mean()) / 255000


def brightness_times_level(to_be_evaluated: np.ndarray, metadata: dict[str, Any]) -> float | None:
    """One prompt is to become bright, another dark."""
    if metadata["level"] is None:
        return None
    return metadata["level"] * float(to_be_evaluated.mean()) / 255


def score_as_the_service(job: Job, reward: str, tries: int, function: Callable[..., float | None] = level) -> Answer:
    """What the service's own code makes of a request."""
    line = parse_line(job.body.partition(b"\n")[0])
    check_counts(line, len(job.array))
    handler = function_handler(function, reward)()
    handler.set_up()
    found = handler.calculate_reward(job.array, line)
    errors = {str(row): why for row, why in found["item_errors"].items()}
    return 200, {"scores": found["scores"], "item_errors": errors}


# ---- the request ---------------------------------------------------------------------------------------------------


def test_every_key_is_a_list_with_one_entry_per_sample() -> None:
    body = request_body(np.zeros((3, 4, 4, 3), np.uint8), ["a", "b", "c"], ROWS, {"level": 1.0}, keys=["never"])
    line, _, payload = body.partition(b"\n")
    assert json.loads(line) == {
        "prompts": ["a", "b", "c"],
        "reward_fn": {"level": 1.0},
        "media_type": "image",
        "level": [0.5, 2, None],
        "reference": ["a.png", None, None],
        "tags": [None, ["x", "y"], None],
        "never": [None, None, None],
        "per_item": ["level", "never", "reference", "tags"],
    }
    assert np.load(io.BytesIO(payload)).shape == (3, 4, 4, 3)


def test_what_gen_eval_reads_travels_under_both_names() -> None:
    row = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "level": 1}
    line = json.loads(build_line(["a"], [row], {"gen_eval": 1.0, "level": 1.0}, "image"))
    assert (line["geneval_tags"], line["geneval_includes"]) == ([row["tag"]], [row["include"]])
    assert (line["tag"], line["include"], line["level"]) == ([row["tag"]], [row["include"]], [1])


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_each_sample_is_scored_with_its_own_metadata_whatever_travels_together(
    server: RewardServer, batch_size: int
) -> None:
    server.pull = score_as_the_service
    rows = [ROWS[k] for k in (0, 1, 1, 0, 2, 1, 2)]
    scorer = RemoteScorer(table("level", batch_size=batch_size), (), ["level", "reference", "tags"])
    try:
        found = scorer.submit(request(7, metadata=rows)).result(WAIT)
    finally:
        scorer.close()
    image = torch.arange(1, 8) / 255000  # the greys of the samples
    own = torch.tensor([500.5, 22, 22, 500.5, torch.nan, 22, torch.nan])
    torch.testing.assert_close(found.values["level"], own.double() + image.double(), equal_nan=True)
    assert found.reasons["level"] == dict.fromkeys((4, 6), "the function returned None")
    assert {tuple(job.line["per_item"]) for job in server.jobs} == {("level", "reference", "tags")}


# ---- what is too long ----------------------------------------------------------------------------------------------


def test_long_metadata_travel_in_more_requests_that_the_service_takes(server: RewardServer) -> None:
    rows = [{"level": k, "picture": "x" * 200_000} for k in range(12)]
    scorer = RemoteScorer(table("level"))
    try:
        found = scorer.submit(request(12, metadata=rows)).result(WAIT)
    finally:
        scorer.close()
    sizes = [len(job.body.partition(b"\n")[0]) for job in server.jobs]
    assert max(sizes) <= MAX_LINE
    assert sorted(len(job.array) for job in server.jobs) == [2, 5, 5]
    assert found.values["level"].tolist() == pytest.approx([(k + 1) / 255 for k in range(12)])
    levels = {
        prompt: one for job in server.jobs for prompt, one in zip(*map(job.line.get, ("prompts", "level")), strict=True)
    }
    assert levels == {f"p{k}": k for k in range(12)}


def test_the_line_of_several_samples_is_no_longer_than_theirs_together() -> None:
    for count in (1, 2, 5):
        about = (["p"] * count, [ROWS[k % 3] for k in range(count)], {"a": 1.0})
        alone = sum(len(build_line(["p"], [row], {"a": 1.0}, "latent", 8.0, ["z"])) for row in about[1])
        for kind in ("image", "video", "latent"):
            assert len(build_line(*about, kind, 8.0, ["z"])) <= alone


def test_a_sample_that_is_too_long_alone_is_refused_with_the_key(start: Callable[..., RemoteScorer]) -> None:
    rows = [{"level": 1, "picture": "x" * MAX_LINE}, {"level": 1}]
    with pytest.raises(UserError, match=r'prompt "p0" and its metadata .* takes 1,048,576 .*longest: "picture"'):
        start("level").submit(request(2, metadata=rows)).result(WAIT)


# ---- what is refused before anything starts ------------------------------------------------------------------------


def problems_of(config: Config) -> list[str]:
    return [line for line in inspect_environment(config, "prompts")[0] if ".jsonl, line" in line]


def config_with(folder: Path, *rows: str, options: Sequence[str] = REMOTE) -> Config:
    path = folder / "own.jsonl"
    path.write_text("\n".join(rows), encoding="utf-8")
    return load_config(nft_toml(folder, folder), [*options, f"--train.train_policy.dataset.local_dir={path}"])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        *(
            (json.dumps({"prompt": "b", name: 1}), f"'{name}' .*its requests have a field of that name; rename")
            for name in sorted(RESERVED)
        ),
        ('{"prompt": "b", "metadata": {"level": NaN}}', "'level' .*a number that is not finite"),
        ('{"prompt": "b", "level": [1, {"deep": 1e999}]}', "'level' .*a number that is not finite"),
        pytest.param(
            json.dumps({"prompt": "b", "level": "x" * MAX_LINE}),
            '1,048,5.. bytes .* takes 1,048,576 .*longest: "level"',
            id="too long",
        ),
    ],
)
def test_metadata_that_cannot_be_sent_are_named_with_file_and_line(tmp_path: Path, row: str, words: str) -> None:
    config = config_with(tmp_path, '{"prompt": "a", "level": 1}', "", row)
    (problem,) = problems_of(config)
    assert problem.startswith(f"{tmp_path / 'own.jsonl'}, line 3: ")
    with pytest.raises(UserError, match=words):
        raise UserError(problem)
    prompts = locate_metadata(read_prompts(tmp_path / "own.jsonl"))
    with pytest.raises(UserError, match=words):
        make_rewards(config, None, validation=False, prompts=prompts)
    local = config_with(tmp_path, '{"prompt": "a", "level": 1}', "", row, options=())
    assert problems_of(local) == []  # functions get a dictionary, which may hold anything


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.int64(3), "found int64; allowed"),
        (Path("x"), "found .*Path; allowed"),
        ([{"deep": "\ud800"}], "half of a char"),
    ],
)
def test_elements_of_a_script_are_named_by_their_number(value: object, words: str) -> None:
    records = [to_prompt_record(raw, i) for i, raw in enumerate(["a", {"prompt": "b", "level": value}])]
    with pytest.raises(UserError, match=f"^data set element 1: metadata 'level' .*{words}"):
        require_sendable(locate_metadata(records))
    with pytest.raises(UserError, match="a key has to be a text"):
        require_sendable([("x", {3: 1})])  # type: ignore[dict-item]


def test_validation_that_asks_the_service_is_checked_too(tmp_path: Path) -> None:
    validation = tmp_path / "val.jsonl"
    validation.write_text('{"prompt": "a", "uuid": "7"}', encoding="utf-8")
    more = [f'--validation={{enable = true, dataset.local_dir = "{validation}"}}']
    (problem,) = problems_of(config_with(tmp_path, '{"prompt": "a"}', options=(*REMOTE, *more)))
    assert f"{validation}, line 1: metadata 'uuid'" in problem
    off = ["--validation.local_reward={reward_fns = []}", "--train.train_policy.remote_reward.scale=0.0"]
    assert problems_of(config_with(tmp_path, '{"prompt": "a"}', options=(*REMOTE, *more, *off))) == []


def test_sets_whose_rewards_do_not_ask_the_service_are_left_alone(tmp_path: Path, server: RewardServer) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("asked", "alone")}
    files["asked"].write_text('{"prompt": "a", "level": 1}', encoding="utf-8")
    files["alone"].write_text('{"prompt": "b", "uuid": "7"}', encoding="utf-8")
    sets = [
        {"local_dir": str(file), "rewards": [name]}
        for name, file in zip(("level", "smooth"), files.values(), strict=True)
    ]
    written = ", ".join("{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in row.items()) + "}" for row in sets)
    local = '--train.train_policy.local_reward={reward_fns = [{function = "tests.support.nft_rewards:smooth"}]}'
    more = (
        *REMOTE,
        local,
        '--train.train_policy.dataset.local_dir=""',
        f"--train.train_policy.dataset.sets=[{written}]",
    )
    config = load_config(nft_toml(tmp_path, tmp_path), list(more))
    assert problems_of(config) == []
    located = list_sent(config, training_prompts(config))
    assert located == [(f"{files['asked']}, line 1", {"level": 1})]
    make_rewards(config, None, validation=False, prompts=located).close()


def test_check_names_the_metadata_of_every_list(tmp_path: Path) -> None:
    config = config_with(tmp_path, *(json.dumps({"prompt": "a", **row}) for row in ROWS))
    _, line = prompt_lines(config)
    keys = "level (2 of 3 prompts), reference (1 of 3 prompts), tags (1 of 3 prompts)"
    assert line == f"train.train_policy.dataset: metadata for the rewards: {keys}"


# ---- a training step -----------------------------------------------------------------------------------------------


def test_a_step_of_diffusion_nft_learns_from_rewards_of_metadata(
    tmp_path: Path, tiny_sd3: Path, server: RewardServer
) -> None:
    """4 prompts of 4 samples, 3 in a request: the advantages are those of the levels, by hand."""
    server.pull = partial(score_as_the_service, function=brightness_times_level)
    levels = {"a": 1.0, "b": -4.0, "c": None, "d": 2.5}
    rows = [
        {"prompt": p, **({} if one is None else {"level": one}), "tags": [], "reference": ""}
        for p, one in levels.items()
    ]
    path = tmp_path / "own.jsonl"
    config = nft_toml(tmp_path, tiny_sd3)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = (f"--train.train_policy.dataset.local_dir={path}", "--train.train_policy.max_missing_frac=0.5")
    task = nft_trainer(config, *REMOTE, *options)
    before = {name: param.detach().clone() for name, param in task.params.items()}
    with recorded() as records:
        metrics = dict(task.train_step(0).metrics)
    assert sum(len(job.array) for job in server.jobs) == 16
    assert max(len(job.array) for job in server.jobs) == 3
    assert metrics["rollout/missing"] == 4
    kept = dict(zip(records[0].prompts, records[0].kept, strict=True))
    assert kept == {"a": True, "b": True, "c": False, "d": True}
    scores: dict[str, list[float]] = {prompt: [] for prompt, one in levels.items() if one is not None}
    for job in server.jobs:
        for prompt, image in zip(job.line["prompts"], job.array, strict=True):
            if prompt in scores:
                scores[prompt].append(levels[prompt] * float(image.mean()) / 255)
    everything = np.concatenate([scores[prompt] for prompt in scores])
    assert metrics["reward/level_mean"] == pytest.approx(everything.mean())
    learnt = list(zip(records[0].prompts, records[0].advantages, strict=True))
    for prompt, own in scores.items():
        expected = (np.array(own) - np.mean(own)) / (everything.std() + 1e-4)
        assert sorted(a for p, a in learnt if p == prompt) == pytest.approx(sorted(expected), abs=1e-6)
    assert any(not torch.equal(before[name], param) for name, param in task.params.items())
