"""Metadata of samples reach the rewards: each sample's its own, however jobs are put together."""

import json

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_reward.spool import Spool
from cosmos_rl_reward.worker.frames import score_frames
from cosmos_rl_reward.worker.inputs import group_inputs, merge
from cosmos_rl_reward.worker.scorer import Scorer
from tests.service import Service, body, image
from tests.test_pool import ident, inputs, spooled


def job(levels, *, value=100, note=None, reward="mock", **more):
    """A body as a trainer builds it: a list for each key, and which lists those are."""
    own = {"level": levels, "tags": [["t"] * k for k, _ in enumerate(levels)], "reference": ["r" * k for k in levels]}
    return body(image(value, len(levels)), reward, **own, per_item=[*own], note=note or ["a", "b"], **more)


def expected(levels, value=100):
    """What `moody_reward.level` makes of `job`, by hand."""
    return [pytest.approx(1000 * level + 10 * k + level + value / 1000) for k, level in enumerate(levels)]


def test_jobs_with_other_values_of_the_same_fields_are_joined_sample_by_sample(tmp_path):
    found = inputs(
        tmp_path,
        job([5, 6]),
        job([7]),
        job([8, 9]),
        job([1], note=["c"]),  # a value of the whole job that differs
        body(image(1, 2), "mock", level=[3, 4], note=["a", "b"]),  # from an older client
        body(image(1, 2), "mock", level=[3, 4], per_item=["level"], note=["a", "b"]),
        body(image(1, 1), "mock", note=["a", "b"], level=[2], per_item=["level", "level"]),
    )
    groups = group_inputs(found, ())
    assert [[int(one.id[-2:]) for one in group] for group in groups] == [[0, 1, 2], [3], [4], [5, 6]]
    _, joined = merge(groups[0], ())
    assert joined["level"] == [5, 6, 7, 8, 9]
    assert joined["tags"] == [[], ["t"], [], [], ["t"]]
    assert joined["note"] == ["a", "b"]
    assert merge(groups[3], ())[1]["level"] == [3, 4, 2]


def score(tmp_path, name, *bodies, kind="image"):
    """What a reward answers to these jobs, which came together."""
    spool = Spool(tmp_path)
    jobs = [spooled(spool, content, ident(i), kind) for i, content in enumerate(bodies)]
    start = {"op": "score", "name": "own", "self_test": False, "reward_class": "", "function": ""}
    scorer = Scorer({**start, "kwargs": {"device": "cpu"}, **name})
    asked = [{"id": one.id, "path": str(spool.job_path(one.id)), "decoded": ""} for one in jobs]
    return [json.loads(reply["body"]) for reply in scorer.score(asked)]


def test_a_function_gets_the_metadata_of_its_sample(tmp_path):
    function = {"function": "tests.moody_reward:level"}
    results = score(tmp_path, function, job([5, 2]), job([3], value=50), job([4, 1, 0]))
    assert [one["scores"]["own"] for one in results] == [expected([5, 2]), expected([3], 50), expected([4, 1, 0])]


def test_a_sample_without_a_value_is_null_and_the_others_keep_theirs(tmp_path):
    content = body(
        image(0, 2), level=[None, 1], tags=[None, []], reference=[None, ""], per_item=["level", "tags", "reference"]
    )
    (result,) = score(tmp_path, {"function": "tests.moody_reward:level"}, content)
    assert result["scores"]["own"] == [None, 1000.0]
    assert result["item_errors"] == {"0": "the function returned None"}


def test_a_value_of_the_whole_job_is_not_divided_because_of_its_length(tmp_path):
    function = {"function": "tests.test_metadata:count_notes"}
    newer, older = body(image(1, 2), note=["a", "b"], per_item=[]), body(image(1, 2), note=["a", "b"])
    assert [one["scores"]["own"] for one in score(tmp_path, function, newer, older)] == [[2.0, 2.0], [1.0, 1.0]]


def count_notes(to_be_evaluated, metadata):
    """How many entries the note has; of a text, one."""
    return len(metadata["note"]) if isinstance(metadata["note"], list) else 1


def test_merged_jobs_get_the_levels_of_their_own_samples(tmp_path):
    merged = {"reward_class": "tests.moody_reward:Levels"}
    results = score(tmp_path, merged, job([5, 2]), job([3]), body(image(1), "mock"), job([4, 1, 0]))
    assert [one["scores"]["levels"] for one in results] == [[5, 2], [3], [0], [4, 1, 0]]
    assert [one["scores"]["together"][0] for one in results] == [6, 6, 1, 6]


def test_a_picture_is_compared_with_the_reference_of_its_own_prompt(tmp_path):
    pictures = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)
    for name, picture in zip("abc", pictures, strict=True):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
    options = {"device": "cpu", "options": {"reference_dir": str(tmp_path)}}
    reward = {"reward_class": "reward_examples.measured:SsimToReference", "kwargs": options}
    asked = body(pictures, "own", references=["a.png", "c.png", None], per_item=["references"])
    (result,) = score(tmp_path / "spool", reward, asked)
    own, other, missing = result["scores"]["ssim_to_reference"]
    assert own == pytest.approx(1)
    assert other < 0.5
    assert missing is None
    assert result["item_errors"] == {"2": "metadata.references: expected a file name or a data URI"}


def test_a_function_gets_the_reference_that_its_sample_has_under_either_name(tmp_path):
    own = {"references": ["a", None, None], "reference": ["ccc", "bb", None]}
    (result,) = score(
        tmp_path, {"function": "tests.test_metadata:reference_length"}, body(image(0, 3), **own, per_item=[*own])
    )
    assert result["scores"]["own"] == [1, 2, 0]


def reference_length(to_be_evaluated, reference):
    return len(reference or "")


def test_frames_get_the_metadata_of_their_video():
    videos, seen = np.zeros((2, 3, 3, 4, 4), np.uint8), []

    def keep(images, metadata):
        seen.append((metadata["level"], metadata["note"]))
        return {"scores": {"x": metadata["level"]}}

    about = {"prompts": ["a", "b"], "level": [5, 7], "note": ["n", "m"], "per_item": ["level"]}
    result = score_frames(videos, about, np.arange(3), 4, keep)
    assert seen == [([5, 5, 5, 7], ["n", "m"]), ([7, 7], ["n", "m"])]
    assert result["scores"]["x"] == [5, 7]


@pytest.mark.process
def test_a_running_service_gives_every_sample_the_score_of_its_metadata(tmp_path):
    rewards = [
        {"reward_type": "levels", "reward_class": "moody_reward:Levels", "max_wait_ms": 1500},
        {"reward_type": "level", "function": "moody_reward:level", "self_test": False},
    ]
    asked = {"levels": 1, "level": 1}
    with Service(tmp_path, {"reward_args": rewards}) as service:
        sizes = [[k, *range(k % 3)] for k in range(9)]
        jobs = [service.enqueue(job(levels, value=k, reward_fn=asked)) for k, levels in enumerate(sizes)]
        together = []
        for k, (answer, levels) in enumerate(zip(jobs, sizes, strict=True)):
            assert answer.status_code == 200, answer.text
            found = service.result(answer.json()["uuid"], "levels")["scores"]
            assert found["levels"] == levels
            together.append(found["together"][0])
            assert service.result(answer.json()["uuid"], "level")["scores"]["level"] == expected(levels, k)
        assert max(together) > max(map(len, sizes))  # several jobs did share a call
        refused = service.enqueue(body(image(1, 2), "level", level=[1], per_item=["level"]))
        assert refused.status_code == 400
        assert "metadata.level: has 1 entries, but the payload has 2 samples" in refused.text
